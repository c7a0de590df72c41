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

from typing import NamedTuple

import jax
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


class GradientInputs(NamedTuple):
    """The arrays of a gradient per row, as vectors, in float64.

    Attributes:
        is_column: True for the rows that have a target.
        m, l: The state, with a finite m.
        cotangents: Gradients of the loss and of lse, or of the logarithm, of lse and perhaps of the entropy.
        entropy: The entropy; None where it is not differentiated.
    """

    is_column: Array
    m: Array
    l: Array
    cotangents: tuple[Array, ...]
    entropy: Array | None = None

    @classmethod
    def of(cls, target: Array, residual: Array, cotangents: Array, cols: int, factor: float) -> GradientInputs:
        """The arrays of a call.

        Args:
            target: Column of each row.
            residual: The result, m, l and perhaps the entropy along the last axis.
            cotangents: The gradients along the last axis.
            cols: Number of columns.
            factor: Number that the gradient is multiplied by.
        """
        is_column = (target >= 0) & (target < cols)
        with jax.enable_x64(True):
            wide = residual.astype(jnp.float64)
            _, m, l, *entropy = (wide[..., i].reshape(-1) for i in range(wide.shape[-1]))
            grads = tuple(cotangents[..., i].reshape(-1).astype(jnp.float64) for i in range(cotangents.shape[-1]))
            return cls(is_column.reshape(-1), m, l, tuple(factor * grad for grad in grads), *entropy)

    def of_loss(self, cols: int, smoothing: float, z_loss: float) -> dict[str, Array]:
        """Constants of the gradient of the loss, in float64."""
        with jax.enable_x64(True):
            dy, dlse = jnp.where(self.is_column, self.cotangents[0], 0), self.cotangents[1]
            # A row without a finite score has an infinite lse; it counts for nothing where dy is 0.
            factor = jnp.where(dy == 0, 0, 1 + 2 * z_loss * (self.m + jnp.log(self.l))) if z_loss else 1
            own = {"own": (1 - smoothing) * dy}
            return self._scaled(dy * factor + dlse) | own | ({"spread": smoothing / cols * dy} if smoothing else {})

    def of_log_probability(self) -> dict[str, Array]:
        """Constants of the gradient of the logarithm of the probability, of lse and of the entropy, in float64."""
        with jax.enable_x64(True):
            dy, dlse, *dentropy = self.cotangents
            dy = jnp.where(self.is_column, dy, 0)
            if self.entropy is None:
                return self._scaled(dlse - dy) | {"own": -dy}
            own, slope = {"own": -dy}, {"slope": dentropy[0] / self.l}
            return self._scaled((dlse - dy) - dentropy[0] * (self.entropy - jnp.log(self.l))) | own | slope

    def _scaled(self, factor: Array) -> dict[str, Array]:
        """A factor of the probabilities as a factor of exp(z - m); 0 stays 0, and an infinite l gives NaN."""
        return {"t": jnp.where(factor == 0, 0, factor / jnp.where(self.l < jnp.inf, self.l, jnp.nan))}
