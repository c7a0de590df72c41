"""Strategy `row`: a program holds whole rows on chip."""

from __future__ import annotations

from functools import partial
from typing import Any

from jax.experimental import pallas as pl

from ...arrays import Array
from ...plan import Plan
from .call import call
from .operands import Operands


def row_kernel(*refs: Any, operands: Operands, shape: tuple[int, int]) -> None:
    """One program: a tile of rows, all of their columns in registers.

    Chosen: whenever the row fits registers.
    Bytes: one read, one write.
    Limits: the tile's sides are powers of two.
    """
    reads, writes = operands.sides(refs)
    op, first = operands.op, pl.program_id(0) * shape[0]
    tile = operands.load(reads, first, 0, shape)
    if op.per_row:
        operands.store_parts(writes, first, op.of(*tile[:2]))
        return
    term = op.term(op.of(*tile[:2])) if op.reduces else operands.given(reads, first, shape[0])
    operands.store(writes[0], first, 0, tile, term)


def run(operands: Operands, arrays: list[Array], out: list[Any], plan: Plan, interpret: bool) -> list[Array]:
    """The operation on matrices."""
    kernel = partial(row_kernel, operands=operands, shape=(plan.rows_per_program, plan.block))
    return call(kernel, plan.programs, arrays, out, plan, interpret)
