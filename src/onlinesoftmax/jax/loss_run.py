"""Cross-entropy and token log-probabilities of rows: their checks, their labels, and the primitives that they call."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import ops
from ..core.arguments import Library, check_flags
from ..core.arrays import Array, accumulator
from ..core.options import ScoreOptions
from ..core.task import Choice
from ..ops.cross_entropy.arguments import check_factors
from ..ops.support import checked_support, excluding, truncated
from ..planner.plan import PlanError
from . import array_types, custom_op, loss_total
from .eager import filled, logsumexp_of, scores, scores_at
from .exchange import column_of, whole_target
from .loss_total import LossReduction
from .prepare import Axis, Rows, as_array, as_labels, axes_of, checked_array, checked_input, rows_of
from .run import Numbers, call_on, results
from .signature import Values

CROSS_ENTROPY, TOKEN_LOGPROBS = ops.CROSS_ENTROPY.name, ops.TOKEN_LOGPROBS.name

EAGER = Choice("eager", "row")
"""The choice of XLA's operations."""


class TokenLogprobs(NamedTuple):
    """Log-probability, entropy and logsumexp, one value per row.

    Attributes:
        logprob: Logarithm of the probability of the chosen element.
        entropy: Entropy of the row's softmax in nats; None where it was not asked for.
        lse: Logarithm of the sum of exp(z).
    """

    logprob: jax.Array
    entropy: jax.Array | None
    lse: jax.Array


def run_loss(
    logits: Any, labels: Any, axis: Axis, options: ScoreOptions, numbers: Numbers, choice: Choice,
    axis_name: Any, reduction: LossReduction,
) -> Array:  # fmt: skip
    """The losses, reduced; the arguments are those of the public function, not checked."""
    custom_op.check(CROSS_ENTROPY, choice)
    reduction = reduction.checked(CROSS_ENTROPY)
    x, labels = checked_input(CROSS_ENTROPY, logits), _labels(CROSS_ENTROPY, "labels", labels)
    check_factors(CROSS_ENTROPY, numbers["smoothing"], numbers["z_loss"])
    numbers = {name: float(number) for name, number in numbers.items()}
    rows = rows_of(CROSS_ENTROPY, x, axis, options._replace(mask=_where(x, axis, options.mask)), axis_name)
    with_integers = jnp.issubdtype(labels.dtype, jnp.integer)
    if reduction.ignore_index is not None and not with_integers:
        raise ValueError(f"{CROSS_ENTROPY}: ignore_index needs integer labels, got {labels.dtype}")
    target = _target(CROSS_ENTROPY, "labels", labels, rows) if with_integers else None
    weights = None if with_integers else _weights(labels, x, rows)
    counted = reduction.counted(labels) if with_integers else None
    # Without an exchange and a gradient of the scale, the forward pass of a scalar loss can write the gradient.  In
    # float16 it would round to 0 before the factor of a gradient scaler reaches it.
    can_write = not rows.names and isinstance(rows.options.scale, float) and not _of_kept(rows, numbers)
    can_write = can_write and rows.x.dtype != jnp.float16
    if rows.x.size and target is not None and reduction.kind != "none" and can_write:
        call, operands = call_on(rows, CROSS_ENTROPY, choice, target=target, numbers=numbers)
        return loss_total.total(reduction, call, operands, counted).astype(rows.dtype)
    return reduction.of(_losses(rows, target, weights, counted, numbers, choice), counted).astype(rows.dtype)


def _of_kept(rows: Rows, numbers: Numbers) -> bool:
    """True where a part of each label is spread over the classes that `where` keeps."""
    return numbers["smoothing"] > 0 and rows.options.mask is not None


