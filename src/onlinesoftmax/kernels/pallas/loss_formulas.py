"""The formulas in Pallas of the operations with a target column per row: cross-entropy and token log-probabilities.

Forward, results per row are made from the state.  The sum zl counts the scores z from m, and the plain sum wz counts
them from c, the score of the target: scores that are all large would cancel in lse - zl / l and in lse - wz / cols.

    logprob = (z_target - m) - log(l)
    loss = (1 - smoothing) * -logprob + smoothing * ((m - c) + log(l) - wz / cols) + z_loss * lse²
    entropy = log(l) - zl / l

Backward, all gradients have one form, whose constants are computed before the kernel runs:

    (t - slope * (z - m)) * exp(z - m) - own * [column is target] - spread,    t = factor / l

A forward operation that also writes the gradient computes these constants in the kernel, from the state of the row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp

from ...core.arrays import Array


class Target(NamedTuple):
    """The target column of each row.

    Attributes:
        column: The column; out of range where the row has no target.
        z_target: The score of the column; any number where the row has no target.
        cols: Number of columns.
        dy: Gradient of the loss; None where no gradient is written.
    """

    column: Array
    z_target: Array
    cols: int
    dy: Array | None = None

    @property
    def centre(self) -> Array:
        """Number from which wz counts the scores: the score of the target, or 0 where that is not finite."""
        return jnp.where(jnp.abs(self.z_target) < jnp.inf, self.z_target, jnp.zeros_like(self.z_target))


def log_probability(target: Target, m: Array, l: Array, *_: Array | None, **weights: float) -> Array:
    """Logarithm of the probability of the target, from a finite m.

    It is NaN where the row has no target, and where the maximum of the row is infinite: l is then 0 or infinite.
    """
    y = (target.z_target - m) - jnp.log(l)
    return jnp.where(_is_column(target.column, target.cols) & (l < jnp.inf), y, jnp.nan)


def loss(target: Target, m: Array, l: Array, wz: Array | None, smoothing: float = 0.0, z_loss: float = 0.0) -> Array:
    """Loss, from a finite m and the sum wz, if there is smoothing; NaN where the logarithm is."""
    y, log_l = -log_probability(target, m, l), jnp.log(l)
    if wz is not None:
        y = (1 - smoothing) * y + smoothing * (((m - target.centre) - wz / target.cols) + log_l)
    return y + z_loss * (m + log_l) * (m + log_l) if z_loss else y


RESULTS: dict[str, Callable[..., Array]] = {"cross_entropy": loss, "token_logprobs": log_probability}
"""The main result of each operation with a target."""

Rows = Mapping[str, Array]
"""Operands per row by name.  Gradients of results are multiplied by the factor of the call."""

Constants = tuple[Array, dict[str, Array]]
"""Factor of the probabilities, and the other constants of a gradient by their names in `RowConstants`."""


def logsumexp_gradient(rows: Rows, cols: int, weights: Mapping[str, float]) -> Constants:
    """Constants of the gradient of the logsumexp."""
    return rows["dy"], {}


def loss_gradient(rows: Rows, cols: int, weights: Mapping[str, float]) -> Constants:
    """Constants of the gradient of the loss and of lse."""
    smoothing, z_loss, dy = weights.get("smoothing", 0.0), weights.get("z_loss", 0.0), _dy(rows, cols)
    factor = dy * (1 + 2 * z_loss * (rows["m"] + jnp.log(rows["l"]))) if z_loss else dy
    # A row without a finite score has an infinite lse; it counts for nothing where dy is 0.
    factor = jnp.where(dy == 0, jnp.zeros_like(dy), factor)
    spread = {"spread": smoothing / cols * dy} if smoothing else {}
    return factor + rows["dlse"] if "dlse" in rows else factor, {"own": (1 - smoothing) * dy, **spread}


def log_probability_gradient(rows: Rows, cols: int, weights: Mapping[str, float]) -> Constants:
    """Constants of the gradient of the logarithm of the probability, of lse and of the entropy."""
    dy, l = _dy(rows, cols), rows["l"]
    factor = rows["dlse"] - dy if "dlse" in rows else -dy
    if "dentropy" not in rows:
        return factor, {"own": -dy}
    high, slope = rows["entropy"] - jnp.log(l), rows["dentropy"]
    return factor - slope * high, {"own": -dy, "slope": slope / l}


def _dy(rows: Rows, cols: int) -> Array:
    """The gradient of the main result; 0 where the target is no column."""
    return jnp.where(_is_column(rows["target"], cols), rows["dy"], jnp.zeros_like(rows["dy"]))


def _is_column(target: Array, cols: int) -> Array:
    return (target >= 0) & (target < cols)


GRADIENTS: dict[str, Callable[[Rows, int, Mapping[str, float]], Constants]] = {
    "logsumexp_backward": logsumexp_gradient,
    "cross_entropy_backward": loss_gradient,
    "token_logprobs_backward": log_probability_gradient,
}
"""The constants of each gradient whose state is given or known, from operands per row, columns and numbers."""

COTANGENTS = ("dy", "dlse", "dentropy")
"""Operands in which a gradient is linear: the gradients of its results."""

ROW_OPERANDS = ("target", "m", "l", "entropy", *COTANGENTS)
"""Names of operands that have a value per row, if the operation has no element operand of this name."""
