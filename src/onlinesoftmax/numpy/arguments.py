"""The checks of the arguments of calls on NumPy arrays, with the error types of calls on torch tensors.

The rules for all libraries stand in core/arguments.py and in the rooms of the operations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..core.arguments import Kind, Library, check_options, check_range, checked_index_dim
from ..core.arrays import Array, advice, check_plain, is_floating_dtype, is_real_dtype
from ..core.call import Call, Settings
from ..core.options import ScoreOptions
from ..core.task import Choice
from ..ops import CROSS_ENTROPY, TOKEN_LOGPROBS
from ..ops.cross_entropy import arguments as rules
from ..ops.support import check_values, checked_support

ARRAY_TYPES = (np.ndarray, np.generic)
"""Types of the arrays that an argument may be; NumPy's scalars are 0-d arrays."""


def _check_array(caller: str, argument: str, t: Any, x: Any = None) -> None:
    """Check that an argument is an array of real numbers, which is neither masked nor a matrix."""
    if not isinstance(t, ARRAY_TYPES):
        given = f"{type(t).__name__}{advice(type(t))}"
        raise TypeError(f"{caller}: {argument} must be a NumPy array, as input is, not {given}")
    check_plain(f"{caller}: {argument}", t)
    if t.dtype.kind != "c" and not is_real_dtype(t.dtype):
        raise TypeError(f"{caller}: {argument} of dtype {t.dtype} does not hold real numbers")


def _kind_of(t: Any) -> Kind:
    if is_floating_dtype(t.dtype):
        return "floating"
    return {"b": "boolean", "i": "integer", "u": "integer"}.get(t.dtype.kind, "other")  # type: ignore[return-value]  # a Kind


def _shape_hint(argument: str, x: Any, target: Any, rows: tuple[int, ...]) -> str:
    if argument == "target" and x.ndim > 2 and target.shape == x.shape[:-1]:
        return "; the classes are dimension 1, as in PyTorch: pass numpy.moveaxis(input, -1, 1)"
    return ""


NUMPY = Library(_check_array, lambda *_: None, _kind_of, lambda *_: True, _shape_hint)
"""NumPy's arrays for the checks that all libraries share.  All of them are in one place."""


def check_choice(name: str, choice: Choice) -> None:
    """Raise an error for a plan that NumPy arrays do not have."""
    if choice.backend not in (None, "eager") or choice.strategy not in (None, "row"):
        raise TypeError(
            f"backend={choice.backend!r}, strategy={choice.strategy!r}: a NumPy array runs on eager/row; "
            "pass a torch tensor"
        )
    if choice.batch_invariant:
        raise TypeError(f"{name}(): batch_invariant: NumPy's sums depend on the shape; pass a torch tensor")


def check_call(call: Call) -> None:
    """Raise an error for arguments that a call on a NumPy array does not support."""
    name, x, dtype = call.operation.name, call.x, call.settings.dtype
    check_choice(name, call.settings.choice)
    if call.out is not None:
        raise TypeError("out: only torch tensors can be written to; a NumPy input gives a new array")
    _check_array(f"{name}()", "input", x)
    if x.dtype.kind == "c":
        raise NotImplementedError(f"{name}(): input of dtype {x.dtype} is complex; pass its real part")
    if not is_floating_dtype(checked_dtype(name, dtype, x)):
        given = f"dtype={np.dtype(dtype)}" if dtype is not None else f"input of dtype {x.dtype}"
        raise NotImplementedError(f"{name}(): {given} is not floating point; pass dtype=")
    check_options(NUMPY, call)


def checked_dtype(name: str, dtype: Any, x: Any) -> np.dtype[Any]:
    """The dtype of the result: that of the input where the call names none."""
    try:
        return np.dtype(x.dtype if dtype is None else dtype)
    except TypeError:
        raise TypeError(f"{name}(): dtype must be one of NumPy's, as input is an array, not {dtype!r}") from None


class Loss(NamedTuple):
    """A checked call of cross_entropy.

    Attributes:
        x, target, weight: The arrays; the weights are float64, or None.
        counts: True for the rows that count.
        reduction, smoothing, z_loss, options: As the arguments of the call.
    """

    x: Array
    target: Array
    weight: Array | None
    counts: Array
    reduction: str
    smoothing: float
    z_loss: float
    options: ScoreOptions | None

    @property
    def axis(self) -> int:
        """The dimension of the classes."""
        return rules.class_dim(self.x)

    @property
    def of_classes(self) -> bool:
        """True where a target is the probability of each class."""
        return is_floating_dtype(self.target.dtype)