def _losses(
    rows: Rows, target: Array | None, weights: Array | None, counted: Array | None, numbers: Numbers, choice: Choice
) -> Array:
    """The loss of every row, in the dtype of the computation."""
    if rows.x.size == 0:
        return jnp.full(rows.x.shape[:-1], jnp.nan, accumulator(rows.x))
    if target is not None and counted is not None:
        # The label of a row that counts for nothing is often no class, and its loss, which is replaced by 0, would be
        # NaN: an error with `jax_debug_nans`.
        target = jnp.where(counted, target, 0)
    if target is not None and not _of_kept(rows, numbers):
        return _of_targets(rows, target, numbers, choice)
    if choice.backend not in (None, EAGER.backend) or choice.strategy not in (None, EAGER.strategy):
        given = "labels with a weight per class have" if target is None else "label_smoothing with where has"
        raise PlanError(f"{CROSS_ENTROPY}: {given} no kernel: leave backend and strategy out")
    if weights is not None:
        return _of_weights(rows, weights, numbers)
    if counted is not None:
        # A row that counts for nothing may hold NaN, which would reach its gradient.
        rows = rows._replace(x=jnp.where(counted[..., None], rows.x, 0))
    # The part of the target and the part that is spread over the classes that are kept.
    own = _of_targets(rows, target, {**numbers, "smoothing": 0.0}, EAGER)
    spread = _of_weights(rows, jnp.zeros((), rows.x.dtype), {**numbers, "smoothing": 1.0})
    return (1 - numbers["smoothing"]) * own + numbers["smoothing"] * spread


def run_tokens(
    logits: Any, index: Any, axis: Axis, options: ScoreOptions, entropy: bool, choice: Choice, axis_name: Any = None,
    ignore_index: Any = None,
) -> TokenLogprobs:  # fmt: skip
    """The results of every row; the arguments are those of the public function, not checked."""
    custom_op.check(TOKEN_LOGPROBS, choice)
    check_flags(TOKEN_LOGPROBS, entropy=entropy)
    x, index = checked_input(TOKEN_LOGPROBS, logits), _index(index)
    counted = LossReduction("none", ignore_index).checked(TOKEN_LOGPROBS).counted(index)
    # The index of a row that counts for nothing is often no token, whose logprob would be NaN.
    library: Any = np if isinstance(index, np.ndarray) else jnp
    index = index if counted is None else library.where(counted, index, 0)
    axes = axes_of(TOKEN_LOGPROBS, axis, x.ndim)
    several = len(axes) == 1 and index.ndim == x.ndim
    if several and axis_name is not None:
        raise ValueError(f"{TOKEN_LOGPROBS}: index with several elements of a row does not work with axis_name")
    # The gradients of several elements are added to that of lse, which must not be rounded before.
    rows = rows_of(TOKEN_LOGPROBS, x.astype(accumulator(x)) if several else x, axis, options, axis_name)
    target = None if several else _target(TOKEN_LOGPROBS, "index", index, rows)
    columns = _columns(index, rows) if several else None
    if rows.x.size:
        first = jnp.zeros(rows.x.shape[:-1], jnp.int32) if target is None else target
        found = results(rows, TOKEN_LOGPROBS, choice, entropy, first)
    else:
        zeros = jnp.zeros(rows.x.shape[:-1], accumulator(rows.x))
        found = {"m": zeros, "l": zeros, "entropy": zeros, "y": zeros + jnp.nan}
    m, l = found["m"], found["l"]
    y = found["y"] if columns is None else rows.back_of_row(_of_columns(rows, columns, m, l))
    y = y if counted is None else jnp.where(counted, y, 0)
    return TokenLogprobs(y, found["entropy"] if entropy else None, logsumexp_of(m, l))


def _check_array(name: str, argument: str, t: Any, *_: Any) -> None:
    if not isinstance(t, (jax.Array, np.ndarray)):
        raise TypeError(f"{name}: {argument} must be an array, not {type(t).__name__}")


_JAX = Library(
    _check_array, _check_array, lambda t: "integer" if jnp.issubdtype(t.dtype, jnp.integer) else "other",
    lambda *_: True, lambda *_: "",
)  # fmt: skip
"""JAX's arrays for the checks of a support."""


