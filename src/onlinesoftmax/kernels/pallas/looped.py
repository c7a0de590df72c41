"""Strategy `looped`: a program streams one row, once for its state and once more to write."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ...core.arrays import Array
from ...planner.plan import Plan
from .call import call
from .operands import Operands, Tile
from .ops import Term
from .state import State

Loaded = tuple[Array, Array, Array]
"""(a, b, kept) of a tile."""


def state_of(
    operands: Operands, reads: tuple[Any, ...], row: Any, first: Any, tiles: int, block: int, edges: Any = True
) -> State:
    """The state of neighbouring tiles of a row, merged with that of one after another, and of its edges.

    Each is loaded before the one before is reduced, so that memory does not wait for arithmetic.
    """
    op = operands.op

    def tile(i: Any) -> Loaded:
        return operands.load(reads, operands.tile(row, (first + i) * block, (1, block)))

    def with_tile(state: State, loaded: Loaded) -> State:
        return op.merge(state, op.of(loaded[:2]))

    def step(i: Any, carry: tuple[State, Loaded]) -> tuple[State, Loaded]:
        state, loaded = carry
        following = tile(i)
        return with_tile(state, loaded), following

    first_tile = tile(0)
    state = op.identity((), operands.accumulator)
    for edge in operands.edges(row, edges):
        state = with_tile(state, operands.load(reads, edge))
    return with_tile(*jax.lax.fori_loop(jnp.int32(1), jnp.int32(tiles), step, (state, first_tile)))


def write_tiles(
    operands: Operands, reads: tuple[Any, ...], ref: Any, row: Any, first: Any, tiles: int, block: int,
    term: Callable[[], Term], edges: Any = True,
) -> None:  # fmt: skip
    """Write neighbouring tiles of a row, newest first, which L2 still holds, and its edges.

    The newest is on its way while the term is made.
    """

    def tile(i: Any) -> Tile:
        return operands.tile(row, (first + tiles - 1 - i) * block, (1, block))

    newest = tile(0)
    loaded = operands.load(reads, newest)
    made = term()
    operands.store(ref, newest, loaded, made)

    def write(tile: Tile) -> None:
        operands.store(ref, tile, operands.load(reads, tile), made)

    def step(i: Any, carry: Any) -> Any:
        write(tile(i))
        return carry

    jax.lax.fori_loop(jnp.int32(1), jnp.int32(tiles), step, 0)
    for edge in operands.edges(row, edges):
        write(edge)


def looped_kernel(*refs: Any, operands: Operands, block: int) -> None:
    """One program: one row, read in tiles.

    Chosen: the row does not fit registers and there are rows enough to fill the device.
    Bytes: two reads, one write; the second read hits L2 for what the resident rows still have there.
    Limits: none on columns.
    """
    reads, writes = operands.sides(refs)
    op, row, tiles = operands.op, pl.program_id(0), pl.cdiv(operands.body, block)
    if not op.reduces:
        write_tiles(operands, reads, writes[0], row, 0, tiles, block, lambda: operands.given(reads, row, 1))
        return
    state = state_of(operands, reads, row, 0, tiles, block)
    if op.per_row:
        operands.store_parts(writes, row, state)
    else:
        write_tiles(operands, reads, writes[0], row, 0, tiles, block, lambda: operands.term(state))


def run(operands: Operands, arrays: list[Array], out: list[Any], plan: Plan, interpret: bool) -> list[Array]:
    """The operation on matrices."""
    kernel = partial(looped_kernel, operands=operands, block=plan.block)
    return call(kernel, plan.programs, arrays, out, plan, interpret)
