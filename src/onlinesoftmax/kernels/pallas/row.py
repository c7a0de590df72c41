"""Strategy `row`: a program holds whole rows in registers."""

from __future__ import annotations

from functools import partial
from typing import Any

from jax.experimental import pallas as pl

from ...core.arrays import Array
from ...planner.plan import Plan
from .launch import launch
from .operands import Operands, Tile


def powers_of_two(n: int) -> list[tuple[int, int]]:
    """The powers of two that add up to n, largest first, as (sum of the powers before, power)."""
    found, at = [], 0
    while at < n:
        width = 1 << (n - at).bit_length() - 1
        found.append((at, width))
        at += width
    return found


def tiles_of(operands: Operands, first: Any, shape: tuple[int, int]) -> list[Tile]:
    """The tiles of the rows from `first` on."""
    tiles = [operands.tile(first, col, (shape[0], width)) for col, width in powers_of_two(shape[1])]
    return tiles + operands.edges(first)


def row_kernel(*refs: Any, operands: Operands, shape: tuple[int, int]) -> None:
    """One program owns a few rows, with all of their columns in registers.

    Chosen: whenever a row fits the registers of one program.
    Bytes: one read, one write.
    Limits: the sides of a tile are powers of two, so a row is padded to a sum of powers of two.
    """
    reads, elements, rows = operands.sides(refs)
    first = pl.program_id(0) * shape[0]
    operands = operands.at_targets(reads, first, shape[0])
    op = operands.op
    tiles = tiles_of(operands, first, shape)
    loaded = [operands.load(reads, tile) for tile in tiles]
    if op.reduces:
        state = op.of(*((a, b) for a, b, _ in loaded))
        operands.store_rows(rows, first, state)
    for y_ref in elements:
        constants = operands.row_constants(state) if op.reduces else operands.given_state(reads, first, shape[0])
        for tile, values in zip(tiles, loaded, strict=True):
            operands.store(y_ref, tile, values, constants)


def run(operands: Operands, arrays: list[Array], out: list[Any], plan: Plan, interpret: bool) -> list[Array]:
    """Run the operation on matrices."""
    kernel = partial(row_kernel, operands=operands, shape=(plan.rows_per_program, plan.block))
    return launch(kernel, plan.programs, arrays, out, plan, interpret)
