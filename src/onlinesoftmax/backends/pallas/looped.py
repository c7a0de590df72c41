"""Strategy `looped`: a program streams one row, once for its state and once more to write."""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ...arrays import Array
from ...plan import Plan
from .call import call
from .operands import Operands, Tile
from .ops import Term
from .state import State


def state_of(
    operands: Operands, reads: tuple[Any, ...], row: Any, first: Any, tiles: Any, block: int, edges: Any = True
) -> State:
    """The state of neighbouring tiles of a row, merged with that of one after another, and of its edges."""
    op = operands.op

    def with_tile(state: State, tile: Tile) -> State:
        a, b, _ = operands.load(reads, tile)
        return op.merge(state, op.of((a, b)))

    state = reduce(with_tile, operands.edges(row, edges), op.identity((), operands.accumulator))
    return jax.lax.fori_loop(
        *_numbers(tiles),
        lambda i, state: with_tile(state, operands.tile(row, (first + i) * block, (1, block))),
        state,
    )


def write_tiles(
    operands: Operands, reads: tuple[Any, ...], ref: Any, row: Any, first: Any, tiles: Any, block: int, term: Term,
    edges: Any = True,
) -> None:  # fmt: skip
    """Write neighbouring tiles of a row, newest first, which L2 still holds, and its edges."""

    def write(tile: Tile) -> None:
        operands.store(ref, tile, operands.load(reads, tile), term)

    def step(i: Any, carry: Any) -> Any:
        write(operands.tile(row, (first + tiles - 1 - i) * block, (1, block)))
        return carry

    jax.lax.fori_loop(*_numbers(tiles), step, 0)
    for tile in operands.edges(row, edges):
        write(tile)


def _numbers(tiles: int) -> tuple[Array, Array]:
    """Those of the first tile and after the last, of 32 bits where JAX has 64 too: Triton sees where 16 bytes begin."""
    return jnp.int32(0), jnp.int32(tiles)


def looped_kernel(*refs: Any, operands: Operands, block: int) -> None:
    """One program: one row, read in tiles.

    Chosen: the row does not fit registers and there are rows enough to fill the device.
    Bytes: two reads, one write; the second read hits L2 for what the resident rows still have there.
    Limits: none on columns.
    """
    reads, writes = operands.sides(refs)
    op, row, tiles = operands.op, pl.program_id(0), pl.cdiv(operands.body, block)
    if not op.reduces:
        write_tiles(operands, reads, writes[0], row, 0, tiles, block, operands.given(reads, row, 1))
        return
    state = state_of(operands, reads, row, 0, tiles, block)
    if op.per_row:
        operands.store_parts(writes, row, state)
    else:
        write_tiles(operands, reads, writes[0], row, 0, tiles, block, operands.term(state))


def run(operands: Operands, arrays: list[Array], out: list[Any], plan: Plan, interpret: bool) -> list[Array]:
    """The operation on matrices."""
    kernel = partial(looped_kernel, operands=operands, block=plan.block)
    return call(kernel, plan.programs, arrays, out, plan, interpret)
