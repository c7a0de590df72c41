"""Strategy `column`: a program holds adjacent rows whose own elements lie far apart."""

import triton
import triton.language as tl

from . import operands, ops
from .launch import Launch, Program, TritonRequest
from .operands import row_offset


@triton.jit(do_not_specialize=("cols", "adjacent"))
def column_kernel(
    p, y_ptr, places, cols, adjacent,
    OP: tl.constexpr, PER_ROW: tl.constexpr, REDUCES: tl.constexpr, ACC: tl.constexpr, EXACT: tl.constexpr,
    ZERO: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    # One program: ROWS rows that are neighbours in memory, COLS columns at a time: each load is a
    #   run of neighbours, and no transposed copy is made.
    # Chosen: the softmax dimension is strided and the rows beside it are dense.
    # Bytes: one read, one write when WHOLE (the columns fit one tile); else two reads.
    # Limits: none on columns or rows.
    adjacent = adjacent * UNITS[2]
    strips = tl.cdiv(adjacent, ROWS)
    pid = tl.program_id(0).to(tl.int64)
    near = pid % strips * ROWS + tl.arange(0, ROWS)
    row_mask = near < adjacent
    at = operands.first_elements(p, places, pid // strips, UNITS)
    at = operands.beside(p, places, at, near[None, :])
    y_row = y_ptr + row_offset(pid // strips, places.sizes, places.y, UNITS[1]) + near * places.y.near
    col = tl.arange(0, COLS)
    tiles = tl.cdiv(cols, COLS)
    # 64-bit before the first product that can pass 2^31.
    step = tl.full([], COLS, tl.int64)

    inside = (col < cols)[:, None] & row_mask[None, :]
    a, b, counts = operands.load(p, places, at, col[:, None], inside, OP, ACC, "")
    if REDUCES:
        m, l = ops.reduce(a, b, 0, OP, EXACT, ZERO)
        if not WHOLE:
            for i in range(1, tiles):
                first = step * i
                inside = (col < cols - first)[:, None] & row_mask[None, :]
                a, b, counts = operands.load(
                    p, places, operands.skip(p, places, at, first), col[:, None], inside, OP, ACC, ""
                )
                m_tile, l_tile = ops.reduce(a, b, 0, OP, EXACT, ZERO)
                m, l = ops.merge(m, l, m_tile, l_tile, OP, EXACT)
    else:
        m, l = operands.given(p, places, pid // strips, near, row_mask, ACC)

    if PER_ROW:
        tl.store(y_row, ops.result(m, l).to(y_ptr.dtype.element_ty), mask=row_mask)
    else:
        s, l, t = ops.term(m, l, cols, OP, ZERO)
        s, l, t = s[None, :], l[None, :], t[None, :]
        y_at = y_row[None, :] + (col.to(tl.int64) * places.y.col)[:, None]
        if WHOLE:
            y = operands.finish(p, places, at, col[:, None], a, b, counts, s, l, t, OP, ACC, EXACT, ZERO)
            tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=inside)
        else:
            for i in range(tiles):
                # Newest first: L2 still holds those.
                first = step * (tiles - 1 - i)
                inside = (col < cols - first)[:, None] & row_mask[None, :]
                tile_at = operands.skip(p, places, at, first)
                a, b, counts = operands.load(p, places, tile_at, col[:, None], inside, OP, ACC, "")
                y = operands.finish(p, places, tile_at, col[:, None], a, b, counts, s, l, t, OP, ACC, EXACT, ZERO)
                tl.store(y_at + first * places.y.col, y.to(y_ptr.dtype.element_ty), mask=inside)


def program(request: TritonRequest) -> Program:
    """The launch of `column` for a request."""
    plan, layout = request.plan, request.layout
    launch = Launch(
        column_kernel,
        plan.programs,
        (request.pointers, "y"),
        (request.places(beside=True), layout.cols, layout.adjacent // request.column_units[2]),
        (
            *request.op_constants, request.column_units,
            plan.rows_per_program, plan.block, plan.block >= layout.cols,
        ),
        plan.warps,
    )  # fmt: skip
    return Program([launch])
