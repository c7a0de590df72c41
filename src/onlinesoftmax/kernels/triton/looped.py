"""Strategy `looped`: a program streams one row, once for its state and once more to write."""

import triton
import triton.language as tl

from . import operands, ops
from .launch import Launch, Program, TritonRequest
from .operands import row_offset
from .tiles import body, finish_edges, finish_tile, load_edges, reduce_slice


@triton.jit(do_not_specialize=("cols",))
def looped_kernel(
    p, y_ptr, places, cols,
    OP: tl.constexpr, PER_ROW: tl.constexpr, REDUCES: tl.constexpr, ACC: tl.constexpr, EXACT: tl.constexpr,
    ZERO: tl.constexpr, UNITS: tl.constexpr, VECTOR: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program: one row, read in tiles of DEPTH × BLOCK columns.
    # Chosen: the row does not fit registers and there are rows enough to fill the device.
    # Bytes: two reads, one write; the second read hits L2 for what the resident rows still have there.
    # Limits: none on columns.
    TILE: tl.constexpr = DEPTH * BLOCK
    row = tl.program_id(0).to(tl.int64)
    row_at = operands.first_elements(p, places, row, UNITS)
    y_row = row_offset(row, places.sizes, places.y, UNITS[1])
    cols = cols.to(tl.int64) * UNITS[2]
    head, length = body(row_at[0], cols, VECTOR)
    at = operands.skip_head(p, places, row_at, head, VECTOR)
    if VECTOR > 1:
        edge = load_edges(p, places, row_at, head, length, cols, OP, ACC, VECTOR)
    if REDUCES:
        m, l = reduce_slice(p, places, at, length, OP, ACC, EXACT, ZERO, DEPTH, BLOCK)
        if VECTOR > 1:
            m_edge, l_edge = ops.reduce(edge[0], edge[1], 0, OP, EXACT, ZERO)
            m, l = ops.merge(m, l, m_edge, l_edge, OP, EXACT)
    else:
        m, l = operands.given(p, places, row, 0, None, ACC)
    if PER_ROW:
        tl.store(y_ptr + y_row, ops.result(m, l.to(m.dtype)).to(y_ptr.dtype.element_ty))
    else:
        if VECTOR > 1:
            finish_edges(p, places, row_at, y_ptr + y_row, edge, head, length, cols, m, l, OP, ACC, EXACT, ZERO, VECTOR)
        y_body = y_ptr + (y_row + head) // VECTOR * VECTOR
        tiles = tl.cdiv(length, TILE)
        for i in range(tiles):
            # Newest first: L2 still holds those.
            first = (tiles - 1 - i) * TILE
            finish_tile(p, places, at, y_body, first, length, cols, m, l, OP, ACC, EXACT, ZERO, TILE)


def program(request: TritonRequest) -> Program:
    """The launch of `looped` for a request."""
    plan = request.plan
    launch = Launch(
        looped_kernel,
        plan.programs,
        (request.pointers, "y"),
        (request.places(), request.cols_in_units),
        (*request.op_constants, request.units, plan.vector, plan.blocks.depth, plan.block // plan.blocks.depth),
        plan.warps,
    )
    return Program([launch])
