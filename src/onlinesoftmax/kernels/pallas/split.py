"""Strategy `split`: a program has a slice of a row; a second launch merges their states and writes."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ...core.arrays import Array
from ...planner.plan import Plan
from .call import call
from .looped import state_of, write_tiles
from .operands import Operands
from .ops import Term
from .state import State


def _place(splits: int, last: int | None = None) -> tuple[Any, Any, Any]:
    """(program, row, slice) of a program, counted from the last one on if that is given."""
    program = pl.program_id(0) if last is None else last - pl.program_id(0)
    return program, jax.lax.div(program, jnp.int32(splits)), jax.lax.rem(program, jnp.int32(splits))


def state_kernel(*refs: Any, operands: Operands, block: int, splits: int, depth: int) -> None:
    """One program: the state of a slice of `depth` tiles."""
    *reads, m_ref, l_ref = refs
    program, row, part = _place(splits)
    state = state_of(operands, tuple(reads), row, part * depth, depth, block, part == 0)
    for ref, value in zip((m_ref, l_ref), operands.op.packed(state, operands.accumulator), strict=True):
        pltriton.store(ref.at[pl.ds(program, 1)], value.reshape(1))


def write_kernel(*refs: Any, operands: Operands, block: int, splits: int, depth: int) -> None:
    """One program: a slice of the output, from the states of its row's slices.

    Bytes: a second read, which L2 serves where it still holds the row; so newest first.
    """
    *reads, m_ref, l_ref, y_ref = refs
    op = operands.op
    _, row, part = _place(splits, operands.rows * splits - 1)

    def term() -> Term:
        if not op.reduces:
            return operands.given(tuple(reads), row, 1)
        return operands.term(_whole((m_ref, l_ref), row, splits, op))

    write_tiles(operands, tuple(reads), y_ref, row, part * depth, depth, block, term, part == 0)


def _whole(refs: tuple[Any, Any], row: Any, splits: int, op: Any) -> State:
    """The state of a row as numbers, from those of its slices.

    As an array of one element it would have a layout, which Triton may give to all that it is made of.
    """
    lanes = pl.next_power_of_2(splits)
    there = jnp.arange(lanes, dtype=jnp.int32) < splits
    nothing = op.packed(op.identity((lanes,), refs[0].dtype), refs[0].dtype)
    m, l = (pltriton.load(ref.at[pl.ds(row * splits, lanes)], mask=there, other=0) for ref in refs)
    return op.merge_all(op.unpacked((jnp.where(there, m, nothing[0]), jnp.where(there, l, nothing[1]))), None)


def run(operands: Operands, arrays: list[Array], out: list[Any], plan: Plan, interpret: bool) -> list[Array]:
    """The operation on matrices: few long rows.

    Bytes: two reads, one write.
    Limits: rows × splits states.
    """
    op, splits, rows = operands.op, plan.splits, operands.rows
    depth = pl.cdiv(pl.cdiv(operands.body, plan.block), splits)
    blocks: dict[str, Any] = {"operands": operands, "block": plan.block, "splits": splits, "depth": depth}
    states: list[Array] = []
    if op.reduces:
        parts = [jax.ShapeDtypeStruct((rows * splits,), operands.accumulator)] * 2
        states = call(partial(state_kernel, **blocks), rows * splits, arrays, parts, plan, interpret)
    if op.per_row:
        m, l = (part.reshape(rows, splits) for part in states)
        return [part[:, 0] for part in op.parts(op.merge_all((m, l)))]
    # What is given in place of a state lies among the arrays.
    beside = states or arrays[-2:]
    return call(partial(write_kernel, **blocks), rows * splits, [*arrays, *beside], out, plan, interpret)
