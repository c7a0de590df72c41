"""The `eager` backend for JAX: XLA's own operations, on every device that JAX knows.

Each function is one operation on the last axis, and the specification of a Pallas kernel: what the kernels fuse
is written out here, one operation after another.  Arrays of 16 bits are computed in float32 and rounded once.

A tangent and the gradient of its name are each other's transpose; the softmax's is its own.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from ..core.arrays import Array
from ..core.scores import PLAIN, Scores, accumulator


def scores(x: Array, arrays: tuple[Array, ...], spec: Scores) -> Array:
    """What softmax is taken of: softcap · tanh(scale · x / softcap) + bias, and -inf where the mask is False."""
    _, bias, mask = spec.named(arrays)
    z = _scaled(x, arrays, spec)
    if spec.softcap is not None:
        z = spec.softcap * jnp.tanh(z / spec.softcap)
    if bias is not None:
        z = z + bias.astype(z.dtype)
    return z if mask is None else jnp.where(mask, z, -jnp.inf)


def softmax(x: Array, *arrays: Array, spec: Scores = PLAIN) -> Array:
    """Exp(z) over its sum; NaN in a row whose maximum is infinite, 0 where the mask is False."""
    z = scores(x, arrays, spec)
    # An infinite maximum gives NaN of itself.  To say so in more operations would cost XLA its fusion.
    e = jnp.exp(z - _peak(x, z, spec))
    return _masked(e / jnp.sum(e, axis=-1, keepdims=True), arrays, spec, 0).astype(x.dtype)


def log_softmax(x: Array, *arrays: Array, spec: Scores = PLAIN) -> Array:
    """The score minus the logsumexp; NaN in a row whose maximum is infinite, -inf where the mask is False."""
    z = scores(x, arrays, spec)
    z = z - _peak(x, z, spec)
    y = z - jnp.log(jnp.sum(jnp.exp(z), axis=-1, keepdims=True))
    return _masked(y, arrays, spec, -jnp.inf).astype(x.dtype)


def logsumexp(x: Array, *arrays: Array, spec: Scores = PLAIN) -> Array:
    """The state of each row in two parts along a new last axis: m, made finite, and l = Σ exp(z - m).

    The log of the sum of exp(z) is m + log(l).  Rounded to that it would lose what a gradient shows.
    """
    z = scores(x, arrays, spec)
    s = _shift(_peak(x, z, spec))
    return jnp.stack([s[..., 0], jnp.sum(jnp.exp(z - s), axis=-1)], axis=-1)


def softmax_backward(y: Array, t: Array, *, factor: float = 1.0) -> Array:
    """Y · (t - Σ y t): both what a change t of the scores does to y, and what a gradient t of y is for them."""
    wide, t_wide = y.astype(accumulator(y)), t.astype(accumulator(y))
    return (factor * wide * (t_wide - jnp.sum(wide * t_wide, axis=-1, keepdims=True))).astype(t.dtype)


def log_softmax_backward(y: Array, t: Array, *, factor: float = 1.0) -> Array:
    """T - exp(y) · Σ t: the gradient of the scores where that of y is t."""
    wide, t_wide = y.astype(accumulator(y)), t.astype(accumulator(y))
    return (factor * (t_wide - jnp.exp(wide) * jnp.sum(t_wide, axis=-1, keepdims=True))).astype(t.dtype)


def log_softmax_tangent(y: Array, t: Array, *, factor: float = 1.0) -> Array:
    """T - Σ exp(y) t: what a change t of the scores does to y."""
    wide, t_wide = y.astype(accumulator(y)), t.astype(accumulator(y))
    return (factor * (t_wide - jnp.sum(jnp.exp(wide) * t_wide, axis=-1, keepdims=True))).astype(t.dtype)


def logsumexp_backward(x: Array, *rest: Array, spec: Scores = PLAIN, factor: float = 1.0) -> Array:
    """Exp(z - lse) · t: the gradient of the scores where that of lse is t; rest ends with the state and t."""
    *arrays, state, t = rest
    p = _probabilities(x, tuple(arrays), spec, state)
    return _masked(factor * p * t.astype(p.dtype)[..., None], tuple(arrays), spec, 0).astype(x.dtype)


def logsumexp_tangent(x: Array, *rest: Array, spec: Scores = PLAIN, factor: float = 1.0) -> Array:
    """Σ exp(z - lse) t: what a change t of the scores does to lse; rest ends with the state and t."""
    *arrays, state, t = rest
    p = _probabilities(x, tuple(arrays), spec, state)
    return factor * jnp.sum(p * t.astype(p.dtype), axis=-1)


OPERATIONS: dict[str, Callable[..., Array]] = {
    function.__name__: function
    for function in (
        softmax, log_softmax, logsumexp, softmax_backward, log_softmax_backward, log_softmax_tangent,
        logsumexp_backward, logsumexp_tangent,
    )
}  # fmt: skip


def slope(x: Array, arrays: tuple[Array, ...], spec: Scores) -> Array | float:
    """The derivative of a score in its logit, wherever it is not masked."""
    return _scale(x, arrays, spec) * scale_slope(x, arrays, spec)


def scale_slope(x: Array, arrays: tuple[Array, ...], spec: Scores) -> Array | float:
    """The derivative of a score in scale · x: that of the softcap."""
    if spec.softcap is None:
        return 1.0
    return 1 - jnp.tanh(_scaled(x, arrays, spec) / spec.softcap) ** 2


def _scale(x: Array, arrays: tuple[Array, ...], spec: Scores) -> Array | float:
    scale, _, _ = spec.named(arrays)
    return scale if isinstance(scale, float) else scale.astype(accumulator(x))


def _scaled(x: Array, arrays: tuple[Array, ...], spec: Scores) -> Array:
    wide, scale = x.astype(accumulator(x)), _scale(x, arrays, spec)
    return wide if isinstance(scale, float) and scale == 1 else wide * scale


def _peak(x: Array, z: Array, spec: Scores) -> Array:
    """The largest score of each row: found in narrow logits as they lie, as exact and several times as fast."""
    if spec == PLAIN:
        return jnp.max(x, axis=-1, keepdims=True).astype(z.dtype)
    return jnp.max(z, axis=-1, keepdims=True)


def _shift(m: Array) -> Array:
    """What is subtracted before exp: the finite number nearest to m."""
    return jnp.clip(m, jnp.finfo(m.dtype).min, jnp.finfo(m.dtype).max)


def _masked(y: Array, arrays: tuple[Array, ...], spec: Scores, fill: float) -> Array:
    _, _, mask = spec.named(arrays)
    return y if mask is None else jnp.where(mask, y, fill)


def _probabilities(x: Array, arrays: tuple[Array, ...], spec: Scores, state: Array) -> Array:
    z = scores(x, arrays, spec)
    # Of a masked element, not even NaN counts.
    return _masked(jnp.exp(z - state[..., :1]) / state[..., 1:], arrays, spec, 0)
