"""The `pallas` backend: kernels for JAX, one file a strategy, over one state and one table of operations."""

from __future__ import annotations

import jax

from ...arrays import Array
from ...plan import Plan
from ...scores import PLAIN, Scores
from . import looped, row, split
from .operands import Operands

STRATEGIES = {"row": row.run, "looped": looped.run, "split": split.run}


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
    x, dtype = operands[0], operands[-1].dtype if name.endswith("_backward") else operands[0].dtype
    described = Operands.of(name, operands, spec, factor)
    shape = (described.rows,) if described.op.per_row else (described.rows, described.cols)
    out = jax.ShapeDtypeStruct(shape, x.dtype if name == "logsumexp_backward" else dtype)
    y = STRATEGIES[plan.strategy](described, described.matrices(operands), out, plan, interpret)
    return y.reshape(x.shape[:-1] if described.op.per_row else x.shape)