def run_truncated(
    logits: Any, index: Any, axis: Axis, options: ScoreOptions, entropy: bool, choice: Choice, ignore_index: Any,
    support: Any,
) -> TokenLogprobs:  # fmt: skip
    """`run_tokens` of the distribution of the tokens in `support`."""
    x, index = checked_input(TOKEN_LOGPROBS, logits), _index(index)
    axes = axes_of(TOKEN_LOGPROBS, axis, x.ndim)
    if len(axes) != 1:
        raise ValueError(f"{TOKEN_LOGPROBS}: support needs a single axis, got {axis}")
    (at,) = axes
    several = index.shape[at : at + 1] if index.ndim == x.ndim else ()
    if index.shape != (*x.shape[:at], *several, *x.shape[at + 1 :]):
        raise ValueError(
            f"{TOKEN_LOGPROBS}: index of shape {index.shape} has other rows than logits of shape {x.shape}"
        )
    if options.mask is not None:
        options = options._replace(mask=checked_array(TOKEN_LOGPROBS, x, "mask", options.mask))
    counted = LossReduction("none", ignore_index).checked(TOKEN_LOGPROBS).counted(index)
    token_ids, offsets, n = checked_support(_JAX, TOKEN_LOGPROBS, x, at, support)
    tokens = x.shape[at]
    kept = column_of(token_ids, tokens), column_of(offsets, token_ids.shape[0] + 1)
    call = truncated(jnp, array_types.take, x, column_of(index, tokens), at, options, kept, jnp.arange(n))
    # The results of these targets are replaced, and NaN would be an error with `jax_debug_nans`.
    replaced = call.outside if counted is None else call.outside | ~counted
    found = run_tokens(call.x, jnp.where(replaced, 0, call.index), at, call.options, entropy, choice)
    y = excluding(jnp, found.logprob, found.lse, call.outside, at)
    return found._replace(logprob=y if counted is None else jnp.where(counted, y, 0))


def _columns(index: Array, rows: Rows) -> Array:
    """The columns of several elements of each row along a last axis, -1 where one is out of range."""
    found = jnp.moveaxis(column_of(index, rows.cols), rows.axes[0], -1)
    if found.shape[:-1] != rows.x.shape[:-1]:
        raise ValueError(
            f"{TOKEN_LOGPROBS}: index of shape {index.shape} has other rows than logits of shape {rows.shape}"
        )
    return found


def _of_columns(rows: Rows, columns: Array, m: Array, l: Array) -> Array:
    """The logarithms of the probabilities of columns, from the state of each row; NaN where one is out of range."""
    if rows.x.size == 0:
        return jnp.full(columns.shape, jnp.nan, l.dtype)
    z = scores_at(rows.options, rows.x, rows.arrays, jnp.maximum(columns, 0))
    y = (z - m[..., None]) - logsumexp_of(jnp.zeros_like(l), l)[..., None]
    return jnp.where((columns >= 0) & (l < jnp.inf)[..., None], y, jnp.nan)


def _of_targets(rows: Rows, target: Array, numbers: Numbers, choice: Choice) -> Array:
    """The losses of rows with one true class each."""
    found = results(rows, CROSS_ENTROPY, choice, target=target, numbers=numbers)
    return loss_total.without_empty(rows.options, found["loss"], found["l"])


def _of_weights(rows: Rows, weights: Array, numbers: Numbers) -> Array:
    """The losses of rows with a weight for each class.

    The loss is sum(q) * log(l) - sum(q * (z - m)): scores that are all large do not cancel.  The state (m, l) changes
    in l alone, so m counts as a constant.
    """
    smoothing, z_loss = numbers["smoothing"], numbers["z_loss"]

    def of_rows(x: Array, arrays: Values, weights: Array, classes: Array | None) -> tuple[Array, Array, Array]:
        # The gradient of a class is the difference of two large numbers, which is rounded once.
        wide = rows._replace(x=x.astype(accumulator(x)), arrays=arrays)
        found = results(wide, "logsumexp", EAGER)
        m, l = found["m"], found["l"]
        return m, l, _weighted_sums(wide.x, arrays, weights, m, classes, options=rows.options, smoothing=smoothing)

    # All but the state is computed again for the gradient, so that no array of the size of the logits is kept.
    kept = jax.checkpoint(of_rows, policy=_is_state)
    m, l, sums = kept(rows.x, rows.arrays, weights, _classes(rows) if smoothing else None)
    log_l = logsumexp_of(jnp.zeros_like(m), l)
    if rows.options.mask is not None:
        log_l = jnp.where(l == 0, 0, log_l)
    total, of_scores = rows.sum(sums)
    y = total * log_l - of_scores + (z_loss * (m + log_l) ** 2 if z_loss else 0)
    return loss_total.without_empty(rows.options, y, l)