def check_tokens(x: Any, index: Any, dim: Any, ignore_index: Any = None, support: Any = None) -> None:
    """Check the arguments, and the range of every index that counts, and of the support.

    Raises:
        IndexError: an index is out of range; the message has its position and its value.
    """
    tokens = checked_tokens(x, index, dim, ignore_index)
    index, tokens_in_row = np.asarray(index), x.shape[tokens.axis]
    if support is not None:
        check_values(f"{TOKEN_LOGPROBS}(): support", np, *int64_support(x, tokens.axis, support), tokens_in_row)
    wrong = ((index < 0) | (index >= tokens_in_row)) & ~tokens.ignored
    check_range(f"{TOKEN_LOGPROBS}(): index", index, tokens_in_row, wrong)


def int64_support(x: Any, axis: int, support: Any) -> tuple[tuple[Any, Any], Any]:
    """Token ids and offsets in int64, after the checks, and the places of a row."""
    token_ids, offsets, n = checked_support(NUMPY, f"{TOKEN_LOGPROBS}()", x, axis, support)
    return (np.asarray(token_ids, np.int64), np.asarray(offsets, np.int64)), np.arange(n)


def checked_loss(x: Any, target: Any, weight: Any, fields: tuple[Any, ...]) -> Loss:
    """The checked call with these arguments; `fields` are those of `Loss` in torch/loss_arguments.py."""
    settings, ignore_index, reduction, smoothing, z_loss, options, inplace = fields
    if inplace:
        raise TypeError(f"{CROSS_ENTROPY}(): inplace_backward: a NumPy array has no gradient; pass a torch tensor")
    ignore_index, smoothing, z_loss = rules.checked_numbers(NUMPY, reduction, (ignore_index, smoothing, z_loss))
    rules.check_arrays(NUMPY, x, target, weight)
    x, target, dim = np.asarray(x), np.asarray(target), rules.class_dim(x)
    classes, counts = x.shape[dim], np.ones((*x.shape[:dim], *x.shape[dim + 1 :]), bool)
    if not is_floating_dtype(target.dtype):
        counts = np.asarray(target != ignore_index)
        wrong = ((target < 0) | (target >= classes)) & counts
        check_range(f"{CROSS_ENTROPY}(): target", target, classes, wrong)
    check_choice(CROSS_ENTROPY.name, settings.choice)
    check_options(NUMPY, Call(CROSS_ENTROPY, x, Settings(dim), options))
    weight = None if weight is None else weight.astype(np.float64)
    return Loss(x, target, weight, counts, reduction, smoothing, z_loss, options)


def dtype_of_loss(dtype: Any, x: Array) -> np.dtype[Any]:
    """The dtype of the loss: that of the logits where the call names none."""
    found = checked_dtype(CROSS_ENTROPY.name, dtype, x)
    if not is_floating_dtype(found):
        raise RuntimeError(f"{CROSS_ENTROPY}(): dtype must be floating point, got {found}")
    return found


class Tokens(NamedTuple):
    """The tokens of a checked call, of which the log-probabilities are wanted.

    Attributes:
        axis: The dimension of the tokens, counted from 0.
        columns: The column of each token, -1 where it is out of range, along that dimension.
        ignored: True where the index is `ignore_index`; it has the shape of the index.
    """

    axis: int
    columns: Array
    ignored: Array


def checked_tokens(x: Any, index: Any, dim: Any, ignore_index: Any) -> Tokens:
    """The tokens of a call, after the checks of its arguments."""
    axis = checked_index_dim(NUMPY, TOKEN_LOGPROBS.name, x, index, dim)
    index = np.asarray(index)
    ignored = np.zeros(index.shape, bool)
    if ignore_index is not None:
        ignored = np.asarray(index == rules.checked_ignore_index(NUMPY, TOKEN_LOGPROBS.name, ignore_index))
    # A large unsigned number is not in range either, so its int64 is not used.
    columns = np.where((index >= 0) & (index < x.shape[axis]), index.astype(np.int64), -1)
    return Tokens(axis, columns if index.ndim == x.ndim else np.expand_dims(columns, axis), ignored)
