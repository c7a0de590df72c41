"""The formulas of the operations in JAX's own array functions, and the tables that name their derivatives.

XLA runs these functions as the backend `eager`, on every device that JAX knows.  They are also the specification of
the Pallas kernels.  Each function works on the last axis; 16-bit arrays are computed in float32 and rounded once.

The operands of a function are x, the arrays of the score options in the order of `options.arrays`, and what a
gradient needs besides.  `options` has ARRAY in the place of each array.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from ..core.arrays import Array, accumulator
from ..core.options import PLAIN, ScoreOptions, softcap_slope
from ..ops import OPERATIONS
from . import targets
from .exchange import Names
from .plans import OUTPUTS, outputs_of
from .scores import FUNCTIONS, filled, masked, peak, scores, shift
from .targets import PLAIN_TARGET, TargetOptions


def softmax(x: Array, *arrays: Array, options: ScoreOptions = PLAIN) -> Array:
    """The softmax exp(z) / sum(exp(z)); NaN in a row whose maximum is infinite, 0 where the mask is False."""
    z = scores(x, arrays, options)
    # An infinite maximum gives NaN by itself.  A test for it would cost XLA its fusion.
    e = jnp.exp(z - peak(x, z, options))
    return masked(e / jnp.sum(e, axis=-1, keepdims=True), arrays, options, MASKED["softmax"]).astype(x.dtype)


def log_softmax(x: Array, *arrays: Array, options: ScoreOptions = PLAIN) -> Array:
    """The log-softmax z - log(sum(exp(z))); NaN in a row whose maximum is infinite, -inf where the mask is False."""
    z = scores(x, arrays, options)
    z = z - peak(x, z, options)
    y = z - jnp.log(jnp.sum(jnp.exp(z), axis=-1, keepdims=True))
    return masked(y, arrays, options, MASKED["log_softmax"]).astype(x.dtype)


def logsumexp(x: Array, *arrays: Array, options: ScoreOptions = PLAIN) -> Array:
    """The state of each row along a new last axis of size 2: m, made finite, and l = sum(exp(z - m)).

    `result` makes log(sum(exp(z))) = m + log(l) of it.  The gradient needs more bits than that number has.
    """
    z = scores(x, arrays, options)
    s = shift(peak(x, z, options))
    return jnp.stack([s[..., 0], jnp.sum(jnp.exp(z - s), axis=-1)], axis=-1)


def softmax_backward(y: Array, t: Array, *, factor: float = 1.0, axis_name: Names = ()) -> Array:
    """Gradient in the scores from the gradient t in y: factor * y * (t - sum(y t)).

    It is also the change of y from a change t of the scores: the Jacobian of softmax is symmetric.  With `axis_name`,
    rows are sharded along these axes, and the sum is that of all devices.
    """
    wide, t_wide = y.astype(accumulator(y)), t.astype(accumulator(y))
    return (factor * wide * (t_wide - _sum(wide * t_wide, axis_name))).astype(t.dtype)


def log_softmax_backward(y: Array, t: Array, *, factor: float = 1.0, axis_name: Names = ()) -> Array:
    """Gradient in the scores from the gradient t in y: factor * (t - exp(y) * sum(t))."""
    wide, t_wide = y.astype(accumulator(y)), t.astype(accumulator(y))
    return (factor * (t_wide - jnp.exp(wide) * _sum(t_wide, axis_name))).astype(t.dtype)


def log_softmax_tangent(y: Array, t: Array, *, factor: float = 1.0, axis_name: Names = ()) -> Array:
    """Change of y from a change t of the scores: factor * (t - sum(exp(y) t))."""
    wide, t_wide = y.astype(accumulator(y)), t.astype(accumulator(y))
    return (factor * (t_wide - _sum(jnp.exp(wide) * t_wide, axis_name))).astype(t.dtype)


def _sum(t: Array, axis_name: Names) -> Array:
    """The sum of each row, over all devices that hold a part of the row."""
    local = jnp.sum(t, axis=-1, keepdims=True)
    return jax.lax.psum(local, axis_name) if axis_name else local


def logsumexp_backward(x: Array, *rest: Array, options: ScoreOptions = PLAIN, factor: float = 1.0) -> Array:
    """Gradient in the scores from the gradient t in lse: factor * t * exp(z - lse); rest ends with the state and t.

    In a row without a score above -inf it is 0 if t is 0.
    """
    *arrays, state, t = rest
    p = _probabilities(x, tuple(arrays), options, state)
    t = t.astype(p.dtype)[..., None]
    nothing = (t == 0) & (state[..., 1:] == 0)
    return masked(jnp.where(nothing, 0, factor * p * t), tuple(arrays), options, 0).astype(x.dtype)


def logsumexp_tangent(x: Array, *rest: Array, options: ScoreOptions = PLAIN, factor: float = 1.0) -> Array:
    """Change of lse from a change t of the scores: factor * sum(exp(z - lse) t); rest ends with the state and t."""
    *arrays, state, t = rest
    p = _probabilities(x, tuple(arrays), options, state)
    return factor * jnp.sum(p * t.astype(p.dtype), axis=-1)


def row_products(y: Array, t: Array) -> Array:
    """The sum of y * t over each row, in the dtype of the computation."""
    wide = accumulator(y)
    return jnp.sum(y.astype(wide) * t.astype(wide), axis=-1)


def scaled_rows(y: Array, t: Array) -> Array:
    """Each row of y times a number t, in the dtype of y.  XLA removes a multiplication by the constant 1."""
    return (y.astype(accumulator(y)) * t[..., None]).astype(y.dtype)


EAGER_FUNCTIONS: dict[str, Callable[..., Array]] = {
    function.__name__: function
    for function in (
        softmax, log_softmax, logsumexp, softmax_backward, log_softmax_backward, log_softmax_tangent,
        logsumexp_backward, logsumexp_tangent, targets.cross_entropy, targets.cross_entropy_backward,
        targets.cross_entropy_tangent, targets.token_logprobs, targets.token_logprobs_backward,
        targets.token_logprobs_tangent, row_products, scaled_rows,
    )
}  # fmt: skip
"""The function of each primitive: the operations, and the tangents and the products, which have no kernels."""

TRANSPOSES = {
    "softmax_backward": "softmax_backward",
    "log_softmax_tangent": "log_softmax_backward",
    "log_softmax_backward": "log_softmax_tangent",
    "logsumexp_tangent": "logsumexp_backward",
    "logsumexp_backward": "logsumexp_tangent",
    "cross_entropy_tangent": "cross_entropy_backward",
    "cross_entropy_backward": "cross_entropy_tangent",
    "token_logprobs_tangent": "token_logprobs_backward",
    "token_logprobs_backward": "token_logprobs_tangent",
    "row_products": "scaled_rows",
    "scaled_rows": "row_products",
}
"""The transpose of each primitive that is linear in its last operand."""

EXCHANGING = ("softmax_backward", "log_softmax_backward", "log_softmax_tangent")
"""Primitives that take the argument `axis_name`: their sum over a row that is sharded needs an exchange."""

TANGENTS = {
    "softmax": "softmax_backward",
    "log_softmax": "log_softmax_tangent",
    "logsumexp": "logsumexp_tangent",
    "cross_entropy": "cross_entropy_tangent",
    "token_logprobs": "token_logprobs_tangent",
}
"""The primitive that computes the change of an operation's result from a change of its scores."""

