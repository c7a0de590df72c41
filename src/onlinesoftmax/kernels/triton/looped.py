"""Strategy `looped`: a program streams one row, once for its state and once more to write."""

import triton
import triton.language as tl

from . import formulas, operands, state
from .launch import Launch, Program, TritonRequest
from .operands import row_offset
from .tiles import body, finish_edges, finish_tile, load_edges, reduce_slice


@triton.jit(do_not_specialize=("cols",))
def looped_kernel(
    p, places, cols,
    OP: tl.constexpr, UNITS: tl.constexpr, VECTOR: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program: one row, read in tiles of DEPTH × BLOCK columns.
    # Chosen: the row does not fit registers, and there are enough rows to fill the device.
    # Bytes: two reads, one write; the second read hits L2 for the part of the resident rows that is still there.
    # Limits: none on columns.
    TILE: tl.constexpr = DEPTH * BLOCK
    row = tl.program_id(0).to(tl.int64)
    row_at = operands.rows_at(p, places, row, 0, None, OP, UNITS)
    if OP.writes_elements:
        y_row = row_offset(row, places.sizes, places.y, UNITS.y)
    cols = cols.to(tl.int64) * UNITS.cols
    row_values = operands.row_operands(p, places, row, 0, None, cols, OP, UNITS)
    if OP.target:
        row_at = operands.with_target(row_at, operands.target_of(row_values))
    head, length = body(row_at[0][0], cols, VECTOR)
    at = operands.skip_head(p, places, row_at, head, OP, VECTOR)
    if VECTOR > 1:
        edge = load_edges(p, places, row_at, head, length, cols, OP, VECTOR)
    if len(OP.sums) > 0:
        m, sums = reduce_slice(p, places, at, length, OP, DEPTH, BLOCK)
        if VECTOR > 1:
            m_edge, sums_edge = formulas.reduce(edge, 0, OP)
            m, sums = state.merge(m, sums, m_edge, sums_edge, OP)
    else:
        m, sums = operands.given_state(p, places, row, 0, None, OP)
    operands.store_row_outputs(p, places, row, 0, m, sums, row_values, cols, None, OP, UNITS)
    if OP.writes_elements:
        if VECTOR > 1:
            finish_edges(p, places, row_at, p.y + y_row, edge, head, length, cols, m, sums, row_values, OP, VECTOR)
        y_body = p.y + (y_row + head) // VECTOR * VECTOR
        tiles = tl.cdiv(length, TILE)
        for i in range(tiles):
            # The newest tile first: L2 still holds it.
            first = (tiles - 1 - i) * TILE
            finish_tile(p, places, at, y_body, first, length, cols, m, sums, row_values, OP, TILE)


def program(request: TritonRequest) -> Program:
    """The launch of `looped` for a request."""
    plan = request.plan
    launch = Launch(
        looped_kernel,
        plan.programs,
        (request.pointers,),
        (request.places(), request.cols_in_units),
        (request.op_constants, request.units, plan.vector, plan.depth, plan.block // plan.depth),
        plan.warps,
    )
    return Program([launch])
