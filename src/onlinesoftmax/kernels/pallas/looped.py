"""Strategy `looped`: a program streams one row, once for its state and once more to write elements."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ...core.arrays import Array
from ...planner.plan import Plan
from .formulas import RowConstants
from .launch import launch
from .operands import Operands, Tile
from .state import State

Loaded = tuple[Array, Array, Array]
"""(a, b, kept) of a tile, as `Operands.load` returns them."""


def tiles_of(operands: Operands, block: int) -> int:
    """Number of tiles of a row."""
    return pl.cdiv(operands.body, block)


def tile_of(operands: Operands, row: Any, number: Any, block: int) -> Tile:
    """One tile of a row, by its number."""
    return operands.tile(row, number * block, (1, block))


class Place(NamedTuple):
    """Adjacent tiles of a row.

    Attributes:
        row: The row.
        first: Number of the first tile.
        tiles: Number of tiles.
        block: Columns of a tile.
        edges: True where the row's head and tail belong to the place.
    """

    row: Any
    first: Any
    tiles: int
    block: int
    edges: Any = True


def state_of(operands: Operands, reads: tuple[Any, ...], place: Place) -> State:
    """The state of the tiles of a place, and of the head and tail of its row where `place.edges` is True.

    A tile is loaded before the tile before it is reduced, so that memory does not wait for arithmetic.
    """
    op, (row, first, tiles, block, edges) = operands.op, place

    def tile(i: Any) -> Loaded:
        return operands.load(reads, tile_of(operands, row, first + i, block))

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
    operands: Operands, reads: tuple[Any, ...], ref: Any, place: Place, make_constants: Callable[[], RowConstants]
) -> None:
    """Write the tiles of a place, and the head and tail of its row where `place.edges` is True.

    The last tile is written first: it was read last, and L2 still holds it.  It is on its way from memory while
    `make_constants` runs.
    """
    row, first, tiles, block, edges = place

    def tile(i: Any) -> Tile:
        return tile_of(operands, row, first + tiles - 1 - i, block)

    newest = tile(0)
    loaded = operands.load(reads, newest)
    constants = make_constants()
    operands.store(ref, newest, loaded, constants)

    def write(tile: Tile) -> None:
        operands.store(ref, tile, operands.load(reads, tile), constants)

    def step(i: Any, carry: Any) -> Any:
        write(tile(i))
        return carry

    jax.lax.fori_loop(jnp.int32(1), jnp.int32(tiles), step, 0)
    for edge in operands.edges(row, edges):
        write(edge)


def looped_kernel(*refs: Any, operands: Operands, block: int) -> None:
    """One program owns one row and reads it in tiles.

    Chosen: the row does not fit registers, and there are enough rows to fill the device.
    Bytes: two reads, one write; the second read hits L2 where L2 still holds the row.
    Limits: none on columns.
    """
    reads, elements, rows = operands.sides(refs)
    row = pl.program_id(0)
    operands = operands.at_targets(reads, row, 1)
    op = operands.op
    place = Place(row, 0, tiles_of(operands, block), block)
    if op.reduces:
        state = state_of(operands, reads, place)
        operands.store_rows(rows, row, state)

    def constants() -> RowConstants:
        return operands.row_constants(state) if op.reduces else operands.given_state(reads, row, 1)

    for y_ref in elements:
        write_tiles(operands, reads, y_ref, place, constants)


def run(operands: Operands, arrays: list[Array], out: list[Any], plan: Plan, interpret: bool) -> list[Array]:
    """Run the operation on matrices."""
    kernel = partial(looped_kernel, operands=operands, block=plan.block)
    return launch(kernel, plan.programs, arrays, out, plan, interpret)
