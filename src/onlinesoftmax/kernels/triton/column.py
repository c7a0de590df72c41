"""Strategy `column`: a program holds adjacent rows; the elements of one row lie far apart."""

import triton
import triton.language as tl

from . import formulas, operands, state
from .launch import Launch, Program, TritonRequest
from .operands import row_offset
from .tiles import strip


@triton.jit(do_not_specialize=("cols", "adjacent"))
def column_kernel(
    p, places, cols, adjacent,
    OP: tl.constexpr, UNITS: tl.constexpr, ADJACENT_UNIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    # One program: ROWS rows that are adjacent in memory, COLS columns at a time.  Each load reads adjacent elements,
    #   and no transposed copy is made.
    # Chosen: the softmax dimension is strided, and rows are dense beside each other.
    # Bytes: one read, one write where WHOLE (all columns fit one tile); else two reads, one write.
    # Limits: none on columns or rows.
    outer, inner, row_mask = strip(tl.program_id(0).to(tl.int64), adjacent * ADJACENT_UNIT, ROWS)
    at = operands.rows_at(p, places, outer, inner[None, :], row_mask[None, :], OP, UNITS)
    row_values = operands.row_operands(p, places, outer, inner, row_mask, cols, OP, UNITS)
    if OP.target:
        at = operands.with_target(at, operands.target_of(row_values)[None, :])
    if OP.writes_elements:
        y_row = p.y + row_offset(outer, places.sizes, places.y, UNITS.y) + inner * places.y.adjacent_stride
    col = tl.arange(0, COLS)
    tiles = tl.cdiv(cols, COLS)
    # 64 bits before the first product that can exceed 2^31.
    step = tl.full([], COLS, tl.int64)

    inside = (col < cols)[:, None] & row_mask[None, :]
    element = operands.load(p, places, at, col[:, None], inside, OP, "")
    if len(OP.sums) > 0:
        m, sums = formulas.reduce(element, 0, OP)
        if not WHOLE:
            for i in range(1, tiles):
                first = step * i
                tile_inside = (col < cols - first)[:, None] & row_mask[None, :]
                tile_at = operands.skip(p, places, at, first, OP)
                tile = operands.load(p, places, tile_at, col[:, None], tile_inside, OP, "")
                m_tile, sums_tile = formulas.reduce(tile, 0, OP)
                m, sums = state.merge(m, sums, m_tile, sums_tile, OP)
    else:
        m, sums = operands.given_state(p, places, outer, inner, row_mask, OP)

    operands.store_row_outputs(p, places, outer, inner, m, sums, row_values, cols, row_mask, OP, UNITS)
    if OP.writes_elements:
        constants = operands.expand(formulas.row_constants(m, sums, row_values, cols, OP), 0)
        y_at = y_row[None, :] + (col.to(tl.int64) * places.y.col)[:, None]
        if WHOLE:
            y = operands.compute_output(p, places, at, col[:, None], element, constants, OP)
            tl.store(y_at, y.to(p.y.dtype.element_ty), mask=inside)
        else:
            for i in range(tiles):
                # The newest tile first: L2 still holds it.
                first = step * (tiles - 1 - i)
                tile_inside = (col < cols - first)[:, None] & row_mask[None, :]
                tile_at = operands.skip(p, places, at, first, OP)
                tile = operands.load(p, places, tile_at, col[:, None], tile_inside, OP, "")
                y = operands.compute_output(p, places, tile_at, col[:, None], tile, constants, OP)
                tl.store(y_at + first * places.y.col, y.to(p.y.dtype.element_ty), mask=tile_inside)


def program(request: TritonRequest) -> Program:
    """The launch of `column` for a request."""
    plan, task = request.plan, request.task
    launch = Launch(
        column_kernel,
        plan.programs,
        (request.pointers,),
        (request.places(adjacent=True), task.cols, task.adjacent // request.adjacent_unit),
        (
            request.op_constants, request.column_units, request.adjacent_unit,
            plan.rows_per_program, plan.block, plan.block >= task.cols,
        ),
        plan.warps,
    )  # fmt: skip
    return Program([launch])
