"""The formulas of cross-entropy for any array library, passed as `xp`.

They read the operands, the maximum m of each row, the sums of each row, and the values that `picked` returns.  z is the
score, `x` in the code; weight_sum is the sum of the class weights, or the number of classes without weights.

    lse = log(sum(exp(z)))
    loss = own * (lse - z[target]) + spread * (weight_sum * lse - sum(weight * z)) + z_loss * lse²
        own = (1 - smoothing) * weight[target]        spread = smoothing / number of classes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...core.arrays import Array
from ...core.formulas import STATISTICS, SUMS, Formula, is_column, is_defined, logsumexp, probabilities
from ...core.state import shift


def weighted_scores(xp: Any, x: Array, weight: Any = 1.0, **_: Array) -> Array:
    """Product weight * x; its sum over a row is `wz`.  It is 0 where the weight is 0, even if the score is infinite."""
    return x if isinstance(weight, float) else xp.where(weight == 0, 0.0, weight * x)


def _is_ignored(row: Mapping[str, Array]) -> Array:
    """True for the rows whose target is `ignore_index`."""
    # Without ignore_index no row is ignored: `target != target` is False everywhere, in the shape of the target.
    return row["target"] != row["target"] if row.get("ignore_index") is None else row["target"] == row["ignore_index"]


def _parts(row: Mapping[str, Array]) -> tuple[Any, Any, Any]:
    """(own, spread, weight_sum) of the formulas above."""
    smoothing = row.get("smoothing", 0.0)
    return (1 - smoothing) * row.get("w_target", 1.0), smoothing / row["cols"], row.get("weight_sum", row["cols"])


def loss(xp: Any, m: Array, l: Array, z_target: Array, **row: Array) -> Array:
    """Loss of each row: 0 where the target is `ignore_index`, NaN where it is no column or softmax is NaN."""
    own, spread, weight_sum = _parts(row)
    log_l = xp.log(l)
    lse = shift(xp, m) + log_l
    y = own * ((shift(xp, m) - z_target) + log_l)
    if "smoothing" in row:
        y = y + spread * (weight_sum * lse - row["wz"])
    if "z_loss" in row:
        y = y + row["z_loss"] * lse * lse
    return xp.where(_is_ignored(row), 0.0, xp.where(is_column(row) & is_defined(xp, l), y, np.nan))


def loss_of_weights(xp: Any, x: Array, m: Array, l: Array, weights: Array, total: Callable[[Array], Array]) -> Array:
    """Loss of each row with a weight for each class, -sum(weights * log(p)); NaN where softmax is NaN.

    A class of weight 0 adds nothing, even if its score is -inf.

    Args:
        xp, x, m, l: As in the other formulas.
        weights: The weights of the classes of each row; with class probabilities, their products with the class
            weights.
        total: The sum along the softmax dimension, which stays with size 1.
    """
    log_p = (x - shift(xp, m)) - xp.log(l)
    return xp.where(is_defined(xp, l), -total(xp.where(weights == 0, 0.0, weights * log_p)), np.nan)


def divisor(xp: Any, counts: Array, w_target: Array | None = None) -> Array:
    """Divisor of the mean of the losses: the number of rows that count, or the sum of the weights of their targets.

    Args:
        xp: The array library.
        counts: True for the rows that count.
        w_target: Weight of the target of each row; None without weights.
    """
    return counts.sum() if w_target is None else xp.where(counts, w_target, 0.0).sum()


def divisor_of(xp: Any, **row: Array) -> Array:
    """`divisor` from the operands of the rows."""
    return divisor(xp, ~_is_ignored(row), row.get("w_target"))


def gradient_terms(xp: Any, x: Array, dy: Array, m: Array, l: Array, **row: Array) -> tuple[Array, Array]:
    """The two terms whose difference is the gradient of the loss with respect to the scores."""
    own, spread, weight_sum = _parts(row)
    counts, lse = is_column(row) & ~_is_ignored(row), logsumexp(xp, m, l)
    minuend = dy * (own + spread * weight_sum + 2 * row.get("z_loss", 0.0) * lse) * probabilities(xp, x, m, l)
    subtrahend = dy * ((row["columns"] == row["target"]) * own + spread * row.get("weight", 1.0))
    return xp.where(counts, minuend, 0.0), xp.where(counts, subtrahend, 0.0)


def gradient(xp: Any, **values: Array) -> Array:
    """Gradient of the loss with respect to the scores."""
    minuend, subtrahend = gradient_terms(xp, **values)
    return minuend - subtrahend


FORWARD = Formula(
    {**SUMS, "wz": weighted_scores, "largest": lambda xp, x, **_: x},
    {
        "loss": loss,
        "mean_loss": lambda xp, **values: loss(xp, **values).sum() / divisor_of(xp, **values),
        "total_loss": lambda xp, **values: loss(xp, **values).sum(),
        "y": gradient,
        **STATISTICS,
        "largest": lambda xp, largest, **_: largest,
    },
)
BACKWARD = Formula({}, {"y": gradient}, gradient_terms)
