"""Strategy `split`: several programs share a row; a second launch merges their states and writes."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ...core.arrays import Array
from ...planner.plan import Plan
from .formulas import Op, RowConstants
from .launch import launch
from .looped import Place, state_of, tiles_of, write_tiles
from .operands import Operands
from .state import State


def _place(splits: int, last: int | None = None) -> tuple[Any, Any, Any]:
    """(program, row, slice) of this program; programs are counted down from `last` where `last` is given."""
    program = pl.program_id(0) if last is None else last - pl.program_id(0)
    return program, jax.lax.div(program, jnp.int32(splits)), jax.lax.rem(program, jnp.int32(splits))


def depth_of(operands: Operands, block: int, splits: int) -> int:
    """Number of tiles of a slice; the last slices of a row may have tiles that lie behind the row."""
    return pl.cdiv(tiles_of(operands, block), splits)


def state_kernel(*refs: Any, operands: Operands, block: int, splits: int, depth: int, reads: int) -> None:
    """One program owns a slice of a row, `depth` tiles, and writes its state.

    Chosen: few rows, each too long for one program to stream alone.
    Bytes: one read.
    Limits: rows × splits states; every program reads the row's target.
    """
    program, row, part = _place(splits)
    operands = operands.at_targets(refs[:reads], row, 1)
    op = operands.op
    state = state_of(operands, refs[:reads], Place(row, part * depth, depth, block, part == 0))
    # Every program of a row writes the score of the row's target, if there is one, beside its state.
    target = () if op.target is None else (op.target.z_target,)
    for ref, value in zip(refs[reads:], (*op.packed(state, operands.accumulator), *target), strict=True):
        pltriton.store(ref.at[pl.ds(program, 1)], value.reshape(1))


def write_kernel(*refs: Any, operands: Operands, block: int, splits: int, depth: int, reads: int) -> None:
    """One program owns a slice of the output; it merges the states of all slices of its row.

    Chosen: after `state_kernel`, where elements are written.
    Bytes: a second read, which hits L2 where L2 still holds the row, so the last slice is written first; one write.
    Limits: every program of a row merges all of its states.
    """
    beside, [y_ref], rows = operands.sides(refs)
    operand_refs = beside[:reads]
    _, row, part = _place(splits, operands.rows * splits - 1)
    operands = operands.at_targets(operand_refs, row, 1)
    op = operands.op

    def constants() -> RowConstants:
        if not op.reduces:
            return operands.given_state(operand_refs, row, 1)
        state = _whole(beside[reads:], row, splits, op)
        operands.store_rows(rows, row, state, part == 0)
        return operands.row_constants(state)

    write_tiles(operands, operand_refs, y_ref, Place(row, part * depth, depth, block, part == 0), constants)


def _whole(refs: tuple[Any, ...], row: Any, splits: int, op: Op) -> State:
    """The state of a row as numbers, from the states of its slices.

    An array of one element would have a layout, which Triton may then give to every array it is made from.
    """
    lanes = pl.next_power_of_2(splits)
    there = jnp.arange(lanes, dtype=jnp.int32) < splits
    neutral = op.packed(op.identity((lanes,), refs[0].dtype), refs[0].dtype)
    parts = [pltriton.load(ref.at[pl.ds(row * splits, lanes)], mask=there, other=0) for ref in refs]
    found = tuple(jnp.where(there, part, empty) for part, empty in zip(parts, neutral, strict=True))
    return op.merge_all(op.unpacked(found), None)


def run(operands: Operands, arrays: list[Array], out: list[Any], plan: Plan, interpret: bool) -> list[Array]:
    """Run the operation on matrices: few long rows."""
    op, splits, rows = operands.op, plan.splits, operands.rows
    depth = depth_of(operands, plan.block, splits)
    blocks: dict[str, Any] = {
        "operands": operands, "block": plan.block, "splits": splits, "depth": depth, "reads": len(arrays),
    }  # fmt: skip
    states: list[Array] = []
    if op.reduces:
        one = jax.ShapeDtypeStruct((rows * splits,), operands.accumulator)
        parts = [one] * (op.packed_parts + int(op.operation.has_target))
        states = launch(partial(state_kernel, **blocks), rows * splits, arrays, parts, plan, interpret)
    if op.writes_elements:
        states = states[: op.packed_parts]
        return launch(partial(write_kernel, **blocks), rows * splits, [*arrays, *states], out, plan, interpret)
    tables = [part.reshape(rows, splits) for part in states]
    if op.row_operand_names:
        *tables, z_targets = tables
        [targets] = operands.row_operand_refs(tuple(arrays))
        op = op.at_target(targets[:, None], z_targets[:, :1], operands.cols)
    merged = op.merge_all(op.unpacked(tuple(tables)))
    return [values[:, 0].astype(like.dtype) for values, like in zip(op.row_results(merged), out, strict=True)]
