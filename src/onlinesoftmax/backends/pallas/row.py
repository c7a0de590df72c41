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
    *reads, y_ref = refs
    op, first = operands.op, pl.program_id(0) * shape[0]
    tile = operands.load(tuple(reads), first, 0, shape)
    state = op.of(*tile[:2]) if op.reduces else operands.given(tuple(reads), first, shape[0])
    if op.per_row:
        operands.store_results(y_ref, first, state)
    else:
        operands.store(y_ref, first, 0, tile, op.term(state))


def run(operands: Operands, arrays: list[Array], out: Any, plan: Plan, interpret: bool) -> Array:
    """The operation on matrices."""
    kernel = partial(row_kernel, operands=operands, shape=(plan.rows_per_program, plan.block))
    [y] = call(kernel, plan.programs, arrays, [out], plan, interpret)
    return y
