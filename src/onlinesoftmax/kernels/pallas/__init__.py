"""The `pallas` backend: kernels for JAX, one file a strategy, over one state and one table of operations."""

from __future__ import annotations

from importlib import import_module

import jax
import jax.numpy as jnp

from ...core.arrays import Array
from ...core.scores import PLAIN, Scores
from ...planner.plan import Plan
from .operands import Operands


def run(
    name: str, operands: tuple[Array, ...], plan: Plan, interpret: bool, spec: Scores = PLAIN, factor: float = 1.0
) -> Array:
    """An operation of backends/xla.py on the same arrays, as planned.

    Args:
        name: In operation.OPERATIONS.
        operands: x and what is read beside it, as in backends/xla.py.
        plan: Who runs it, with which blocks.
        interpret: Run the kernels' bodies as JAX operations, on any device.
        spec, factor: As in backends/xla.py.
    """
    # Mosaic is imported by whom it runs for.
    strategy = import_module(f".{plan.strategy}", __name__)
    x, described = operands[0], Operands.of(name, operands, spec, factor, plan.vector)
    matrices = described.matrices(operands)
    if described.op.per_row:
        part = jax.ShapeDtypeStruct((described.rows,), described.accumulator)
        parts = strategy.run(described, matrices, [part, part], plan, interpret)
        return jnp.stack(parts, axis=-1).reshape(*x.shape[:-1], 2)
    # A gradient is as wide as what it is the gradient of: t's dtype, or of lse, which is wider, x's.
    dtype = operands[-1].dtype if described.op.sums else x.dtype
    out = jax.ShapeDtypeStruct(described.shape, dtype)
    [y] = strategy.run(described, matrices, [out], plan, interpret)
    return y.reshape(x.shape)
