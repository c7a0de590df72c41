"""Strategy `split`: a program has a slice of a row; XLA merges their states, and a second launch writes."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ...arrays import Array
from ...plan import Plan
from .call import call
from .looped import state_of
from .operands import Operands


def state_kernel(*refs: Any, operands: Operands, block: int, splits: int, depth: int) -> None:
    """One program: the state of a slice of `depth` tiles."""
    *reads, m_ref, l_ref = refs
    program = pl.program_id(0)
    row, part = jax.lax.div(program, jnp.int32(splits)), jax.lax.rem(program, jnp.int32(splits))
    for ref, value in zip(
        (m_ref, l_ref), state_of(operands, tuple(reads), row, part * depth, depth, block), strict=True
    ):
        pltriton.store(ref.at[pl.ds(program, 1)], value[:, 0])


def write_kernel(*refs: Any, operands: Operands, block: int, tiles: int) -> None:
    """One program: a tile of the output, from its row's state."""
    *reads, m_ref, l_ref, y_ref = refs
    program = pl.program_id(0)
    row, tile = jax.lax.div(program, jnp.int32(tiles)), jax.lax.rem(program, jnp.int32(tiles))
    m, l = (pltriton.load(ref.at[pl.ds(row, 1)])[:, None] for ref in (m_ref, l_ref))
    col = tile * block
    held = operands.load(tuple(reads), row, col, (1, block))
    operands.store(y_ref, row, col, held, operands.op.term((m, l)))


def run(operands: Operands, arrays: list[Array], out: list[Any], plan: Plan, interpret: bool) -> list[Array]:
    """The operation on matrices: few long rows.

    Bytes: two reads, one write.
    Limits: rows × splits states.
    """
    op, splits, rows = operands.op, plan.splits, operands.rows
    tiles = pl.cdiv(operands.cols, plan.block)
    if op.reduces:
        kernel = partial(state_kernel, operands=operands, block=plan.block, splits=splits, depth=pl.cdiv(tiles, splits))
        parts = [jax.ShapeDtypeStruct((rows * splits,), operands.accumulator)] * 2
        m, l = (part.reshape(rows, splits) for part in call(kernel, rows * splits, arrays, parts, plan, interpret))
        state = op.merge_all((m, l))
    else:
        m, l = arrays[-2:]
        state = m[:, None], l[:, None]
    if op.per_row:
        return [part[:, 0] for part in op.parts(state)]
    kernel = partial(write_kernel, operands=operands, block=plan.block, tiles=tiles)
    return call(kernel, rows * tiles, [*arrays, *(part[:, 0] for part in state)], out, plan, interpret)
