"""The state (m, l) of a slice of a row: all that the softmax of the row needs to know about the slice.

    m = max(x)        l = sum(exp(x - m))

The states of two slices merge into the state of both slices together. The merge is associative and commutative,
and its identity is the state of an empty slice, (-inf, 0). So a row can be cut anywhere.

Each kernel language has its own version of these functions, under the same names. One table of laws in the tests
covers all of them.

Method: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from .accumulators import Accumulator, ScaledSum
from .agreement import Announcement, kind_of, numbers_of_all
from .arrays import Array, array_kind, broadcasts, check_plain, is_real_dtype, namespace, quiet
from .processes import device_of_array, gathered_arrays, group_or_default


@dataclass(frozen=True)
class State:
    """The state of one slice, or of many slices at once.

    NumPy input gives NumPy states and results; the same holds for torch and JAX. A state is float32, or float64
    for float64 input. A State can be pickled, sent to another process and merged there.

    Attributes:
        m: Maximum of each slice; -inf for an empty slice. The reduced dimension has size 1.
        l: Sum of exp(x - m) over each slice; 0 for an empty slice. The reduced dimension has size 1.
        dim: The reduced dimension, counted from the end (-1 is the last).
        sums: Further accumulators by name: `sum(w * exp(x - m))` of each slice, for weights w that the caller chose.
            They merge with the same two factors as l, whose weight is 1.
        more: Accumulators of other kinds by name: `PlainSum` and `Argmax` of onlinesoftmax.core.accumulators.

    Example:
        >>> import numpy as np
        >>> x = np.array([[1.0, 2.0, 3.0, 4.0]])
        >>> left, right = State.of(x[:, :1]), State.of(x[:, 1:])
        >>> whole = left.merge(right)
        >>> bool(np.allclose(whole.softmax(x).sum(), 1))
        True
        >>> whole.logsumexp().shape
        (1,)
        >>> state = State.of(x, weights={"x": x})  # the entropy is the logsumexp minus the mean of x
        >>> (state.logsumexp() - state.mean("x")).round(4)
        array([0.9475])
        >>> from onlinesoftmax.core.accumulators import Argmax
        >>> State.of(x, more={"largest": Argmax(x, np.arange(4))}).finish("largest")
        array([3])
    """

    m: Array
    l: Array
    dim: int = -1
    sums: Mapping[str, Array] = field(default_factory=dict)
    more: Mapping[str, Accumulator] = field(default_factory=dict)

    @classmethod
    def identity(
        cls, like: Array, dim: int = -1, weights: Iterable[str] = (),
        more: Mapping[str, type[Accumulator]] | None = None,
    ) -> State:  # fmt: skip
        """Return the state of an empty slice. Merged with any state s, it gives s.

        Args:
            like: Array with the shape and dtype of an input of `of`; the size of `dim` is ignored.
            dim: Dimension that `of` would reduce.
            weights: Names of the sums, all of which are 0.
            more: Accumulators of other kinds, by name.
        """
        xp = namespace(like)
        dim = dim_from_end(dim, like.ndim)
        shape = list(like.shape) or [1]
        shape[dim] = 1
        kinds: dict[str, type[Accumulator]] = {**dict.fromkeys(weights, ScaledSum), **(more or {})}
        found = {name: kind.identity(xp, like, shape) for name, kind in kinds.items()}
        return _state(xp.full(like, shape, -np.inf), xp.full(like, shape, 0.0), dim, found)

    @classmethod
    @quiet
    def of(
        cls, x: Array, dim: int = -1, weights: Mapping[str, Array] | None = None,
        more: Mapping[str, Accumulator] | None = None,
    ) -> State:  # fmt: skip
        """Return the state of `x` along `dim`.

        Args:
            x: Floating-point array of any shape; float16 and bfloat16 are accumulated in float32.
            dim: Dimension to reduce.
            weights: Weights w of further accumulators, by name; each broadcasts to the shape of x.  An element of -inf
                is absent and adds 0, whatever its weight.  Any other element with an infinite weight adds this weight.
            more: Accumulators of the elements, by name, of arrays that broadcast to the shape of x: `PlainSum(w)` for
                the sum of w, `Argmax(key, index)` for the index of the largest key.

        Raises:
            TypeError: x is not a floating-point NumPy, torch or JAX array, or a weight is no array of real numbers of
                the same kind; masked arrays, matrices and DTensors are refused.
            ValueError: a weight does not broadcast to the shape of x, or is on another device.
            RuntimeError: x or a weight is a nested or a sparse tensor.
            IndexError: dim is out of range.
        """
        xp = namespace(x)
        dim = dim_from_end(dim, x.ndim)
        if not isinstance(weights, Mapping | None):
            raise TypeError(f"weights must be a mapping from names to arrays, not {type(weights).__name__}")
        elements: dict[str, Accumulator] = {
            name: ScaledSum(_checked(f"weights[{name!r}]", w, x)) for name, w in (weights or {}).items()
        }
        for name, given in (more or {}).items():
            parts = [_checked(f"more[{name!r}].{part}", t, x) for part, t in given.parts().items()]
            elements[name] = type(given)(*parts)
        x = xp.astype(x, xp.accumulator(x)).reshape(tuple(x.shape) or (1,))
        if x.shape[dim] == 0:
            return cls.identity(x, dim, more={name: type(of_elements) for name, of_elements in elements.items()})
        m = xp.max(x, dim)
        terms = xp.exp(x - shift(xp, m))
        found = {name: of_elements.reduce(xp, x, terms, dim) for name, of_elements in elements.items()}
        return _state(m, xp.sum(terms, dim), dim, found)

    @quiet
    def merge(self, other: State) -> State:
        """Return the state of both slices together. The merge is associative and commutative.

        Raises:
            ValueError: the states were reduced over different dimensions, have different shapes, dtypes or devices, or
                keep different accumulators.
            TypeError: `other` is no state, or the states are arrays of different libraries.
        """
        if not isinstance(other, State):
            raise TypeError(f"merge: other must be a State, not {type(other).__name__}")
        if self.dim != other.dim:
            raise ValueError(f"merge: states reduced over dim {self.dim} and dim {other.dim} do not belong to one row")
        if self.sums.keys() != other.sums.keys():
            raise ValueError(f"merge: states with the sums {sorted(self.sums)} and {sorted(other.sums)} do not match")
        (own, its) = ({name: type(one).__name__ for name, one in state.more.items()} for state in (self, other))
        if own != its:
            raise ValueError(f"merge: states with the accumulators {own} and {its} do not match")
        for name, ours, theirs in self._pairs(other):
            if array_kind(ours) != array_kind(theirs):
                raise TypeError(
                    f"merge: {name} is {type(ours).__name__} in one state and {type(theirs).__name__} in the other"
                )
            if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
                raise ValueError(
                    f"merge: {name} has shape {tuple(ours.shape)} and dtype {ours.dtype} in one state, and "
                    f"{tuple(theirs.shape)} and {theirs.dtype} in the other"
                )
            _check_device(f"merge: {name} of other", theirs, "that of self", ours)
        xp = namespace(self.m)
        m = xp.maximum(self.m, other.m)
        s = shift(xp, m)
        ours, theirs = xp.exp(self.m - s), xp.exp(other.m - s)
        more: Any = other._accumulators
        found = {name: one.merge(more[name], xp, ours, theirs) for name, one in self._accumulators.items()}
        return _state(m, self.l * ours + other.l * theirs, self.dim, found)

    @property
    def _accumulators(self) -> dict[str, Accumulator]:
        """Every accumulator but l, by name."""
        return {**{name: ScaledSum(value) for name, value in self.sums.items()}, **self.more}

    def _pairs(self, other: State) -> Iterator[tuple[str, Array, Array]]:
        """(name, array of this state, array of the other) of each array of a state."""
        yield "m", self.m, other.m
        yield "l", self.l, other.l
        for name in self.sums:
            yield f"sums[{name!r}]", self.sums[name], other.sums[name]
        for name, one in self.more.items():
            its = other.more[name].parts()
            for part, ours in one.parts().items():
                yield f"more[{name!r}].{part}", ours, its[part]

    @staticmethod
    def merge_all(states: Iterable[State]) -> State:
        """Return the state of all slices. The states are merged in pairs, as a tree, in the given order.

        Raises:
            ValueError: there are no states. Without a state the shape of the result is unknown; see `identity`.
        """
        level = list(states)
        if not level:
            raise ValueError("merge_all: states is empty; start from State.identity(like)")
        while len(level) > 1:
            pairs = [a.merge(b) for a, b in zip(level[::2], level[1::2], strict=False)]
            level = pairs + level[len(level) - len(level) % 2 :]
        return level[0]

    def all_reduce(self, group: Any = None) -> State:
        """Return the state of the slices of all processes of a torch process group.

        The processes first compare their states.  Then there is one collective, an all-gather of one packed tensor; an
        `Argmax`, whose indices are integers, needs a second one.
        Every process merges the states in the order of the ranks, so every process gets the same bits.

        Args:
            group: Process group; the default group if None.  NumPy states need a group that exchanges CPU tensors, as
                gloo does.  Every process has a state of the same shape and dtype, with the same accumulators.

        Raises:
            TypeError: the state holds JAX arrays.
            ValueError: the states of the processes have different shapes, dtypes, dimensions or accumulators; every
                process raises this error.
            RuntimeError: no process group is initialised, or another process has ended.

        Example:
            >>> import numpy as np, onlinesoftmax
            >>> with onlinesoftmax.distributed.one_process() as group:  # torchrun starts more processes
            ...     float(State.of(np.zeros(4, np.float32)).all_reduce(group).l[0])
            4.0
        """
        device, group = device_of_array(self.m), group_or_default(group)
        kinds: dict[str, Any] = {"m": kind_of(self.m), "l": kind_of(self.l), "dim": self.dim}
        kinds["sums"] = {name: kind_of(self.sums[name]) for name in sorted(self.sums)}
        if self.more:
            kinds["more"] = {name: type(self.more[name]).__name__ for name in sorted(self.more)}
        numbers_of_all(Announcement.of("State.all_reduce", kinds), 0, (group,), device)
        accumulators = sorted(self._accumulators.items())
        every = gathered_arrays([self.m, self.l, *(t for _, one in accumulators for t in one.parts().values())], group)
        states = []
        for m, l, *parts in every:
            rest = iter(parts)
            found = {name: type(one)(*islice(rest, one.width)) for name, one in accumulators}
            states.append(_state(m, l, self.dim, found))
        return State.merge_all(states)

    @quiet
    def logsumexp(self, keepdim: bool = False) -> Array:
        """Return log(sum(exp(x))) over all merged slices, in the dtype of the state.

        The result is -inf for a slice that is empty or holds only -inf, and +inf if one element is +inf.

        Args:
            keepdim: Keep the reduced dimension with size 1.
        """
        xp = namespace(self.m)
        lse = shift(xp, self.m) + xp.log(self.l)
        return lse if keepdim else lse.squeeze(self.dim)

    @quiet
    def mean(self, name: str, keepdim: bool = False) -> Array:
        """Mean of a weight under the softmax: its accumulator divided by l.

        Raises:
            KeyError: no weight of this name was given to `of`.
        """
        mean = self.sums[name] / self.l
        return mean if keepdim else mean.squeeze(self.dim)

    @quiet
    def finish(self, name: str, keepdim: bool = False) -> Array:
        """Result of an accumulator: the mean of a weight, the sum of a `PlainSum`, the index of an `Argmax`.

        Raises:
            KeyError: the state has no accumulator of this name.
        """
        found = self._accumulators[name].finish(self.l)
        return found if keepdim else found.squeeze(self.dim)

    @quiet
    def softmax(self, x: Array) -> Array:
        """Return exp(x) / sum(exp) with the sum over all merged slices; shape and dtype of x.

        Args:
            x: Slice to normalise: an input of `of`, or any part of one along `dim`.

        Raises:
            TypeError: x is not a floating-point array of the library of the state.
            ValueError: the shape of x differs from that of the state along another dimension than `dim`, or x is on
                another device.
        """
        xp = self._namespace_for("softmax", x)
        y = xp.exp(self._shifted(xp, x)) * _only_finite(xp, self.m, 1 / self.l)
        return xp.astype(y, x.dtype).reshape(x.shape)

    @quiet
    def log_softmax(self, x: Array) -> Array:
        """Return x minus the logsumexp over all merged slices; shape and dtype of x.

        Args:
            x: Slice to normalise: an input of `of`, or any part of one along `dim`.

        Raises:
            TypeError: x is not a floating-point array of the library of the state.
            ValueError: the shape of x differs from that of the state along another dimension than `dim`, or x is on
                another device.
        """
        xp = self._namespace_for("log_softmax", x)
        y = self._shifted(xp, x) - _only_finite(xp, self.m, xp.log(self.l))
        return xp.astype(y, x.dtype).reshape(x.shape)

    def _namespace_for(self, function: str, x: Array) -> Any:
        """The functions for x, after the check that it is a slice of the rows of this state."""
        xp = namespace(x)
        if array_kind(x) != array_kind(self.m):
            raise TypeError(f"{function}: x is {type(x).__name__}, and the state has {type(self.m).__name__}")
        sizes, rows = list(x.shape) or [1], list(self.m.shape)
        if len(sizes) == len(rows):
            sizes[self.dim] = rows[self.dim]
        if sizes != rows:
            raise ValueError(
                f"{function}: x of shape {tuple(x.shape)} is no slice of the rows of a state of shape "
                f"{tuple(self.m.shape)}, which was reduced over dim {self.dim}"
            )
        _check_device(f"{function}: x", x, "the state", self.m)
        return xp

    def _shifted(self, xp: Any, x: Array) -> Array:
        """Return x less the finite number nearest to m, in the dtype of m."""
        return xp.astype(x, self.m.dtype) - shift(xp, self.m)


def shift(xp: Any, m: Array) -> Array:
    """Return the finite number nearest to m. This number is subtracted from x before exp.

    With an infinite m, m - m would be NaN. With the nearest finite number, a slice that holds only -inf has l = 0,
    and a slice with +inf has l = inf; both give the right logsumexp.
    """
    return xp.clip(m)


def _state(m: Array, l: Array, dim: int, accumulators: Mapping[str, Accumulator]) -> State:
    """A state with accumulators of every kind."""
    sums = {name: one.value for name, one in accumulators.items() if isinstance(one, ScaledSum)}
    return State(m, l, dim, sums, {name: one for name, one in accumulators.items() if name not in sums})


def _checked(what: str, w: Array, x: Array) -> Array:
    """An array of an element's accumulator; a number or a list beside a NumPy array becomes an array."""
    kind = array_kind(x)
    check_plain(what, w)
    w = np.asarray(w) if kind == "numpy" and array_kind(w) is None else w
    # JAX's functions take NumPy arrays.
    if array_kind(w) not in (kind, "numpy" if kind == "jax" else kind):
        raise TypeError(f"{what} must be an array of the library of x, not {type(w).__module__}.{type(w).__qualname__}")
    if w.dtype.is_complex if array_kind(w) == "torch" else not is_real_dtype(np.dtype(w.dtype)):
        raise TypeError(f"{what} must hold real numbers, got dtype {w.dtype}")
    if not broadcasts(tuple(w.shape), tuple(x.shape) or (1,)):
        raise ValueError(f"{what} of shape {tuple(w.shape)} does not broadcast to the shape {tuple(x.shape)} of x")
    _check_device(what, w, "x", x)
    return w


def _check_device(what: str, a: Array, beside: str, b: Array) -> None:
    """Check that two torch tensors are on one device; the arrays of other libraries move by themselves, or refuse."""
    if array_kind(a) == array_kind(b) == "torch" and a.device != b.device:
        raise ValueError(f"{what} is on {a.device}, and {beside} on {b.device}")


def _only_finite(xp: Any, m: Array, term: Array) -> Array:
    """Return `term`, or NaN where the maximum is infinite: the softmax of that row is NaN, as in PyTorch."""
    return xp.where(xp.isinf(m), np.nan, term)


def dim_from_end(dim: int, ndim: int) -> int:
    """`dim` counted from the end, from -ndim to -1; a 0-d array counts as one dimension.

    Raises:
        IndexError: dim is out of range.
        TypeError: dim is no integer.
    """
    if isinstance(dim, bool) or not hasattr(dim, "__index__"):
        raise TypeError(f"dim must be an int, not {type(dim).__name__}")
    dim, ndim = operator.index(dim), max(ndim, 1)
    if not -ndim <= dim < ndim:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], but got {dim})")
    return dim if dim < 0 else dim - ndim
