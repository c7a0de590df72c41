"""The formulas in JAX of the operations with a target column per row: cross-entropy and token log-probabilities.

The operands are x, the arrays of the score options, and the column of each row, an integer.  An operation returns
several results per row along a new last axis: its main result, the state m and l, and the entropy if it is asked for.
A gradient reads them again, and the gradients of the main result, of lse, and of the entropy along a last axis.  So
one kernel writes the gradient of all results.

    logprob = z[target] - lse
    loss = (1 - smoothing) * -logprob + smoothing * (lse - mean(z)) + z_loss * lse²
    entropy = lse - sum(p * z)

Everything is computed with scores from which the maximum m is subtracted, so that large scores do not cancel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from ..core.arrays import Array
from ..core.options import PLAIN, ScoreOptions
from .scores import masked, peak, scores, shift


class TargetOptions(NamedTuple):
    """The options of an operation with a target, all known when a program is traced.

    Attributes:
        smoothing: Part of the target that is spread over all classes.
        z_loss: Factor of lse², which is added to the loss.
        entropy: True where the entropy is computed too.
        gradient: True where a forward kernel also writes the gradient of the losses, each times a given number.
        classes: Number of columns of a whole row, for a derivative of rows that are sharded; 0 for whole rows.  The
            target is then a local column, or the number of local columns where another device has it.  A tangent is
            the part of the local columns, which the caller sums over the devices.
    """

    smoothing: float = 0.0
    z_loss: float = 0.0
    entropy: bool = False
    gradient: bool = False
    classes: int = 0


PLAIN_TARGET = TargetOptions()
"""No option: the negative logarithm of a probability."""


def cross_entropy(
    x: Array, *rest: Array, options: ScoreOptions = PLAIN, target_options: TargetOptions = PLAIN_TARGET
) -> Array:
    """(loss, m, l) of each row; rest ends with the target.

    The loss is NaN where the target is no column, and where the maximum is infinite.
    """
    *arrays, target = rest
    smoothing, z_loss, *_ = target_options
    w, m, l = _state(x, tuple(arrays), options)
    log_l = jnp.log(l)
    y = log_l - _picked(w, target)
    if smoothing:
        y = (1 - smoothing) * y + smoothing * (log_l - jnp.mean(w, axis=-1))
    if z_loss:
        y = y + z_loss * (m + log_l) ** 2
    return jnp.stack([jnp.where(_is_column(target, x) & (l < jnp.inf), y, jnp.nan), m, l], axis=-1)


def token_logprobs(
    x: Array, *rest: Array, options: ScoreOptions = PLAIN, target_options: TargetOptions = PLAIN_TARGET
) -> Array:
    """(logprob, m, l) or (logprob, m, l, entropy) of each row; rest ends with the target.

    The logprob is NaN where the target is no column, and where the maximum is infinite.
    """
    *arrays, target = rest
    w, m, l = _state(x, tuple(arrays), options)
    y = _picked(w, target) - jnp.log(l)
    found = [jnp.where(_is_column(target, x) & (l < jnp.inf), y, jnp.nan), m, l]
    if target_options.entropy:
        e = jnp.exp(w)
        found.append(jnp.log(l) - jnp.sum(_finite(w, e) * e, axis=-1) / l)
    return jnp.stack(found, axis=-1)


def cross_entropy_backward(
    x: Array, *rest: Array, options: ScoreOptions = PLAIN, target_options: TargetOptions = PLAIN_TARGET,
    factor: float = 1.0,
) -> Array:  # fmt: skip
    """Gradient in the scores from the gradients of the loss and of lse; rest ends with target, results, gradients."""
    *arrays, target, results, t = rest
    smoothing, z_loss, *_ = target_options
    w, m, l = _given(x, tuple(arrays), options, results)
    dy, dlse = (factor * t[..., i] for i in range(2))
    dy = jnp.where(_has_target(target, x, target_options), dy, 0)
    of_lse = _loss_to_lse(dy, m, l, z_loss)
    own = jnp.where(_hits(x, target), (1 - smoothing) * dy[..., None], 0)
    spread = (smoothing / (target_options.classes or x.shape[-1])) * dy[..., None]
    y = _times(jnp.exp(w), of_lse + dlse, l) - own - (spread if smoothing else 0)
    return masked(y, tuple(arrays), options, 0).astype(x.dtype)


def token_logprobs_backward(
    x: Array, *rest: Array, options: ScoreOptions = PLAIN, target_options: TargetOptions = PLAIN_TARGET,
    factor: float = 1.0,
) -> Array:  # fmt: skip
    """Gradient in the scores from those of logprob, lse and entropy; rest ends with target, results, gradients."""
    *arrays, target, results, t = rest
    w, _, l = _given(x, tuple(arrays), options, results)
    e = jnp.exp(w)
    dy, dlse = (factor * t[..., i] for i in range(2))
    dy = jnp.where(_has_target(target, x, target_options), dy, 0)
    of_lse = dlse - dy
    if target_options.entropy:
        dentropy = factor * t[..., 2]
        of_lse = of_lse - dentropy * (results[..., 3] - jnp.log(l))
    y = _times(e, of_lse, l) + jnp.where(_hits(x, target), dy[..., None], 0)
    if target_options.entropy:
        y = y - _finite(w, e) * e * (dentropy / l)[..., None]
    return masked(y, tuple(arrays), options, 0).astype(x.dtype)


def cross_entropy_tangent(
    x: Array, *rest: Array, options: ScoreOptions = PLAIN, target_options: TargetOptions = PLAIN_TARGET,
    factor: float = 1.0,
) -> Array:  # fmt: skip
    """Changes of the loss and of lse from a change t of the scores; rest ends with the target, the results and t."""
    *arrays, target, results, t = rest
    smoothing, z_loss, *_ = target_options
    w, m, l = _given(x, tuple(arrays), options, results)
    t = factor * t.astype(w.dtype)
    dlse = jnp.sum(masked(jnp.exp(w) / l[..., None], tuple(arrays), options, 0) * t, axis=-1)
    y = (1 + 2 * z_loss * (m + jnp.log(l))) * dlse if z_loss else dlse
    y = y - (1 - smoothing) * jnp.sum(jnp.where(_hits(x, target), t, 0), axis=-1)
    if smoothing:
        y = y - (smoothing / (target_options.classes or x.shape[-1])) * jnp.sum(t, axis=-1)
    return jnp.stack([jnp.where(_has_target(target, x, target_options), y, 0), dlse], axis=-1)


def token_logprobs_tangent(
    x: Array, *rest: Array, options: ScoreOptions = PLAIN, target_options: TargetOptions = PLAIN_TARGET,
    factor: float = 1.0,
) -> Array:  # fmt: skip
    """Changes of logprob, lse and entropy from a change t of the scores; rest ends with target, results and t."""
    *arrays, target, results, t = rest
    w, _, l = _given(x, tuple(arrays), options, results)
    t = factor * t.astype(w.dtype)
    p = masked(jnp.exp(w) / l[..., None], tuple(arrays), options, 0)
    dlse = jnp.sum(p * t, axis=-1)
    y = jnp.sum(jnp.where(_hits(x, target), t, 0), axis=-1) - dlse
    found = [jnp.where(_has_target(target, x, target_options), y, 0), dlse]
    if target_options.entropy:
        high = (results[..., 3] - jnp.log(l))[..., None]
        found.append(-jnp.sum(p * (_finite(w, p) + high) * t, axis=-1))
    return jnp.stack(found, axis=-1)


def local_backward(
    name: str, operands: tuple[Array, ...], target_options: TargetOptions
) -> tuple[tuple[Array, ...], TargetOptions]:
    """The operands of a gradient of sharded rows without smoothing, as those of a gradient of whole rows.

    The gradient of whole rows ignores the gradient dy of the main result where the target is no column.  Where another
    device has the target, the effect of dy on the local columns is that of a gradient of lse.
    """
    *first, target, results, t = operands
    elsewhere = target >= operands[0].shape[-1]
    of_lse = TO_LSE[name](t[..., 0], results[..., 1], results[..., 2], target_options.z_loss)
    t = t.at[..., 1].add(jnp.where(elsewhere, of_lse, 0))
    return (*first, jnp.where(elsewhere, -1, target), results, t), target_options._replace(classes=0)


def _loss_to_lse(dy: Array, m: Array, l: Array, z_loss: float) -> Array:
    """The gradient in lse from the gradient dy in the loss."""
    # A row without a finite score has an infinite lse; it counts for nothing where dy is 0.
    return jnp.where(dy == 0, 0, dy * (1 + 2 * z_loss * (m + jnp.log(l)))) if z_loss else dy


def _logprob_to_lse(dy: Array, *_: object) -> Array:
    """The gradient in lse from the gradient dy in the logarithm of the probability."""
    return -dy


TO_LSE: dict[str, Callable[..., Array]] = {
    "cross_entropy_backward": _loss_to_lse,
    "token_logprobs_backward": _logprob_to_lse,
}
"""The part of each gradient that all columns have, as a gradient in lse."""


def _state(x: Array, arrays: tuple[Array, ...], options: ScoreOptions) -> tuple[Array, Array, Array]:
    """The scores less m, and the finite m and l of each row."""
    z = scores(x, arrays, options)
    m = shift(peak(x, z, options))
    w = z - m
    return w, m[..., 0], jnp.sum(jnp.exp(w), axis=-1)


def _given(
    x: Array, arrays: tuple[Array, ...], options: ScoreOptions, results: Array
) -> tuple[Array, Array, Array]:  # fmt: skip
    """The same from the results of the forward operation."""
    m, l = results[..., 1], results[..., 2]
    return scores(x, arrays, options) - m[..., None], m, l


def _times(e: Array, factor: Array, l: Array) -> Array:
    """The product of a factor per row and the probabilities e / l.

    It is 0 where the factor is 0, even for NaN, and else NaN where the maximum is infinite.
    """
    t = factor / jnp.where(l < jnp.inf, l, jnp.nan)
    return jnp.where(factor[..., None] == 0, 0, e * t[..., None])


def _finite(w: Array, e: Array) -> Array:
    """Scores to multiply by e: a score of -inf would give NaN."""
    return jnp.where(e == 0, 0, w)


def _is_column(target: Array, x: Array) -> Array:
    return (target >= 0) & (target < x.shape[-1])


def _has_target(target: Array, x: Array, target_options: TargetOptions) -> Array:
    """True for the rows whose target is a column, on this device or on another."""
    return target >= 0 if target_options.classes else _is_column(target, x)


def _hits(x: Array, target: Array) -> Array:
    """True at the target of each row."""
    # With as many axes as the target, so that nothing is promoted to a higher rank.
    columns = jnp.arange(x.shape[-1], dtype=target.dtype)[(None,) * target.ndim]
    return columns == target[..., None]


def _picked(w: Array, target: Array) -> Array:
    """The element at the target of each row; any element where the target is no column."""
    there = jnp.clip(target, 0, w.shape[-1] - 1)
    return jnp.take_along_axis(w, there[..., None], axis=-1)[..., 0]
