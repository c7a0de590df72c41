"""Strategy `row`: a program holds whole rows on chip."""

from __future__ import annotations

from functools import partial
from typing import Any

from jax.experimental import pallas as pl

from ...core.arrays import Array
from ...planner.plan import Plan
from .call import call
from .operands import Operands


def _powers_of_two(n: int) -> list[tuple[int, int]]:
    """The powers of two that n is the sum of, largest first, each after where it begins."""
    found, at = [], 0
    while at < n:
        width = 1 << (n - at).bit_length() - 1
        found.append((at, width))
        at += width
    return found


def row_kernel(*refs: Any, operands: Operands, shape: tuple[int, int]) -> None:
    """One program: a few rows, all of their columns in registers.

    Chosen: whenever the row fits registers.
    Bytes: one read, one write.
    Limits: a tile's sides are powers of two, so that columns are padded to a sum of these.
    """
    reads, writes = operands.sides(refs)
    op, first = operands.op, pl.program_id(0) * shape[0]
    tiles = [operands.tile(first, col, (shape[0], width)) for col, width in _powers_of_two(shape[1])]
    tiles += operands.edges(first)
    loaded = [operands.load(reads, tile) for tile in tiles]
    if op.reduces:
        state = op.of(*((a, b) for a, b, _ in loaded))
    if op.per_row:
        operands.store_parts(writes, first, state)
        return
    term = operands.term(state) if op.reduces else operands.given(reads, first, shape[0])
    for tile, values in zip(tiles, loaded, strict=True):
        operands.store(writes[0], tile, values, term)


def run(operands: Operands, arrays: list[Array], out: list[Any], plan: Plan, interpret: bool) -> list[Array]:
    """The operation on matrices."""
    kernel = partial(row_kernel, operands=operands, shape=(plan.rows_per_program, plan.block))
    return call(kernel, plan.programs, arrays, out, plan, interpret)
