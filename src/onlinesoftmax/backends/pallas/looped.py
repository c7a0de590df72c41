"""Strategy `looped`: a program streams one row, once for its state and once more to write."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax.experimental import pallas as pl

from ...arrays import Array
from ...plan import Plan
from .call import call
from .operands import Operands
from .ops import Term
from .state import State


def state_of(operands: Operands, reads: tuple[Any, ...], row: Any, first: Any, tiles: Any, block: int) -> State:
    """The state of neighbouring tiles of a row, merged with that of one after another."""
    op = operands.op

    def step(i: Any, state: State) -> State:
        a, b, _ = operands.load(reads, row, (first + i) * block, (1, block))
        return op.merge(state, op.of(a, b))

    return jax.lax.fori_loop(0, tiles, step, op.identity((1, 1), operands.accumulator))


def write_tiles(
    operands: Operands, reads: tuple[Any, ...], ref: Any, row: Any, first: Any, tiles: Any, block: int, term: Term
) -> None:
    """Write neighbouring tiles of a row, newest first: L2 still holds those."""

    def step(i: Any, carry: Any) -> Any:
        col = (first + tiles - 1 - i) * block
        operands.store(ref, row, col, operands.load(reads, row, col, (1, block)), term)
        return carry

    jax.lax.fori_loop(0, tiles, step, 0)


def looped_kernel(*refs: Any, operands: Operands, block: int) -> None:
    """One program: one row, read in tiles.

    Chosen: the row does not fit registers and there are rows enough to fill the device.
    Bytes: two reads, one write; the second read hits L2 for what the resident rows still have there.
    Limits: none on columns.
    """
    reads, writes = operands.sides(refs)
    op, row, tiles = operands.op, pl.program_id(0), pl.cdiv(operands.cols, block)
    if not op.reduces:
        write_tiles(operands, reads, writes[0], row, 0, tiles, block, operands.given(reads, row, 1))
        return
    state = state_of(operands, reads, row, 0, tiles, block)
    if op.per_row:
        operands.store_parts(writes, row, state)
    else:
        write_tiles(operands, reads, writes[0], row, 0, tiles, block, op.term(state))


def run(operands: Operands, arrays: list[Array], out: list[Any], plan: Plan, interpret: bool) -> list[Array]:
    """The operation on matrices."""
    kernel = partial(looped_kernel, operands=operands, block=plan.block)
    return call(kernel, plan.programs, arrays, out, plan, interpret)
