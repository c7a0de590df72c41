"""The backend `pallas`: kernels for JAX, one file per strategy, over one state and one table of formulas."""

from __future__ import annotations

from importlib import import_module

from ...core.arrays import Array
from ...core.options import PLAIN, ScoreOptions
from ...planner.plan import Plan
from ..registry import LOADING
from .operands import Operands
from .ops import Op


def run(
    name: str, operands: tuple[Array, ...], plan: Plan, interpret: bool, options: ScoreOptions = PLAIN,
    factor: float = 1.0, outputs: tuple[str, ...] = (), numbers: tuple[tuple[str, float], ...] = (),
) -> tuple[Array, ...]:  # fmt: skip
    """Run an operation along the last axis as planned.

    Args:
        name: Name in OPERATIONS.
        operands: x and the other operands, as for the function of this name in jax/ops.py.
        plan: Strategy and blocks.
        interpret: Run the kernels' bodies as JAX operations, on any device.
        options: Score options; ARRAY stands for an array among the operands.
        factor: Number that a gradient is multiplied by.
        outputs: Names of the outputs, of which at most one is per element; empty for those that every call writes.
        numbers: Name and value of every operand that is a number.

    Returns:
        One array per output in the order of `outputs`: of x's shape, or without the last axis.
    """
    # Mosaic GPU is imported only for the strategy that uses it.
    with LOADING:
        strategy = import_module(f".{plan.strategy}", __name__)
    x = operands[0]
    op = Op.for_call(name, operands, outputs, factor, numbers)
    described = Operands.of(op, operands, options, plan.vector)
    written = described.outputs(x.dtype, op.result_dtype(operands))
    arrays = strategy.run(described, described.matrices(operands), written, plan, interpret)
    per_element = [name for name in op.written if name not in op.row_names]
    by_name = dict(zip((*per_element, *op.row_names), arrays, strict=True))
    shapes = {name: x.shape[:-1] if name in op.row_names else x.shape for name in op.written}
    return tuple(by_name[name].reshape(shapes[name]) for name in op.written)