MASKED = {"softmax": 0.0, "log_softmax": -jnp.inf}
"""The output per element where the mask is False."""

PER_ROW = frozenset(OUTPUTS) | {TANGENTS[name] for name in OUTPUTS} | {"row_products"}
"""Primitives whose result has values per row; the results of the others have the shape of x."""

NUMBERS = ("smoothing", "z_loss")
"""Operands that are numbers, of the operations that have them."""


def outputs(name: str, target_options: TargetOptions = PLAIN_TARGET) -> tuple[str, ...]:
    """Names of the outputs that a kernel writes for a primitive, in the order of the declaration."""
    return outputs_of(name, target_options.entropy, target_options.gradient)


def numbers(name: str, target_options: TargetOptions) -> tuple[tuple[str, float], ...]:
    """Name and value of the operands that are numbers and are not 0."""
    given = ((number, getattr(target_options, number)) for number in NUMBERS if number in OPERATIONS[name].numbers)
    return tuple((number, value) for number, value in given if value)


def stacked(arrays: tuple[Array, ...]) -> Array:
    """The result of a primitive, from the outputs of its kernel."""
    return arrays[0] if len(arrays) == 1 else jnp.stack(arrays, axis=-1)


def unstacked(name: str, y: Array) -> tuple[Array, ...]:
    """The outputs of a forward operation, from the result of its primitive."""
    return tuple(y[..., i] for i in range(y.shape[-1])) if name in OUTPUTS else (y,)


def result(found: tuple[Array, ...], zero: bool = False) -> Array:
    """The result of softmax, log_softmax or logsumexp, from the outputs of the operation; zero as in logsumexp_of."""
    return found[0] if len(found) == 1 else logsumexp_of(found[0], found[1], zero)


