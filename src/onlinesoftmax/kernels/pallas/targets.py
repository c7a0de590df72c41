"""The formulas in Pallas of the operations with a target column per row: cross-entropy and token log-probabilities.

Forward, results per row are made from the state.  The sum zl counts the scores z from m, and the plain sum wz counts
them from c, the score of the target: scores that are all large would cancel in lse - zl / l and in lse - wz / cols.

    logprob = (z_target - m) - log(l)
    loss = (1 - smoothing) * -logprob + smoothing * ((m - c) + log(l) - wz / cols) + z_loss * lse²
    entropy = log(l) - zl / l

Backward, the state is given, and both gradients have one form, whose constants are computed before the kernel runs:

    (t - slope * (z - m)) * exp(z - m) - own * [column is target] - spread

A forward cross-entropy that also writes the gradient computes these constants in the kernel, from the state of the row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp

from ...core.arrays import Array
from .state import quotient


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

    @property
    def is_column(self) -> Array:
        """True for the rows that have a target."""
        return (self.column >= 0) & (self.column < self.cols)

    def log_probability(self, m: Array, l: Array) -> Array:
        """Logarithm of the probability of the target, from a finite m.

        It is NaN where the row has no target, and where the maximum of the row is infinite: l is then 0 or infinite.
        """
        y = (self.z_target - m) - jnp.log(l)
        return jnp.where(self.is_column & (l < jnp.inf), y, jnp.nan)

    def loss(self, m: Array, l: Array, wz: Array | None, smoothing: float, z_loss: float) -> Array:
        """Loss, from a finite m and the sum wz, if there is smoothing; NaN where the logarithm is."""
        y, log_l = -self.log_probability(m, l), jnp.log(l)
        if wz is not None:
            y = (1 - smoothing) * y + smoothing * (((m - self.centre) - wz / self.cols) + log_l)
        return y + z_loss * (m + log_l) * (m + log_l) if z_loss else y

    def of_loss(self, m: Array, l: Array, smoothing: float, z_loss: float) -> dict[str, Array]:
        """Constants of the gradient of the loss, from a finite m; t is a pair of a number and its rounding error."""
        assert self.dy is not None
        dy = jnp.where(self.is_column, self.dy, jnp.zeros_like(self.dy))
        # A row without a finite score has an infinite lse; it counts for nothing where dy is 0.
        factor = dy * (1 + 2 * z_loss * (m + jnp.log(l))) if z_loss else dy
        factor = jnp.where(dy == 0, jnp.zeros_like(dy), factor)
        t, low = quotient(factor, jnp.where(l < jnp.inf, l, jnp.nan))
        # 0 stays 0, also in a row that holds NaN.
        t, low = (jnp.where(factor == 0, jnp.zeros_like(part), part) for part in (t, low))
        found = {"t": t, "low": low, "own": (1 - smoothing) * dy}
        return found | ({"spread": smoothing / self.cols * dy} if smoothing else {})


Rows = Mapping[str, Array]
"""Operands per row by name, in float64."""


def _constants_of_logsumexp(rows: Rows, factor: float, cols: int, weights: Mapping[str, float]) -> dict[str, Array]:
    dy, l = rows["dy"], rows["l"]
    # In a row without a score above -inf, l is 0.  The kernel multiplies by the factor.
    return {"t": jnp.where((dy == 0) & (l == 0), 0, dy / l)}


def _constants_of_loss(rows: Rows, factor: float, cols: int, weights: Mapping[str, float]) -> dict[str, Array]:
    smoothing, z_loss, dy = weights["smoothing"], weights["z_loss"], _of_known_rows(rows, factor, cols)
    # A row without a finite score has an infinite lse; it counts for nothing where dy is 0.
    of_lse = jnp.where(dy == 0, 0, 1 + 2 * z_loss * (rows["m"] + jnp.log(rows["l"]))) if z_loss else 1
    spread = {"spread": smoothing / cols * dy} if smoothing else {}
    t = _of_terms(dy * of_lse + factor * rows.get("dlse", 0.0), rows["l"])
    return {"t": t, "own": (1 - smoothing) * dy, **spread}


def _constants_of_logprob(rows: Rows, factor: float, cols: int, weights: Mapping[str, float]) -> dict[str, Array]:
    dy, l = _of_known_rows(rows, factor, cols), rows["l"]
    of_lse = factor * rows.get("dlse", 0.0) - dy
    if "dentropy" not in rows:
        return {"t": _of_terms(of_lse, l), "own": -dy}
    dentropy = factor * rows["dentropy"]
    return {"t": _of_terms(of_lse - dentropy * (rows["entropy"] - jnp.log(l)), l), "own": -dy, "slope": dentropy / l}


def _of_known_rows(rows: Rows, factor: float, cols: int) -> Array:
    """The gradient of the result times the factor; 0 where the target is no column."""
    target = rows["target"]
    return jnp.where((target >= 0) & (target < cols), factor * rows["dy"], 0)


def _of_terms(factor: Array, l: Array) -> Array:
    """A factor of the probabilities as a factor of exp(z - m); 0 stays 0, and an infinite l gives NaN."""
    return jnp.where(factor == 0, 0, factor / jnp.where(l < jnp.inf, l, jnp.nan))


ROW_OPERANDS = ("target", "m", "l", "entropy", "dy", "dlse", "dentropy")
"""Names of operands that have a value per row, if the operation has no element operand of this name."""

GRADIENT_CONSTANTS: dict[str, Callable[..., dict[str, Array]]] = {
    "logsumexp_backward": _constants_of_logsumexp,
    "cross_entropy_backward": _constants_of_loss,
    "token_logprobs_backward": _constants_of_logprob,
}
"""The constants of each gradient with a given state.

Their arguments: the operands per row, the number that the gradient is multiplied by, the number of columns, and the
numbers of the loss.
"""