def _is_state(primitive: Any, *_: Any, **__: Any) -> bool:
    """True for the state of rows, which `jax.checkpoint` keeps: that of whole rows, or of `autograd.run_shards`."""
    return primitive in custom_op.PRIMITIVES.values() or primitive.name == "custom_jvp_call"


def _classes(rows: Rows) -> Array:
    """The number of classes of each row that are kept, at least 1, in the dtype of the computation."""
    wide, mask = accumulator(rows.x), filled(rows.options, rows.x, rows.arrays).mask
    if mask is None:
        return jnp.asarray(rows.cols, wide)
    kept = jnp.broadcast_to(mask, rows.x.shape)
    return jnp.maximum(rows.sum(jnp.sum(kept, axis=-1, keepdims=True, dtype=wide)), 1)


def _weighted_sums(
    x: Array, arrays: Values, weights: Array, m: Array, classes: Array | None, *, options: ScoreOptions,
    smoothing: float,
) -> Array:  # fmt: skip
    """The sums of the weights q and of q * (z - m), stacked; smoothing spreads over this number of classes."""
    wide, mask = accumulator(x), filled(options, x, arrays).mask
    # A class that is left out may hold NaN, which would reach its gradient through the softcap.
    x = x if mask is None else jnp.where(mask, x, 0)
    w = scores(options, x, arrays) - m[..., None]
    q = jnp.broadcast_to(weights.astype(wide), x.shape)
    kept = jnp.ones((), bool) if mask is None else mask
    if classes is not None:
        q = (1 - smoothing) * q + smoothing / classes
    q = jnp.where(kept, q, 0)
    # A class of probability 0 and weight 0 counts for nothing.
    w = jnp.where((q == 0) & (w == -jnp.inf), 0, w)
    return jnp.stack([jnp.sum(q, axis=-1), jnp.sum(q * w, axis=-1)])


def _labels(name: str, argument: str, labels: Any) -> Array:
    found = as_labels(name, argument, labels)
    if jnp.issubdtype(found.dtype, jnp.complexfloating):
        raise TypeError(f"{name}: {argument} must not be complex, got {found.dtype}")
    return found


def _index(index: Any) -> Array:
    found = _labels(TOKEN_LOGPROBS, "index", index)
    if not jnp.issubdtype(found.dtype, jnp.integer):
        raise TypeError(f"{TOKEN_LOGPROBS}: index must be integers, got {found.dtype}")
    return found


def _where(x: Array, axis: Axis, where: Any) -> Array | None:
    """The mask with as many axes as x: as in optax, a mask of rows lacks the reduced axes."""
    if where is None:
        return None
    where, axes = as_array(CROSS_ENTROPY, "where", where), axes_of(CROSS_ENTROPY, axis, x.ndim)
    rows = tuple(size for i, size in enumerate(x.shape) if i not in axes)
    of_rows = len(where.shape) == len(rows) and all(n in (1, m) for n, m in zip(where.shape, rows, strict=True))
    return jnp.expand_dims(where, axes) if of_rows else where


def _target(name: str, argument: str, index: Array, rows: Rows) -> Array:
    """The column of each row, -1 where it is out of range: of 32 bits for whole rows, else as in `whole_target`."""
    outer, cols = rows.x.shape[:-1], rows.x.shape[-1]
    if index.shape != outer:
        raise ValueError(
            f"{name}: integer {argument} must have the shape {outer} of the logits without axis, got {index.shape}"
        )
    if rows.names and cols:
        return whole_target(index, cols, rows.names)
    return column_of(index, cols)


def _weights(labels: Array, x: Array, rows: Rows) -> Array:
    """The weights of the classes in the layout of the rows."""
    try:
        whole = jnp.broadcast_to(labels, x.shape)
    except ValueError:
        hint = "; class labels are integers: labels.astype(int)" if labels.ndim < x.ndim else ""
        raise ValueError(
            f"{CROSS_ENTROPY}: labels of shape {labels.shape} do not broadcast to logits of shape {x.shape}{hint}"
        ) from None
    return rows.last(whole)
