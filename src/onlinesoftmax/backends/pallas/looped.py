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
from .state import State


def state_of(operands: Operands, reads: tuple[Any, ...], row: Any, first: Any, tiles: Any, block: int) -> State:
    """The state of neighbouring tiles of a row: one for each lane, merged when all are read."""
    op, shape = operands.op, (1, block)

    def step(i: Any, lanes: State) -> State:
        a, b, _ = operands.load(reads, row, (first + i) * block, shape)
        return op.merge(lanes, op.each(a, b))

    return op.merge_all(jax.lax.fori_loop(0, tiles, step, op.identity(shape, operands.accumulator)))


def looped_kernel(*refs: Any, operands: Operands, block: int) -> None:
    """One program: one row, read in tiles.

    Chosen: the row does not fit registers and there are rows enough to fill the device.
    Bytes: two reads, one write; the second read hits L2 for what the resident rows still have there.
    Limits: none on columns.
    """
    *reads, y_ref = refs
    op, row, tiles = operands.op, pl.program_id(0), pl.cdiv(operands.cols, block)
    if op.reduces:
        state = state_of(operands, tuple(reads), row, 0, tiles, block)
    else:
        state = operands.given(tuple(reads), row, 1)
    if op.per_row:
        operands.store_results(y_ref, row, state)
        return
    term = op.term(state)

    def write(i: Any, carry: Any) -> Any:
        # Newest first: L2 still holds those.
        col = (tiles - 1 - i) * block
        operands.store(y_ref, row, col, operands.load(tuple(reads), row, col, (1, block)), term)
        return carry

    jax.lax.fori_loop(0, tiles, write, 0)


def run(operands: Operands, arrays: list[Array], out: Any, plan: Plan, interpret: bool) -> Array:
    """The operation on matrices."""
    kernel = partial(looped_kernel, operands=operands, block=plan.block)
    [y] = call(kernel, plan.programs, arrays, [out], plan, interpret)
    return y
