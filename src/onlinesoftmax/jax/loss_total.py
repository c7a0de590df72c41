"""Reductions of the losses of rows to a scalar.

`total` is the scalar of rows with integer labels.  Where it is differentiated, the forward pass writes the gradient
with respect to the logits, and keeps it instead of the logits.  The backward pass multiplies it by the incoming
gradient, which is one number.  Under `jit` of `jax.grad` this number is the constant 1, and XLA removes the
multiplication.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..core.arguments import check_int64
from ..core.arrays import Array, accumulator
from ..core.options import ScoreOptions
from . import custom_op
from .plans import outputs_of
from .signature import Signature, Values

REDUCTIONS = ("none", "mean", "sum")


class LossReduction(NamedTuple):
    """The reduction of a call.

    Attributes:
        kind: One of REDUCTIONS.
        ignore_index: Label of the rows that count for nothing; None where every row counts.
    """

    kind: str = "none"
    ignore_index: int | None = None

    def checked(self, name: str) -> LossReduction:
        """The reduction with an index that is an int.

        Raises:
            TypeError: ignore_index is neither an integer nor None.
            ValueError: there is no such reduction.
        """
        kind, index = self
        if not isinstance(kind, str) or kind not in REDUCTIONS:
            raise ValueError(f"{name}: reduction must be 'none', 'mean' or 'sum', got {kind!r}")
        if index is None:
            return self
        if isinstance(index, bool) or not isinstance(index, (int, np.integer)):
            raise TypeError(f"{name}: ignore_index must be an int or None, not {type(index).__name__}")
        check_int64(name, "ignore_index", int(index))
        return LossReduction(kind, int(index))

    def counted(self, labels: Array) -> Array | None:
        """True for the rows that count; None where every row counts."""
        limits = jnp.iinfo(labels.dtype)
        if self.ignore_index is None or not limits.min <= self.ignore_index <= limits.max:
            return None
        return labels != self.ignore_index

    def divisor(self, shape: tuple[int, ...], counted: Array | None, dtype: Any) -> Any:
        """The number by which the sum of the losses of rows of this shape is divided."""
        if self.kind != "mean":
            return 1
        return math.prod(shape) if counted is None else jnp.sum(counted, dtype=jnp.int32).astype(dtype)

    def of(self, losses: Array, counted: Array | None) -> Array:
        """The losses, reduced, in their dtype."""
        losses = losses if counted is None else jnp.where(counted, losses, 0)
        if self.kind == "none":
            return losses
        # The sum of no rows is 0, and their mean is NaN.
        return jnp.sum(losses) / jnp.asarray(self.divisor(losses.shape, counted, losses.dtype), losses.dtype)


def without_empty(options: ScoreOptions, losses: Array, l: Array) -> Array:
    """The losses; with `where`, 0 in a row without a class."""
    return losses if options.mask is None else jnp.where(l == 0, 0, losses)


def _reduced(reduction: LossReduction, call: Signature, results: Values, counted: Array | None) -> Array:
    """The scalar, from the results of the rows."""
    return reduction.of(without_empty(call.options, results["loss"], results["l"]), counted)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def total(reduction: LossReduction, call: Signature, operands: Values, counted: Array | None) -> Array:
    """The scalar of a call.

    Args:
        reduction: The reduction, "mean" or "sum".
        call: The call on rows.  The scale is a number, and there is no bias.
        operands: The operands of the call; x alone is differentiated.
        counted: True for the rows that count; None where every row counts.
    """
    return _reduced(reduction, call, custom_op.bind(call, operands), counted)


@partial(total.defjvp, symbolic_zeros=True)
def _jvp(
    reduction: LossReduction, call: Signature, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Array, Array]:
    operands, counted = primals
    t, target, wide = tangents[0]["x"], operands["target"], accumulator(operands["x"])
    if isinstance(t, jax.custom_derivatives.SymbolicZero):
        y = total(reduction, call, *primals)
        return y, jnp.zeros_like(y)
    # The derivative of the scalar with respect to the loss of each row.
    dy = jnp.full(target.shape, 1 / jnp.asarray(reduction.divisor(target.shape, counted, wide), wide), wide)
    dy = dy if counted is None else jnp.where(counted, dy, 0)
    with_gradient = call._replace(outputs=outputs_of(call.name, gradient=True))
    results = custom_op.bind(with_gradient, {**operands, "dy": dy})
    products = custom_op.bind(Signature("row_products", ("dy",)), {"x": results["y"], "t": t})
    return _reduced(reduction, call, results, counted), jnp.sum(products["dy"])
