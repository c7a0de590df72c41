"""cross_entropy and token_logprobs of NumPy arrays: the formulas of their rooms in float64, some rows at a time.

The results are rounded once.  There are no gradients.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.arguments import check_options
from ..core.arrays import Array, namespace, quiet
from ..core.call import Call, LossStatistics, Settings, TokenLogprobs
from ..core.options import ScoreOptions
from ..ops import OPERATIONS
from ..ops.cross_entropy.arguments import NAME as CROSS_ENTROPY
from ..ops.cross_entropy.formulas import loss_of_weights
from ..ops.token_logprobs.arguments import NAME as TOKEN_LOGPROBS
from .check import NUMPY, check_choice
from .loss_arguments import (
    Loss,
    check_targets,
    check_tokens,
    checked_loss,
    checked_tokens,
    dtype_of_loss,
)
from .rows import cuts, float64_scores, part, shifted

__all__ = ["check_targets", "check_tokens", "cross_entropy", "token_logprobs"]


@quiet
def cross_entropy(x: Any, target: Any, weight: Any, fields: tuple[Any, ...], return_stats: bool) -> Any:
    """The loss, or (loss, LossStatistics): the implementation of `onlinesoftmax.cross_entropy` on NumPy arrays.

    Args:
        x, target, weight: The arrays.
        fields: The fields of `Loss` in torch/loss.py.
        return_stats: Return the statistics too.
    """
    loss = checked_loss(x, target, weight, fields)
    dtype = dtype_of_loss(fields[0].dtype, loss.x)
    wide = np.float64 if max(loss.x.dtype.itemsize, dtype.itemsize) >= 8 else np.float32
    outputs = ("loss", *(("lse", "entropy") if return_stats or loss.z_loss else ()))
    rows = {name: np.zeros(loss.counts.shape) for name in outputs}
    largest = np.full(loss.counts.shape, -1)
    for element_index, row_index in cuts(loss.x.shape, loss.axis):
        z = float64_scores(loss.x, element_index, loss.options)
        for name, values in _losses(loss, element_index, row_index, z, outputs).items():
            rows[name][row_index] = values
        if return_stats:
            # A softcap makes large scores equal, and keeps their order.
            uncapped = loss.options and loss.options._replace(softcap=None)
            largest[row_index] = np.argmax(float64_scores(loss.x, element_index, uncapped), loss.axis)
    if not loss.x.shape[loss.axis] and "lse" in rows:
        rows["lse"][...] = -np.inf
    losses = np.where(loss.counts, rows["loss"], 0.0)
    penalties = np.where(loss.counts, loss.z_loss * rows["lse"] ** 2, 0.0) if loss.z_loss else np.zeros_like(losses)
    y = np.asarray(_reduced(loss, losses, penalties)).astype(dtype)
    if not return_stats:
        return y
    classes = loss.target
    if loss.of_classes:
        classes = loss.target.argmax(loss.axis) if loss.x.shape[loss.axis] else largest
    lse, penalty, entropy = (t.astype(wide) for t in (rows["lse"], penalties, rows["entropy"]))
    return y, LossStatistics(lse, penalty, entropy, largest, np.asarray((largest == classes) & loss.counts))


def _losses(loss: Loss, element_index: Any, row_index: Any, z: Array, outputs: tuple[str, ...]) -> dict[str, Array]:
    """Outputs for some rows, without z_loss: in a mean, that part has another divisor.

    Args:
        loss: The call.
        element_index, row_index: Index of these rows in the logits, and in per-row arrays.
        z: The scores.
        outputs: "loss", "lse" or "entropy".
    """
    axis, xp = loss.axis, namespace(z)
    weight = None if loss.weight is None else loss.weight.reshape(-1, *[1] * (z.ndim - 1 - axis))
    mask = None if loss.options is None else loss.options.mask
    by_class_weights = loss.of_classes or (loss.smoothing > 0 and mask is not None)
    beside: dict[str, Any] = {}
    target = None
    if not loss.of_classes:
        # The target of a row that does not count is often no class.
        target = np.expand_dims(np.where(loss.counts, loss.target, 0)[row_index].astype(np.int64), axis)
    if not by_class_weights:
        beside |= {} if weight is None else {"weight": weight}
        beside |= {"smoothing": loss.smoothing} if loss.smoothing else {}
        beside |= {"weight_sum": weight.sum()} if weight is not None and loss.smoothing else {}
    found, m = shifted(CROSS_ENTROPY, z, axis, beside, outputs)
    if target is not None:
        # Without the target among its values, `with_sums` need not search each row for the column of the target.
        found |= {"target": target, "z_target": np.take_along_axis(found["x"], target, axis)}
        found |= {} if loss.weight is None else {"w_target": loss.weight[target]}
    formulas = OPERATIONS[CROSS_ENTROPY].formula.outputs
    values = {name: formulas[name](xp, **found) for name in outputs if not (by_class_weights and name == outputs[0])}
    if by_class_weights:
        q = loss.target[element_index].astype(np.float64) if target is None else found["columns"] == target
        kept = np.broadcast_to(np.True_ if mask is None else part(mask, loss.x, element_index), z.shape)
        q = (1 - loss.smoothing) * q + loss.smoothing * np.where(kept, 1 / kept.sum(axis, keepdims=True), 0.0)
        q = q if weight is None else q * weight
        state = {name: found[name] for name in ("x", "m", "l")}
        values[outputs[0]] = loss_of_weights(xp, **state, weights=q, total=lambda t: xp.sum(t, axis))
    if "lse" in values:
        values["lse"] = values["lse"] + m
    return {name: value.squeeze(axis) for name, value in values.items()}


def _reduced(loss: Loss, losses: Array, penalties: Array) -> Array:
    """The reduced loss.  The mean of the penalties is over the rows that count, without their weights."""
    if loss.reduction == "none":
        return losses + penalties
    total, penalty = np.sum(losses), np.sum(penalties)
    if loss.reduction == "mean":
        count = np.count_nonzero(loss.counts) if loss.x.shape[loss.axis] else 0
        divisor: Any = count
        if loss.weight is not None and not loss.of_classes:
            own = loss.weight[np.where(loss.counts, loss.target, 0).astype(np.int64)] if count else np.zeros(())
            divisor = np.sum(np.where(loss.counts, own, 0.0))
        total, penalty = np.true_divide(total, divisor), np.true_divide(penalty, count) if loss.z_loss else penalty
    return total + penalty


@quiet
def token_logprobs(
    x: Any, index: Any, dim: Any, options: ScoreOptions | None, entropy: bool, choice: Any, ignore_index: Any = None
) -> TokenLogprobs:
    """The implementation of `onlinesoftmax.token_logprobs` on NumPy arrays."""
    tokens = checked_tokens(x, index, dim, ignore_index)
    check_choice(TOKEN_LOGPROBS, choice)
    x, axis, xp = np.asarray(x), tokens.axis, namespace(np.zeros(0))
    check_options(NUMPY, Call(OPERATIONS[TOKEN_LOGPROBS], x, Settings(axis), options))
    formulas, row_shape = OPERATIONS[TOKEN_LOGPROBS].formula.outputs, (*x.shape[:axis], *x.shape[axis + 1 :])
    rows = {"lse": np.full(row_shape, -np.inf), **({"entropy": np.zeros(row_shape)} if entropy else {})}
    logprob = np.full(tokens.columns.shape, np.nan)
    for element_index, row_index in cuts(x.shape, axis):
        z, target = float64_scores(x, element_index, options), tokens.columns[element_index]
        found, m = shifted(TOKEN_LOGPROBS, z, axis, {}, ("y", *rows))
        z_target = np.take_along_axis(found["x"], np.maximum(target, 0), axis)
        logprob[element_index] = formulas["y"](xp, **found, target=target, z_target=z_target)
        for name, result in rows.items():
            value = formulas[name](xp, **found)
            result[row_index] = (value + m if name == "lse" else value).squeeze(axis)
    logprob = np.where(tokens.ignored, 0.0, logprob.reshape(tokens.ignored.shape))
    wide = np.float64 if x.dtype.itemsize >= 8 else np.float32
    return TokenLogprobs(
        logprob.astype(wide), rows["entropy"].astype(wide) if entropy else None, rows["lse"].astype(wide)
    )
