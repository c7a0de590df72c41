"""The family for JAX, in the conventions of `jax.nn`: `import onlinesoftmax.jax as osj` and swap the call.

They work under jit, grad, vmap, jvp, checkpoint and shard_map, to any order of derivatives, and need no torch.
What `jax.nn` gives for infinities, NaN, empty arrays and rows without an element, these give too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..core.arrays import Array
from ..core.options import check_softcap
from ..core.scores import Scores
from ..planner.plan import PlanError
from . import ops as xla
from . import primitives

Axis = int | Sequence[int] | None

__all__ = ["log_softmax", "logsumexp", "softmax"]


def softmax(
    x: Array, axis: Axis = -1, where: Array | None = None, *, scale: Any = 1.0, softcap: float | None = None,
    bias: Array | None = None, backend: str | None = None, strategy: str | None = None,
) -> Array:  # fmt: skip
    """Exp(z) over its sum along `axis`: `jax.nn.softmax`, with z = softcap · tanh(scale · x / softcap) + bias.

    Args:
        x: Any shape; integers are computed as the default float.
        axis: An axis, several, or None for all of them.
        where: Boolean, broadcast to x's shape: only elements where it is True count, the others are 0, and so is
            all of a row without any.
        scale: A number, or an array of one element.
        softcap: A positive number that bounds the scores; None for no bound.
        bias: Floating point, broadcast to x's shape.
        backend: Force "pallas" (our kernels; on a CPU their interpreter, which is slow) or "eager" (XLA's operations);
            None plans with kernels on NVIDIA GPUs, and XLA elsewhere.
        strategy: Force "row", "cluster", "looped" or "split" of Pallas.

    Returns:
        Array of x's shape and dtype.  NaN in a row whose maximum is infinite.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: axis is out of range or given twice, where or bias does not fit, softcap is not positive.
        PlanError: what was forced cannot run; the message lists every reason.

    Source:
        Milakov and Gimelshein, arXiv:1805.02867.

    Example:
        >>> import jax.numpy as jnp
        >>> print(softmax(jnp.zeros((2, 4))))
        [[0.25 0.25 0.25 0.25]
         [0.25 0.25 0.25 0.25]]
        >>> print(softmax(jnp.zeros(4), where=jnp.arange(4) < 2))
        [0.5 0.5 0.  0. ]
    """
    if _is_for_jax(x) and _plain(scale, softcap, bias) and backend in (None, "eager"):
        return jax.nn.softmax(x, axis, where)
    rows = _rows("softmax", x, axis, where, scale, softcap, bias)
    return rows.back(rows.run("softmax", (backend, strategy)))


def log_softmax(
    x: Array, axis: Axis = -1, where: Array | None = None, *, scale: Any = 1.0, softcap: float | None = None,
    bias: Array | None = None, backend: str | None = None, strategy: str | None = None,
) -> Array:  # fmt: skip
    """Z - logsumexp(z) along `axis`: `jax.nn.log_softmax`.  z, arguments and errors as for `softmax`.

    Returns:
        Array of x's shape and dtype; -inf where `where` is False.

    Example:
        >>> import jax.numpy as jnp
        >>> print(log_softmax(jnp.zeros(3)))
        [-1.0986123 -1.0986123 -1.0986123]
    """
    if _is_for_jax(x) and _plain(scale, softcap, bias) and backend in (None, "eager"):
        return jax.nn.log_softmax(x, axis, where)
    rows = _rows("log_softmax", x, axis, where, scale, softcap, bias)
    return rows.back(rows.run("log_softmax", (backend, strategy)))


def logsumexp(
    a: Array, axis: Axis = None, b: Array | None = None, keepdims: bool = False, return_sign: bool = False,
    where: Array | None = None, *, scale: Any = 1.0, softcap: float | None = None, bias: Array | None = None,
    backend: str | None = None, strategy: str | None = None,
) -> Array | tuple[Array, Array]:  # fmt: skip
    """log(Σ b · exp(z)) along `axis`: `jax.nn.logsumexp`.  z, other arguments and errors as for `softmax`.

    Args:
        a: Any shape.
        axis: An axis, several, or None for all of them.
        b: Factors of the terms, broadcast to a's shape; with them, and with `return_sign`, JAX's own operation runs.
        keepdims: Keep the reduced axes with size 1.
        return_sign: Also return the sign of the sum.

    Returns:
        Array without the reduced axes, or that and the signs; -inf for a row without an element.

    Example:
        >>> import jax.numpy as jnp
        >>> print(logsumexp(jnp.zeros((2, 8)), axis=-1))
        [2.0794415 2.0794415]
    """
    if b is not None or return_sign or (_is_for_jax(a) and _plain(scale, softcap, bias)):
        if backend not in (None, "eager") or strategy not in (None, "row"):
            raise PlanError(
                "logsumexp: b, return_sign and complex numbers have no kernel: leave backend and strategy out"
            )
        z = a
        if not _plain(scale, softcap, bias):
            rows = _rows("logsumexp", a, (), None, scale, softcap, bias)
            z = rows.back(xla.scores(rows.x, rows.arrays, rows.spec).astype(rows.x.dtype))
        return jax.nn.logsumexp(z, axis, b, keepdims, return_sign, where)
    rows = _rows("logsumexp", a, axis, where, scale, softcap, bias)
    y = rows.run("logsumexp", (backend, strategy))
    return jnp.expand_dims(y, rows.axes) if keepdims else y


class _Rows(NamedTuple):
    """An array with the reduced axes last and joined, and what lies beside it in the same shape.

    Attributes:
        x: (outer axes, cols).
        arrays, spec: As in backends/xla.py.
        axes: The reduced axes of the array that was given.
        shape: Its shape.
        dtype: That of the result, where x is wider.
    """

    x: Array
    arrays: tuple[Array, ...]
    spec: Scores
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any

    def run(self, name: str, who: primitives.Who) -> Array:
        """The operation on these rows."""
        primitives.check(name, who)
        if self.x.size == 0:
            # No rows, or rows of nothing.
            empty = self.x if name != "logsumexp" else jnp.full(self.x.shape[:-1], -jnp.inf, self.x.dtype)
            return empty.astype(self.dtype)
        y = primitives.bind(name, self.x, *self.arrays, spec=self.spec, who=who)
        return (_logsumexp(y) if name == "logsumexp" else y).astype(self.dtype)

    def back(self, y: Array) -> Array:
        """An array of these rows in the shape that was given."""
        outer = y.shape[:-1]
        y = y.reshape((*outer, *(self.shape[axis] for axis in self.axes)))
        return jnp.moveaxis(y, range(len(outer), y.ndim), self.axes)


def _logsumexp(state: Array) -> Array:
    """M + log(l); where l is 0 or infinite, the logarithm of that."""
    m, l = state[..., 0], state[..., 1]
    is_number = (l > 0) & (l < jnp.inf)
    return jnp.where(is_number, m + jnp.log(jnp.where(is_number, l, 1)), jnp.log(l))


def _is_for_jax(x: Array) -> bool:
    """Whether these are numbers that only JAX's own operations take."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.complexfloating)


def _plain(scale: Any, softcap: Any, bias: Any) -> bool:
    return softcap is None and bias is None and isinstance(scale, int | float) and scale == 1


def _rows(name: str, x: Any, axis: Axis, where: Any, scale: Any, softcap: Any, bias: Any) -> _Rows:
    x = _checked(name, x)
    axes = _axes(name, axis, x.ndim)
    scale, beside = _checked_beside(name, x, where, scale, softcap, bias)
    spec = Scores(scale if isinstance(scale, float) else "array", softcap, bias is not None, where is not None)
    arrays = [_last(_expanded(t, x, axes), axes) for t in beside]
    if not isinstance(scale, float):
        arrays.insert(0, scale.reshape((1,) * (x.ndim - len(axes) + 1)))
    narrow = x.dtype
    if not jnp.issubdtype(narrow, jnp.floating):
        narrow = jnp.result_type(float)
        x = x.astype(narrow)
    elif jnp.finfo(narrow).bits < 16:
        x = x.astype(jnp.float32)
    return _Rows(_last(x, axes), tuple(arrays), spec, axes, x.shape, narrow)


def _checked(name: str, x: Any) -> Array:
    if isinstance(x, list | tuple | str) or x is None:
        raise TypeError(f"{name}: x must be an array, not {type(x).__name__}")
    x = jnp.asarray(x)
    if x.dtype == jnp.bool_ and name != "logsumexp":
        raise TypeError(f"{name}: x must be a number array, not bool")
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(f"{name}: scale, softcap and bias are for real x, not {x.dtype}")
    return x


def _axes(name: str, axis: Axis, ndim: int) -> tuple[int, ...]:
    """Axes counted from 0, in order."""
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


def _checked_beside(name: str, x: Array, where: Any, scale: Any, softcap: Any, bias: Any) -> tuple[Any, list[Array]]:
    """The scale as a float or an array, and bias and where, as far as they are given, as arrays."""
    if isinstance(scale, int | float) and not isinstance(scale, bool):
        scale = float(scale)
    elif not hasattr(scale, "dtype") or math.prod(scale.shape) != 1 or not jnp.issubdtype(scale.dtype, jnp.floating):
        raise TypeError(f"{name}: scale must be a number or a floating-point array of one element, got {scale!r}")
    check_softcap(name, softcap)
    beside = []
    for argument, t in (("bias", bias), ("where", where)):
        if t is None:
            continue
        t = jnp.asarray(t)
        if argument == "where" and t.dtype != jnp.bool_:
            raise ValueError(f"{name}: where must be boolean, got {t.dtype}")
        if argument == "bias" and not jnp.issubdtype(t.dtype, jnp.floating):
            raise TypeError(f"{name}: bias must be floating point, got {t.dtype}")
        if t.ndim > x.ndim or any(n not in (1, m) for n, m in zip(t.shape[::-1], x.shape[::-1], strict=False)):
            raise ValueError(f"{name}: {argument} of shape {t.shape} does not broadcast to x's {x.shape}")
        beside.append(t.reshape((1,) * (x.ndim - t.ndim) + t.shape))
    return scale, beside


def _expanded(t: Array, x: Array, axes: tuple[int, ...]) -> Array:
    """An array beside x, as long as x where axes are joined; a single axis may stay of size 1."""
    if len(axes) < 2:
        return t
    return jnp.broadcast_to(t, [x.shape[i] if i in axes else n for i, n in enumerate(t.shape)])


def _last(t: Array, axes: tuple[int, ...]) -> Array:
    """The array with its reduced axes last and joined."""
    moved = jnp.moveaxis(t, axes, range(t.ndim - len(axes), t.ndim))
    outer = moved.shape[: t.ndim - len(axes)]
    return moved.reshape((*outer, math.prod(moved.shape[len(outer) :])))
