"""The public functions for JAX, in the conventions of `jax.nn`: import onlinesoftmax.jax and swap the call.

They work under jit, grad, vmap, jvp, checkpoint and shard_map, for derivatives of every order, and need no torch.
For infinities, NaN, empty arrays and rows without an element they give what `jax.nn` gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..core.arrays import Array
from ..core.operations import OPERATIONS
from ..core.options import ARRAY, SCORE_OPTIONS, ScoreOptions, check_softcap
from ..core.task import Choice
from ..planner.plan import PlanError
from . import ops, primitives

Axis = int | Sequence[int] | None

__all__ = ["log_softmax", "logsumexp", "softmax"]


def softmax(
    x: Array, axis: Axis = -1, where: Array | None = None, *, scale: Any = 1.0, softcap: float | None = None,
    bias: Array | None = None, backend: str | None = None, strategy: str | None = None,
) -> Array:  # fmt: skip
    """The softmax exp(z) / sum(exp(z)) along `axis`: `jax.nn.softmax` of scores z.

    The scores are z = softcap * tanh(scale * x / softcap) + bias.

    Args:
        x: Array of numbers of any shape.  Integers are computed in JAX's default floating dtype; float16 and bfloat16
            are accumulated in float32.
        axis: One axis, several, or None for all of them.
        where: Boolean array that broadcasts to x's shape.  Elements where it is False count for nothing, and their
            output is 0; so is the output of a row without an element.
        scale: A number, or a floating-point array of one element.
        softcap: A positive number that bounds the scores; None for no bound.
        bias: Floating-point array that broadcasts to x's shape.
        backend: Force "pallas" (kernels of this library; on a CPU they are interpreted, which is slow) or "eager"
            (XLA's operations).  None plans: kernels compete with XLA on NVIDIA GPUs, and XLA runs elsewhere.
        strategy: Force the strategy "row", "cluster", "looped" or "split" of the backend "pallas".

    Returns:
        Array of x's shape and floating dtype.  A row whose maximum is infinite is NaN.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: axis is out of range or given twice, where or bias does not broadcast, softcap is not positive.
        PlanError: the forced backend or strategy cannot run; the message lists every reason.

    Source:
        Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867.

    Example:
        >>> import jax.numpy as jnp
        >>> print(softmax(jnp.zeros((2, 4))))
        [[0.25 0.25 0.25 0.25]
         [0.25 0.25 0.25 0.25]]
        >>> print(softmax(jnp.zeros(4), where=jnp.arange(4) < 2))
        [0.5 0.5 0.  0. ]
    """
    return _elementwise("softmax", x, axis, _options(scale, softcap, bias, where), Choice(backend, strategy))


def log_softmax(
    x: Array, axis: Axis = -1, where: Array | None = None, *, scale: Any = 1.0, softcap: float | None = None,
    bias: Array | None = None, backend: str | None = None, strategy: str | None = None,
) -> Array:  # fmt: skip
    """The log-softmax z - log(sum(exp(z))) along `axis`: `jax.nn.log_softmax` of scores z.

    The scores are z = softcap * tanh(scale * x / softcap) + bias.  The arguments, their shapes and dtypes, the errors
    and the source are those of `softmax`.

    Returns:
        Array of x's shape and floating dtype; -inf where `where` is False.  A row whose maximum is infinite is NaN.

    Raises:
        TypeError, ValueError, PlanError: as for `softmax`.

    Example:
        >>> import jax.numpy as jnp
        >>> print(log_softmax(jnp.zeros(3)))
        [-1.0986123 -1.0986123 -1.0986123]
    """
    return _elementwise("log_softmax", x, axis, _options(scale, softcap, bias, where), Choice(backend, strategy))


def logsumexp(
    a: Array, axis: Axis = None, b: Array | None = None, keepdims: bool = False, return_sign: bool = False,
    where: Array | None = None, *, scale: Any = 1.0, softcap: float | None = None, bias: Array | None = None,
    backend: str | None = None, strategy: str | None = None,
) -> Array | tuple[Array, Array]:  # fmt: skip
    """The logsumexp log(sum(b * exp(z))) along `axis`: `jax.nn.logsumexp` of scores z.

    The scores are z = softcap * tanh(scale * a / softcap) + bias.  The other arguments, the errors and the source are
    those of `softmax`.

    Args:
        a: Array of numbers or booleans, of any shape.
        axis: One axis, several, or None for all of them.
        b: Factors of the terms; an array that broadcasts to a's shape.  With b, and with return_sign, the function of
            `jax.nn` runs.
        keepdims: Keep the reduced axes with size 1.
        return_sign: Return the sign of the sum too.

    Returns:
        Array without the reduced axes, in a's floating dtype; with return_sign a pair of it and the signs.  A row
        without an element gives -inf.

    Raises:
        TypeError, ValueError: as for `softmax`.
        PlanError: as for `softmax`; or a kernel is forced with b, return_sign or complex numbers.

    Example:
        >>> import jax.numpy as jnp
        >>> print(logsumexp(jnp.zeros((2, 8)), axis=-1))
        [2.0794415 2.0794415]
    """
    options = _options(scale, softcap, bias, where)
    if b is not None or return_sign or (_is_complex(a) and _is_plain(options)):
        if backend not in (None, "eager") or strategy not in (None, "row"):
            raise PlanError(
                "logsumexp: b, return_sign and complex numbers have no kernel: leave backend and strategy out"
            )
        z = a
        if not _is_plain(options):
            rows = _rows("logsumexp", a, (), options._replace(mask=None))
            z = rows.back(ops.scores(rows.x, rows.arrays, rows.options).astype(rows.x.dtype))
        return jax.nn.logsumexp(z, axis, b, keepdims, return_sign, where)
    rows = _rows("logsumexp", a, axis, options)
    y = rows.run("logsumexp", Choice(backend, strategy))
    return jnp.expand_dims(y, rows.axes) if keepdims else y


def _elementwise(name: str, x: Array, axis: Axis, options: ScoreOptions, choice: Choice) -> Array:
    """The result of an operation with a value per element, in the shape of x."""
    if _is_complex(x) and _is_plain(options) and choice.backend in (None, "eager"):
        found: Array = getattr(jax.nn, name)(x, axis, options.mask)
        return found
    rows = _rows(name, x, axis, options)
    return rows.back(rows.run(name, choice))


class _Rows(NamedTuple):
    """An array with its reduced axes last and joined, and the arrays of its score options in the same layout.

    Attributes:
        x: Shape (outer axes, cols).
        arrays: Arrays of the score options, in the order of `options.arrays`.
        options: Score options; ARRAY stands for an array.
        axes: The reduced axes of the caller's array.
        shape: Shape of the caller's array.
        dtype: Dtype of the result; x may be wider.
    """

    x: Array
    arrays: tuple[Array, ...]
    options: ScoreOptions
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any

    def run(self, name: str, choice: Choice) -> Array:
        """The result of an operation on these rows."""
        primitives.check(name, choice)
        if self.x.size == 0:
            return ops.of_empty_rows(name, self.x).astype(self.dtype)
        y = primitives.bind(name, self.x, *self.arrays, options=self.options, choice=choice)
        return ops.result(name, y).astype(self.dtype)

    def back(self, y: Array) -> Array:
        """A result per element, in the shape of the caller's array."""
        outer = y.shape[:-1]
        y = y.reshape((*outer, *(self.shape[axis] for axis in self.axes)))
        return jnp.moveaxis(y, range(len(outer), y.ndim), self.axes)


def _options(scale: Any, softcap: Any, bias: Any, where: Any) -> ScoreOptions:
    """The score options, not checked; the mask is called `where` in jax.nn."""
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    return ScoreOptions(float(scale) if is_number else scale, softcap, bias, where)


def _is_plain(options: ScoreOptions) -> bool:
    """True where jax.nn knows all the options that are given."""
    return set(options.given) <= {"mask"}


def _is_complex(x: Array) -> bool:
    """True for complex numbers, for which only jax.nn has functions."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.complexfloating)


def _rows(name: str, x: Any, axis: Axis, options: ScoreOptions) -> _Rows:
    """The rows of an array for an operation; every argument is checked."""
    x = _checked(name, x)
    axes = _axes(name, axis, x.ndim)
    options, arrays = _checked_options(name, x, axes, options)
    narrow = x.dtype
    if not jnp.issubdtype(narrow, jnp.floating):
        narrow = jnp.result_type(float)
        x = x.astype(narrow)
    elif jnp.finfo(narrow).bits < 16:
        x = x.astype(jnp.float32)
    return _Rows(_last(x, axes), arrays, options, axes, x.shape, narrow)


def _checked(name: str, x: Any) -> Array:
    if isinstance(x, list | tuple | str) or x is None:
        raise TypeError(f"{name}: x must be an array, not {type(x).__name__}")
    x = jnp.asarray(x)
    # jax.nn.logsumexp takes booleans, and the functions with a result per element do not.
    if x.dtype == jnp.bool_ and not OPERATIONS[name].per_row:
        raise TypeError(f"{name}: x must be a number array, not bool")
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(f"{name}: scale, softcap and bias are for real x, not {x.dtype}")
    return x


def _axes(name: str, axis: Axis, ndim: int) -> tuple[int, ...]:
    """The axes counted from 0, in order."""
    if axis is None:
        return tuple(range(ndim))
    given = tuple(axis) if isinstance(axis, Sequence) else (axis,)
    for one in given:
        if isinstance(one, bool) or not isinstance(one, int | np.integer):
            raise TypeError(f"{name}: axis must be an int, ints or None, not {one!r}")
        if not -ndim <= one < ndim:
            raise ValueError(f"{name}: axis {one} is out of range for an array with {ndim} axes")
    found = tuple(sorted(int(one) % ndim for one in given))
    if len(set(found)) < len(found):
        raise ValueError(f"{name}: axis {given} names an axis twice")
    return found


def _checked_options(
    name: str, x: Array, axes: tuple[int, ...], options: ScoreOptions
) -> tuple[ScoreOptions, tuple[Array, ...]]:
    """The options with ARRAY in the place of each array, and the arrays with x's layout."""
    scale = options.scale
    if not isinstance(scale, float):
        is_array = hasattr(scale, "dtype") and math.prod(scale.shape) == 1
        if not is_array or not jnp.issubdtype(scale.dtype, jnp.floating):
            raise TypeError(f"{name}: scale must be a number or a floating-point array of one element, got {scale!r}")
        scale = scale.reshape((1,) * (x.ndim - len(axes) + 1))
    check_softcap(name, options.softcap)
    found = {"scale": scale} if not isinstance(scale, float) else {}
    for option in SCORE_OPTIONS.values():
        value = getattr(options, option.name)
        if option.kind == "element" and value is not None:
            found[option.name] = _last(_broadcast(_checked_array(name, x, option.name, value), x, axes), axes)
    marked: dict[str, Any] = dict.fromkeys(found, ARRAY)
    return options._replace(**marked), tuple(found.values())


def _checked_array(name: str, x: Array, option: str, value: Any) -> Array:
    """An array of the score options, with as many axes as x."""
    t, argument = jnp.asarray(value), ARGUMENTS.get(option, option)
    if SCORE_OPTIONS[option].dtype == "boolean" and t.dtype != jnp.bool_:
        raise ValueError(f"{name}: {argument} must be boolean, got {t.dtype}")
    if SCORE_OPTIONS[option].dtype == "floating" and not jnp.issubdtype(t.dtype, jnp.floating):
        raise TypeError(f"{name}: {argument} must be floating point, got {t.dtype}")
    if t.ndim > x.ndim or any(n not in (1, m) for n, m in zip(t.shape[::-1], x.shape[::-1], strict=False)):
        raise ValueError(f"{name}: {argument} of shape {t.shape} does not broadcast to x's {x.shape}")
    return t.reshape((1,) * (x.ndim - t.ndim) + t.shape)


ARGUMENTS = {"mask": "where"}
"""Names of arguments that jax.nn calls otherwise than core/options.py."""


def _broadcast(t: Array, x: Array, axes: tuple[int, ...]) -> Array:
    """An array as long as x along axes that are joined; along a single axis it may have size 1."""
    if len(axes) < 2:
        return t
    return jnp.broadcast_to(t, [x.shape[i] if i in axes else n for i, n in enumerate(t.shape)])


def _last(t: Array, axes: tuple[int, ...]) -> Array:
    """The array with its reduced axes last and joined."""
    moved = jnp.moveaxis(t, axes, range(t.ndim - len(axes), t.ndim))
    outer = moved.shape[: t.ndim - len(axes)]
    return moved.reshape((*outer, math.prod(moved.shape[len(outer) :])))
