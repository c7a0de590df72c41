"""The formulas of the operations in JAX's own array functions, and of their tangents.

XLA runs these functions as the backend `eager`, on every device that JAX knows.  They are also the specification of
the Pallas kernels.  Each function works on the last axis; 16-bit arrays are computed in float32 and rounded once.

A formula takes the signature of the call and the operands by name, and returns the outputs by name.  An operation with
a result per row returns the state m and l with it; a gradient reads them again.  A gradient is linear in its operands
dy, dlse and dentropy, the gradients of the result, of lse and of the entropy.  A tangent is its transpose: it is linear
in the operand t, a change of the scores, and its outputs are the changes of the result, of lse and of the entropy,
under the same names dy, dlse and dentropy.

    logprob = z[target] - lse
    loss = (1 - smoothing) * -logprob + smoothing * (lse - mean(z)) + z_loss * lse²
    entropy = lse - sum(p * z)

Everything is computed with scores from which the maximum m is subtracted, so that large scores do not cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from ..core.arrays import Array, accumulator
from ..core.options import Functions, ScoreOptions
from ..core.options import scores as scores_of
from .signature import Names, Signature, Values

FUNCTIONS = Functions(jnp.tanh, jnp.where)
"""The functions with which XLA computes the score formula of core/options.py."""

MASKED = {"softmax": 0.0, "log_softmax": -jnp.inf}
"""The output per element where the mask is False."""


def filled(options: ScoreOptions, x: Array, arrays: Mapping[str, Array]) -> ScoreOptions:
    """The score options with their arrays, in the dtype of the computation."""
    wide = accumulator(x)
    given = (arrays[name] for name in options.arrays)
    return options.filled(t if t.dtype == jnp.bool_ else t.astype(wide) for t in given)


def scores(options: ScoreOptions, x: Array, arrays: Mapping[str, Array]) -> Array:
    """The scores of logits x, in float32 or float64."""
    return scores_of(FUNCTIONS, x.astype(accumulator(x)), filled(options, x, arrays))


def masked(y: Array, arrays: Mapping[str, Array], fill: float = 0.0) -> Array:
    """The output, with a number in place of elements where the mask is False."""
    return jnp.where(arrays["mask"], y, fill) if "mask" in arrays else y


def _peak(call: Signature, x: Array, z: Array) -> Array:
    """The maximum score of each row.  The maximum of 16-bit logits is exact, and several times as fast as of scores."""
    if call.options.plain:
        return jnp.max(x, axis=-1, keepdims=True).astype(z.dtype)
    return jnp.max(z, axis=-1, keepdims=True)


def _state(call: Signature, x: Array, arrays: Mapping[str, Array]) -> tuple[Array, Array, Array]:
    """The scores less m, and m and l of each row; m is the finite number nearest to the maximum."""
    z = scores(call.options, x, arrays)
    m = _peak(call, x, z)
    m = jnp.clip(m, jnp.finfo(m.dtype).min, jnp.finfo(m.dtype).max)
    w = z - m
    return w, m[..., 0], jnp.sum(jnp.exp(w), axis=-1)


def softmax(call: Signature, x: Array, **arrays: Array) -> Values:
    """The softmax exp(z) / sum(exp(z)); NaN in a row whose maximum is infinite, 0 where the mask is False."""
    z = scores(call.options, x, arrays)
    # An infinite maximum gives NaN by itself.  A test for it would cost XLA its fusion.
    e = jnp.exp(z - _peak(call, x, z))
    y = e / jnp.sum(e, axis=-1, keepdims=True)
    return {"y": masked(y, arrays, MASKED[call.name]).astype(x.dtype)}


def log_softmax(call: Signature, x: Array, **arrays: Array) -> Values:
    """The log-softmax z - log(sum(exp(z))); NaN in a row whose maximum is infinite, -inf where the mask is False."""
    z = scores(call.options, x, arrays)
    z = z - _peak(call, x, z)
    y = z - jnp.log(jnp.sum(jnp.exp(z), axis=-1, keepdims=True))
    return {"y": masked(y, arrays, MASKED[call.name]).astype(x.dtype)}


def logsumexp(call: Signature, x: Array, **arrays: Array) -> Values:
    """The state of each row, m, made finite, and l = sum(exp(z - m)), and the entropy.

    `logsumexp_of` makes log(sum(exp(z))) = m + log(l) of it.  The gradient needs more bits than that number has.
    """
    w, m, l = _state(call, x, arrays)
    return {"m": m, "l": l, **_entropy(call, w, l)}


def _entropy(call: Signature, w: Array, l: Array) -> Values:
    """The entropy of each row, if it is asked for."""
    e = jnp.exp(w)
    return {"entropy": jnp.log(l) - jnp.sum(_finite(w, e) * e, axis=-1) / l} if "entropy" in call.outputs else {}


def logsumexp_of(m: Array, l: Array, zero: bool = False) -> Array:
    """The logsumexp m + log(l); log(l) where l is 0 or infinite, because log has no finite derivative there.

    With `zero`, a row whose l is 0 is a constant.
    """
    is_number = (l > 0) & (l < jnp.inf)
    y = jnp.where(l == 0, -jnp.inf, jnp.log(jnp.where(l == 0, 1, l))) if zero else jnp.log(l)
    return jnp.where(is_number, m + jnp.log(jnp.where(is_number, l, 1)), y)


def cross_entropy(call: Signature, x: Array, target: Array, **arrays: Array) -> Values:
    """The loss of each row and its state.

    The loss is NaN where the target is no column, and where the maximum is infinite.
    """
    smoothing, z_loss = call.number("smoothing"), call.number("z_loss")
    w, m, l = _state(call, x, arrays)
    log_l = jnp.log(l)
    y = log_l - _picked(w, target)
    if smoothing:
        y = (1 - smoothing) * y + smoothing * (log_l - jnp.mean(w, axis=-1))
    if z_loss:
        y = y + z_loss * (m + log_l) ** 2
    return {"loss": jnp.where(_is_column(target, x) & (l < jnp.inf), y, jnp.nan), "m": m, "l": l}


def token_logprobs(call: Signature, x: Array, target: Array, **arrays: Array) -> Values:
    """The logprob of each row, its state, and its entropy.

    The logprob is NaN where the target is no column, and where the maximum is infinite.
    """
    w, m, l = _state(call, x, arrays)
    y = jnp.where(_is_column(target, x) & (l < jnp.inf), _picked(w, target) - jnp.log(l), jnp.nan)
    return {"y": y, "m": m, "l": l, **_entropy(call, w, l)}


def softmax_backward(call: Signature, x: Array, dy: Array) -> Values:
    """Gradient in the scores from the saved output x: factor * x * (dy - sum(x dy)).

    It is also the change of the output from a change dy of the scores: the Jacobian of softmax is symmetric.  With
    `axis_name`, rows are sharded along these axes, and the sum is that of all devices.
    """
    y, t = x.astype(accumulator(x)), dy.astype(accumulator(x))
    return {"y": (call.factor * y * (t - _sum(y * t, call.axis_name))).astype(dy.dtype)}


def log_softmax_backward(call: Signature, x: Array, dy: Array) -> Values:
    """Gradient in the scores from the saved output x: factor * (dy - exp(x) * sum(dy))."""
    y, t = x.astype(accumulator(x)), dy.astype(accumulator(x))
    return {"y": (call.factor * (t - jnp.exp(y) * _sum(t, call.axis_name))).astype(dy.dtype)}


def log_softmax_tangent(call: Signature, x: Array, t: Array) -> Values:
    """Change of the saved output x from a change t of the scores: factor * (t - sum(exp(x) t))."""
    y, wide = x.astype(accumulator(x)), t.astype(accumulator(x))
    return {"dy": (call.factor * (wide - _sum(jnp.exp(y) * wide, call.axis_name))).astype(t.dtype)}


def _sum(t: Array, axis_name: Names) -> Array:
    """The sum of each row, over all devices that hold a part of the row."""
    local = jnp.sum(t, axis=-1, keepdims=True)
    return jax.lax.psum(local, axis_name) if axis_name else local


def logsumexp_backward(call: Signature, x: Array, m: Array, l: Array, dy: Array, **arrays: Array) -> Values:
    """Gradient in the scores: factor * dy * exp(z - lse).

    In a row without a score above -inf it is 0 if dy is 0.
    """
    p = _probabilities(call, x, m, l, arrays)
    t = dy.astype(p.dtype)[..., None]
    nothing = (t == 0) & (l[..., None] == 0)
    return {"y": masked(jnp.where(nothing, 0, call.factor * p * t), arrays).astype(x.dtype)}


def logsumexp_tangent(call: Signature, x: Array, m: Array, l: Array, t: Array, **arrays: Array) -> Values:
    """Change of lse from a change t of the scores: factor * sum(exp(z - lse) t)."""
    p = _probabilities(call, x, m, l, arrays)
    return {"dy": call.factor * jnp.sum(p * t.astype(p.dtype), axis=-1)}


def cross_entropy_backward(
    call: Signature, x: Array, target: Array, m: Array, l: Array, dy: Array, dlse: Array | None = None, **arrays: Array
) -> Values:
    """Gradient in the scores from the gradients of the loss and of lse."""
    smoothing = call.number("smoothing")
    w = scores(call.options, x, arrays) - m[..., None]
    dy = jnp.where(_has_target(call, target, x), call.factor * dy, 0)
    of_lse = loss_to_lse(call, dy, m, l)
    of_lse = of_lse if dlse is None else of_lse + call.factor * dlse
    own = jnp.where(_hits(x, target), (1 - smoothing) * dy[..., None], 0)
    spread = (smoothing / (call.classes or x.shape[-1])) * dy[..., None]
    y = _times(jnp.exp(w), of_lse, l) - own - (spread if smoothing else 0)
    return {"y": masked(y, arrays).astype(x.dtype)}


def token_logprobs_backward(
    call: Signature, x: Array, target: Array, m: Array, l: Array, dy: Array, dlse: Array | None = None,
    dentropy: Array | None = None, **arrays: Array,
) -> Values:  # fmt: skip
    """Gradient in the scores from those of logprob, lse and entropy."""
    w = scores(call.options, x, arrays) - m[..., None]
    e = jnp.exp(w)
    dy = jnp.where(_has_target(call, target, x), call.factor * dy, 0)
    of_lse = -dy if dlse is None else call.factor * dlse - dy
    if dentropy is not None:
        dentropy = call.factor * dentropy
        of_lse = of_lse - dentropy * (arrays["entropy"] - jnp.log(l))
    y = _times(e, of_lse, l) + jnp.where(_hits(x, target), dy[..., None], 0)
    if dentropy is not None:
        y = y - _finite(w, e) * e * (dentropy / l)[..., None]
    return {"y": masked(y, arrays).astype(x.dtype)}


def cross_entropy_tangent(
    call: Signature, x: Array, target: Array, m: Array, l: Array, t: Array, **arrays: Array
) -> Values:
    """Changes of the loss and of lse from a change t of the scores."""
    smoothing, z_loss = call.number("smoothing"), call.number("z_loss")
    p = _probabilities(call, x, m, l, arrays)
    t = call.factor * t.astype(p.dtype)
    dlse = jnp.sum(p * t, axis=-1)
    y = (1 + 2 * z_loss * (m + jnp.log(l))) * dlse if z_loss else dlse
    y = y - (1 - smoothing) * jnp.sum(jnp.where(_hits(x, target), t, 0), axis=-1)
    if smoothing:
        y = y - (smoothing / (call.classes or x.shape[-1])) * jnp.sum(t, axis=-1)
    return {"dy": jnp.where(_has_target(call, target, x), y, 0), "dlse": dlse}


def token_logprobs_tangent(
    call: Signature, x: Array, target: Array, m: Array, l: Array, t: Array, **arrays: Array
) -> Values:
    """Changes of logprob, lse and entropy from a change t of the scores."""
    w = scores(call.options, x, arrays) - m[..., None]
    t = call.factor * t.astype(w.dtype)
    p = masked(jnp.exp(w) / l[..., None], arrays)
    dlse = jnp.sum(p * t, axis=-1)
    y = jnp.sum(jnp.where(_hits(x, target), t, 0), axis=-1) - dlse
    results = {"dy": jnp.where(_has_target(call, target, x), y, 0), "dlse": dlse}
    if "dentropy" in call.outputs:
        high = (arrays["entropy"] - jnp.log(l))[..., None]
        results["dentropy"] = -jnp.sum(p * (_finite(w, p) + high) * t, axis=-1)
    return results


def row_products(call: Signature, x: Array, t: Array) -> Values:
    """The sum of x * t over each row, in the dtype of the computation."""
    wide = accumulator(x)
    return {"dy": jnp.sum(x.astype(wide) * t.astype(wide), axis=-1)}


def scaled_rows(call: Signature, x: Array, dy: Array) -> Values:
    """Each row of x times a number dy, in the dtype of x.  XLA removes a multiplication by the constant 1."""
    return {"y": (x.astype(accumulator(x)) * dy[..., None]).astype(x.dtype)}


FORMULAS: dict[str, Callable[..., Values]] = {
    function.__name__: function
    for function in (
        softmax, log_softmax, logsumexp, cross_entropy, token_logprobs, softmax_backward, log_softmax_backward,
        logsumexp_backward, cross_entropy_backward, token_logprobs_backward, log_softmax_tangent, logsumexp_tangent,
        cross_entropy_tangent, token_logprobs_tangent, row_products, scaled_rows,
    )
}  # fmt: skip
"""The formula of each primitive: the operations, and the tangents and the products, which have no kernels."""


def loss_to_lse(call: Signature, dy: Array, m: Array, l: Array) -> Array:
    """The gradient in lse from the gradient dy in the loss."""
    z_loss = call.number("z_loss")
    # A row without a finite score has an infinite lse; it counts for nothing where dy is 0.
    return jnp.where(dy == 0, 0, dy * (1 + 2 * z_loss * (m + jnp.log(l)))) if z_loss else dy


def _logprob_to_lse(call: Signature, dy: Array, m: Array, l: Array) -> Array:
    """The gradient in lse from the gradient dy in the logarithm of the probability."""
    return -dy


TO_LSE: dict[str, Callable[..., Array]] = {
    "cross_entropy_backward": loss_to_lse,
    "token_logprobs_backward": _logprob_to_lse,
}
"""The part of each gradient that all columns have, as a gradient in lse."""


def _probabilities(call: Signature, x: Array, m: Array, l: Array, arrays: Mapping[str, Array]) -> Array:
    # A NaN counts for nothing where the mask is False.
    return masked(jnp.exp(scores(call.options, x, arrays) - m[..., None]) / l[..., None], arrays)


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


def _has_target(call: Signature, target: Array, x: Array) -> Array:
    """True for the rows whose target is a column, on this device or on another."""
    return target >= 0 if call.classes else _is_column(target, x)


def _hits(x: Array, target: Array) -> Array:
    """True at the target of each row."""
    # With as many axes as the target, so that nothing is promoted to a higher rank.
    columns = jnp.arange(x.shape[-1], dtype=target.dtype)[(None,) * target.ndim]
    return columns == target[..., None]


def _picked(w: Array, target: Array) -> Array:
    """The element at the target of each row; any element where the target is no column."""
    there = jnp.clip(target, 0, w.shape[-1] - 1)
    return jnp.take_along_axis(w, there[..., None], axis=-1)[..., 0]