def logsumexp_of(m: Array, l: Array, zero: bool = False) -> Array:
    """The logsumexp m + log(l); log(l) where l is 0 or infinite, because log has no finite derivative there.

    With `zero`, a row whose l is 0 is a constant.
    """
    is_number = (l > 0) & (l < jnp.inf)
    y = jnp.where(l == 0, -jnp.inf, jnp.log(jnp.where(l == 0, 1, l))) if zero else jnp.log(l)
    return jnp.where(is_number, m + jnp.log(jnp.where(is_number, l, 1)), y)


def of_empty_rows(name: str, x: Array) -> Array:
    """The result of a public function for an array without elements."""
    return jnp.full(x.shape[:-1], -jnp.inf, x.dtype) if OPERATIONS[name].per_row else x


def tangent(
    name: str, bind: Callable[..., Array], primals: tuple[Array, ...], y: Array, change: tuple[Array, float],
    options: ScoreOptions, **more: TargetOptions,
) -> Array:  # fmt: skip
    """The change of a primitive's result y.

    Args:
        name: Name of a forward operation.
        bind: Applies a primitive.
        primals: The operands of the operation.
        y: Its result.
        change: (change, factor), whose product is the change of the scores.
        options: The score options.
        more: `target_options` where the operation has a target.
    """
    t, factor = change
    if name in OUTPUTS:
        whole = bind(TANGENTS[name], *primals, y, t, options=options, factor=factor, **more)
        return _tangent_of_outputs(whole, y) if more else _tangent_of_state(whole, y)
    out = bind(TANGENTS[name], y, t, factor=factor)
    mask = options.filled(primals[1:]).mask
    # A masked output is constant.  Where it is 0, it has made its change 0 as a factor.
    return out if mask is None or MASKED[name] == 0 else jnp.where(mask, out, 0)


def _tangent_of_state(dlse: Array, state: Array) -> Array:
    """The change of the state (m, l) from the change of lse: l alone changes.  An infinite l does not."""
    l = jnp.where(jnp.isfinite(state[..., 1]), state[..., 1], 0)
    return jnp.stack([jnp.zeros_like(dlse), dlse * l], axis=-1)


def _tangent_of_outputs(whole: Array, y: Array) -> Array:
    """The change of (result, m, l, ...) from the changes of the result, of lse, and of what follows l."""
    state = _tangent_of_state(whole[..., 1], y[..., 1:3])
    return jnp.concatenate([whole[..., :1], state, whole[..., 2:]], axis=-1)


def score_tangent(
    x: Array, arrays: tuple[Array, ...], options: ScoreOptions, changes: Mapping[str, Array | None]
) -> tuple[Array | None, float]:
    """The change of the scores from changes of x ("x") and of the arrays, by name.

    Returns:
        (change, factor), whose product is the change of the scores; (None, 1.0) where nothing changes.
    """
    given, t_x = filled(x, arrays, options), changes["x"]
    linear = options.softcap is None and options.bias is None and isinstance(options.scale, float)
    if linear and t_x is not None:
        # The kernel multiplies by the scale.
        return _where(given.mask, t_x), float(options.scale)
    wide = accumulator(x)
    t_scale, t_bias = (changes.get(name) for name in ("scale", "bias"))

    def numbers(x: Array) -> Array:
        # The product of NaN and a gradient of 0 would be NaN, in an element that is masked or in a row that counts for
        # nothing.  Other rows with NaN have gradients of NaN without this factor.
        return _where(given.mask, jnp.where(jnp.isnan(x), 0, x)).astype(wide)

    def through_softcap(x: Array, t: Array) -> Array:
        return softcap_slope(FUNCTIONS, numbers(x), given) * t.astype(wide)

    # The slope is computed again for the gradient, so that no float32 array of the size of x is kept.
    through_softcap = through_softcap if options.softcap is None else jax.checkpoint(through_softcap)
    parts = []
    if t_x is not None:
        parts.append(given.scale * through_softcap(x, t_x))
    if t_scale is not None:
        parts.append(through_softcap(x, numbers(x) * t_scale.astype(wide)))
    if t_bias is not None:
        parts.append(t_bias.astype(wide))
    if not parts:
        return None, 1.0
    return _where(given.mask, jnp.broadcast_to(sum(parts[1:], parts[0]), x.shape).astype(x.dtype)), 1.0


def _where(mask: Array | None, t: Array) -> Array:
    return t if mask is None else jnp.where(mask, t, 0)


def _probabilities(x: Array, arrays: tuple[Array, ...], options: ScoreOptions, state: Array) -> Array:
    z = scores(x, arrays, options)
    # A NaN counts for nothing where the mask is False.
    return masked(jnp.exp(z - state[..., :1]) / state[..., 1:], arrays, options, 0)
