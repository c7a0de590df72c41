"""Strategy `looped`: a program streams one row, once for its state and once more to write."""

import triton
import triton.language as tl

from . import ops, state
from .launch import Launch, Program, Request
from .tiles import body, finish_edges, finish_tile, load_edges, reduce_slice, row_offset


@triton.jit(do_not_specialize=("cols", "sizes", "x_strides", "y_strides"))
def looped_kernel(
    x_ptr, y_ptr, cols, sizes, x_strides, y_strides, x_col, y_col,
    OP: tl.constexpr, PER_ROW: tl.constexpr, ACC: tl.constexpr, EXACT: tl.constexpr,
    X_UNIT: tl.constexpr, Y_UNIT: tl.constexpr, COL_UNIT: tl.constexpr,
    VECTOR: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program: one row, read in tiles of DEPTH × BLOCK columns.
    # Chosen: the row does not fit registers and there are rows enough to fill the device.
    # Bytes: two reads, one write; the second read hits L2 for what the resident rows still have there.
    # Limits: none on columns.
    TILE: tl.constexpr = DEPTH * BLOCK
    row = tl.program_id(0).to(tl.int64)
    x_offset = row_offset(row, sizes, x_strides, X_UNIT)
    y_offset = row_offset(row, sizes, y_strides, Y_UNIT)
    cols = cols.to(tl.int64) * COL_UNIT
    head, length = body(x_offset, cols, VECTOR)
    x_body = x_ptr + (x_offset + head) // VECTOR * VECTOR
    if VECTOR > 1:
        x_edges = load_edges(x_ptr + x_offset, head, length, cols, VECTOR).to(ACC)
    m, l = reduce_slice(x_body, length, x_col, ACC, EXACT, DEPTH, BLOCK)
    if VECTOR > 1:
        m_edges, l_edges = state.of(x_edges, 0, EXACT)
        m, l = state.merge(m, l, m_edges, l_edges, EXACT)
    l = l.to(ACC)
    if PER_ROW:
        tl.store(y_ptr + y_offset, ops.result(m, l).to(y_ptr.dtype.element_ty))
    else:
        if VECTOR > 1:
            finish_edges(x_edges, y_ptr + y_offset, head, length, cols, m, l, OP, EXACT, VECTOR)
        y_body = y_ptr + (y_offset + head) // VECTOR * VECTOR
        tiles = tl.cdiv(length, TILE)
        for i in range(tiles):
            # Newest first: L2 still holds those.
            first = (tiles - 1 - i) * TILE
            finish_tile(
                x_body + first * x_col, y_body + first * y_col, length - first, x_col, y_col, m, l, OP, ACC, EXACT, TILE
            )


def program(request: Request) -> Program:
    """The launch of `looped` for a request."""
    plan, layout = request.plan, request.layout
    launch = Launch(
        looped_kernel,
        plan.programs,
        ("x", "y"),
        (request.cols_in_units, *request.row_numbers, layout.x_col, layout.y_col),
        (*request.op_constants, *layout.units, plan.vector, plan.depth, plan.block // plan.depth),
        plan.warps,
    )
    return Program([launch])
