"""The backend `pallas`: kernels for JAX, one file per strategy, over one state and one table of formulas."""

from __future__ import annotations

from collections.abc import Mapping

from ...core.arrays import Array
from ...core.options import PLAIN, ScoreOptions
from ...planner.plan import Plan
from ..registry import strategy_module
from .formulas import Op
from .operands import Operands


def run(
    name: str, operands: Mapping[str, Array], plan: Plan, interpret: bool, options: ScoreOptions = PLAIN,
    factor: float = 1.0, outputs: tuple[str, ...] = (), numbers: tuple[tuple[str, float], ...] = (),
) -> dict[str, Array]:  # fmt: skip
    """Run an operation along the last axis as planned.

    Args:
        name: Name in OPERATIONS.
        operands: The operands by name, as for the formula of this operation in jax/eager.py.
        plan: Strategy and blocks.
        interpret: Run the kernels' bodies as JAX operations, on any device.
        options: Score options; ARRAY stands for an array, which is an operand with the name of the option.
        factor: Number that a gradient is multiplied by.
        outputs: Names of the outputs, of which at most one is per element; empty for those that every call writes.
        numbers: Name and value of every operand that is a number.

    Returns:
        The outputs by name: of x's shape, or without the last axis.
    """
    x = operands["x"]
    op = Op.for_call(name, operands, outputs, factor, numbers)
    described = Operands.of(op, operands, options, plan.vector)
    written = described.outputs(x.dtype, op.result_dtype(operands))
    # Mosaic GPU is imported only for the strategy that uses it.
    strategy = strategy_module(op.operation, "pallas", plan.strategy)
    arrays = strategy.run(described, described.matrices(operands), written, plan, interpret)
    per_element = [name for name in op.written if name not in op.row_outputs]
    results = dict(zip((*per_element, *op.row_outputs), arrays, strict=True))
    return {
        name: results[name].reshape(x.shape[:-1] if name in op.row_outputs else x.shape) for name in op.written
    }  # fmt: skip
