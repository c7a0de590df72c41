"""The formulas of the operations with a target column per row: cross-entropy and token log-probabilities.

They are parts of core/reference.py, in any array library.  Besides the operands, the maximum and the sums of a row,
they read what `picked` adds: the score and the weight of the target column.

    lse = log(sum(exp(z)))
    logprob = z[target] - lse
    loss = own * (lse - z[target]) + spread * (weight_sum * lse - sum(weight * z)) + z_loss * lse²
        own = (1 - smoothing) * weight[target]        spread = smoothing / number of classes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .arrays import Array


def picked(xp: Any, values: Mapping[str, Array], columns: Array, total: Callable[[Array], Array]) -> dict[str, Array]:
    """Score and weight of the target column of each row: "z_target" and "w_target"; nothing without a target.

    A target that is no column gives 0.

    Args:
        xp: Functions of the array library.
        values: The operands by name.
        columns: The number of each column, in a shape that broadcasts to x.
        total: The sum along the softmax dimension, which stays with size 1.
    """
    if "target" not in values:
        return {}
    hit = columns == values["target"]
    found = {"z_target": total(xp.where(hit, values["x"], 0.0))}
    if "weight" in values:
        found["w_target"] = total(xp.where(hit, values["weight"] + 0 * values["x"], 0.0))
    return found


def _finite(xp: Any, m: Array) -> Array:
    return xp.clip(m)


def weighted_scores(xp: Any, x: Array, weight: Any = 1.0, **_: Array) -> Array:
    """The summand of `wz`."""
    return weight * x


def _probabilities(xp: Any, x: Array, m: Array, l: Array) -> Array:
    """Softmax of the scores: NaN where the maximum of the row is infinite."""
    return xp.where(_is_defined(xp, l), xp.exp(x - _finite(xp, m)) / l, np.nan)


def _is_defined(xp: Any, l: Array) -> Array:
    """True for the rows that have a softmax: l is 0 in a row of -inf, and infinite in a row with +inf."""
    return (l > 0) & ~xp.isinf(l)


def _is_column(row: Mapping[str, Array]) -> Array:
    """True for the rows whose target is a column."""
    return (row["target"] >= 0) & (row["target"] < row["cols"])


def _is_ignored(row: Mapping[str, Array]) -> Array:
    """True for the rows whose target is `ignore_index`."""
    # A target never equals None.
    return row["target"] != row["target"] if row.get("ignore_index") is None else row["target"] == row["ignore_index"]


def _parts(row: Mapping[str, Array]) -> tuple[Any, Any, Any]:
    """(own, spread, weight_sum) of the formulas above."""
    smoothing = row.get("smoothing", 0.0)
    return (1 - smoothing) * row.get("w_target", 1.0), smoothing / row["cols"], row.get("weight_sum", row["cols"])


def log_probability(xp: Any, m: Array, l: Array, z_target: Array, **row: Array) -> Array:
    """Logarithm of the probability of the target; NaN where the target is no column, and where softmax is NaN."""
    return xp.where(_is_column(row) & _is_defined(xp, l), (z_target - _finite(xp, m)) - xp.log(l), np.nan)


def loss(xp: Any, m: Array, l: Array, z_target: Array, **row: Array) -> Array:
    """Loss of each row: 0 where the target is `ignore_index`, NaN where it is no column or softmax is NaN."""
    own, spread, weight_sum = _parts(row)
    log_l = xp.log(l)
    lse = _finite(xp, m) + log_l
    y = own * ((_finite(xp, m) - z_target) + log_l)
    if "smoothing" in row:
        y = y + spread * (weight_sum * lse - row["wz"])
    if "z_loss" in row:
        y = y + row["z_loss"] * lse * lse
    return xp.where(_is_ignored(row), 0.0, xp.where(_is_column(row) & _is_defined(xp, l), y, np.nan))


def loss_terms(xp: Any, x: Array, dy: Array, m: Array, l: Array, **row: Array) -> tuple[Array, Array]:
    """The two terms whose difference is the gradient of the loss with respect to the scores."""
    own, spread, weight_sum = _parts(row)
    counts, lse = _is_column(row) & ~_is_ignored(row), _finite(xp, m) + xp.log(l)
    minuend = dy * (own + spread * weight_sum + 2 * row.get("z_loss", 0.0) * lse) * _probabilities(xp, x, m, l)
    subtrahend = dy * ((row["columns"] == row["target"]) * own + spread * row.get("weight", 1.0))
    return xp.where(counts, minuend, 0.0), xp.where(counts, subtrahend, 0.0)


def loss_gradient(xp: Any, **values: Array) -> Array:
    """Gradient of the loss with respect to the scores."""
    minuend, subtrahend = loss_terms(xp, **values)
    return minuend - subtrahend


def log_probability_terms(xp: Any, x: Array, dy: Array, m: Array, l: Array, **row: Array) -> tuple[Array, Array]:
    """The two terms whose difference is the gradient of logprob, lse and entropy with respect to the scores."""
    p = _probabilities(xp, x, m, l)
    chosen = xp.where(_is_column(row), dy, 0.0)
    factor = chosen - row.get("dlse", 0.0)
    if "dentropy" in row:
        factor = factor + row["dentropy"] * (xp.where(p == 0, 0.0, x - _finite(xp, m) - xp.log(l)) + row["entropy"])
    return (row["columns"] == row["target"]) * chosen, p * factor


def log_probability_gradient(xp: Any, **values: Array) -> Array:
    """Gradient of logprob, lse and entropy with respect to the scores."""
    minuend, subtrahend = log_probability_terms(xp, **values)
    return minuend - subtrahend
