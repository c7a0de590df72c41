"""The operations by NumPy's own functions: softmax and its like through a `State`, the others by their formulas.

The losses are computed in float64, some rows at a time, and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..core.arrays import Array, namespace
from ..core.declaration import Operation
from ..core.options import Functions, ScoreOptions, causal_mask, scores
from ..core.state import State, shift
from ..ops import CROSS_ENTROPY, OPERATIONS
from ..ops.cross_entropy.formulas import divisor, loss_of_weights
from ..ops.reference import evaluate, with_sums
from .arguments import Loss

FUNCTIONS = Functions(
    np.tanh,
    lambda condition, x, number: np.where(condition, x, number).astype(x.dtype),
    lambda t, dtype: t.astype(dtype),
)
"""NumPy's functions for the array formula of the scores."""

ELEMENTS = 1 << 18
"""Elements that are computed at a time: their float64 arrays lie in a processor's cache."""


def scores_of(x: Any, options: ScoreOptions, dims: tuple[int, ...] = ()) -> Any:
    """The scores of logits in the dtype of the logits, float32 or float64."""
    seen = causal_mask(np.arange, x.shape, dims[0]) if options.causal else None
    return scores(FUNCTIONS, x, options, seen)


def result(operation: Operation, z: Any, dims: tuple[int, ...], keepdim: bool) -> Any:
    """The result for scores; a row lies along all of the dimensions."""
    if len(dims) != 1:
        others = [i for i in range(z.ndim) if i not in dims]
        order = [*others, *dims]
        moved = z.transpose(order)
        rows = moved.reshape(*(z.shape[i] for i in others), math.prod(z.shape[i] for i in dims))
        y = result(operation, rows, (len(others),), False)
        if not operation.per_row:
            return y.reshape(moved.shape).transpose(np.argsort(order))
        return np.expand_dims(y, dims) if keepdim else y
    of_state = getattr(State, operation.name, None)
    if of_state is not None:
        y = of_state(State.of(z, dims[0]), keepdim if operation.per_row else z)
        return y if z.ndim else y.reshape(())
    rows = z.reshape(z.shape or (1,))
    y = evaluate(operation.name, namespace(rows), {"x": rows}, dims[0]) if z.size or operation.per_row else z
    return y.squeeze(dims[0]) if not z.ndim or (operation.per_row and not keepdim) else y


def cuts(shape: tuple[int, ...], axis: int) -> Iterator[tuple[Any, Any]]:
    """(element_index, row_index) of a few rows at a time: index of these rows in the logits, and in per-row arrays.

    The rows are cut along the longest dimension other than `axis`.
    """
    elements, others = math.prod(shape), [i for i in range(len(shape)) if i != axis]
    if not others:
        if elements:
            yield (slice(None),), ()
        return
    along = max(others, key=lambda i: shape[i])
    step = max(1, ELEMENTS * shape[along] // max(1, elements))
    for first in range(0, shape[along] if elements else 0, step):
        index = [slice(None)] * len(shape)
        index[along] = slice(first, first + step)
        yield tuple(index), tuple(index[:axis] + index[axis + 1 :])


def outputs_of(
    operation: str, z: Array, axis: int, operands: dict[str, Any], outputs: tuple[str, ...], target: Array | None = None
) -> tuple[dict[str, Array], dict[str, Array]]:
    """(outputs by name, values that the formulas read) of an operation for some rows.

    The row maximum limited to finite numbers is subtracted from the scores to keep precision.

    Args:
        operation: Name in OPERATIONS.
        z: The scores.
        axis: The softmax dimension.
        operands: The operands besides the input and the target.
        outputs: Names of the outputs.
        target: The target column of each row, or several along the softmax dimension; those out of range are negative.
    """
    xp = namespace(z)
    m = xp.max(z, axis)
    offset = shift(xp, m)
    found = with_sums(operation, xp, {"x": z - offset, "m": m - offset, **operands}, axis, *outputs)
    if target is not None:
        # Without the target among its values, `with_sums` need not search each row for the column of the target.
        found |= {"target": target, "z_target": np.take_along_axis(found["x"], np.maximum(target, 0), axis)}
    values = {name: OPERATIONS[operation].formula.outputs[name](xp, **found) for name in outputs}
    return values | ({"lse": values["lse"] + offset} if "lse" in values else {}), found


def float64_scores(x: Array, element_index: Any, options: ScoreOptions | None) -> Array:
    """The scores of some rows in float64."""
    wide = x[element_index].astype(np.float64)
    if options is None:
        return wide
    return scores_of(wide, options.mapped(lambda _, t: part(t, x, element_index)))


def part(t: Any, x: Array, element_index: Any) -> Any:
    """The elements of a score option that belong to some rows of x."""
    return np.broadcast_to(t, x.shape)[element_index] if isinstance(t, np.ndarray) and t.ndim else t


def losses(loss: Loss, element_index: Any, row_index: Any, z: Array, outputs: tuple[str, ...]) -> dict[str, Array]:
    """Outputs for some rows, without z_loss: in a mean, that part has another divisor.

    Args:
        loss: The call.
        element_index, row_index: Index of these rows in the logits, and in per-row arrays.
        z: The scores.
        outputs: "loss", "lse" or "entropy".
    """
    axis, weight = loss.axis, loss.weight
    weight = None if weight is None else weight.reshape(-1, *[1] * (z.ndim - 1 - axis))
    mask = None if loss.options is None else loss.options.mask
    target = None
    if not loss.of_classes:
        # The target of a row that does not count is often no class.
        target = np.expand_dims(np.where(loss.counts, loss.target, 0)[row_index].astype(np.int64), axis)
    if target is not None and (not loss.smoothing or mask is None):
        operands: dict[str, Any] = {"smoothing": loss.smoothing} if loss.smoothing else {}
        if loss.weight is not None and weight is not None:
            operands |= {"weight": weight, "w_target": loss.weight[target], "weight_sum": weight.sum()}
        values, _ = outputs_of(CROSS_ENTROPY.name, z, axis, operands, outputs, target)
    else:
        values, found = outputs_of(CROSS_ENTROPY.name, z, axis, {}, ("l", *outputs[1:]))
        q = loss.target[element_index].astype(np.float64) if target is None else found["columns"] == target
        kept = np.broadcast_to(np.True_ if mask is None else part(mask, loss.x, element_index), z.shape)
        q = (1 - loss.smoothing) * q + loss.smoothing * np.where(kept, 1 / kept.sum(axis, keepdims=True), 0.0)
        q, xp = q if weight is None else q * weight, namespace(z)
        state = {name: found[name] for name in ("x", "m", "l")}
        values[outputs[0]] = loss_of_weights(xp, **state, weights=q, total=lambda t: xp.sum(t, axis))
    return {name: values[name].squeeze(axis) for name in outputs}


def reduced(loss: Loss, losses: Array, penalties: Array) -> Array:
    """The reduced loss.  The mean of the penalties is over the rows that count, without their weights."""
    if loss.reduction == "none":
        return losses + penalties
    total, penalty = np.sum(losses), np.sum(penalties)
    if loss.reduction == "mean":
        counts, own = loss.counts & bool(loss.x.shape[loss.axis]), None
        if loss.weight is not None and not loss.of_classes:
            own = loss.weight[np.where(counts, loss.target, 0).astype(np.int64)] if counts.any() else np.zeros(())
        total = np.true_divide(total, divisor(np, counts, own))
        penalty = np.true_divide(penalty, divisor(np, counts)) if loss.z_loss else penalty
    return total + penalty
