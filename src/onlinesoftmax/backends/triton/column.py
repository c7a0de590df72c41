"""Strategy `column`: a program holds adjacent rows whose own elements lie far apart."""

import triton
import triton.language as tl

from . import ops, state
from .launch import Launch, Program, Request, in_units
from .tiles import row_offset


@triton.jit(do_not_specialize=("cols", "adjacent", "sizes", "x_strides", "y_strides", "x_col"))
def column_kernel(
    x_ptr, y_ptr, cols, adjacent, sizes, x_strides, y_strides, y_row, x_col, y_col,
    OP: tl.constexpr, PER_ROW: tl.constexpr, ACC: tl.constexpr, EXACT: tl.constexpr,
    X_UNIT: tl.constexpr, Y_UNIT: tl.constexpr, ROW_UNIT: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    # One program: ROWS rows that are neighbours in memory, COLS columns at a time: each load is a
    #   run of neighbours, and no transposed copy is made.
    # Chosen: the softmax dimension is strided and the rows beside it are dense.
    # Bytes: one read, one write when WHOLE (the columns fit one tile); else two reads.
    # Limits: none on columns or rows.
    strips = tl.cdiv(adjacent * ROW_UNIT, ROWS)
    pid = tl.program_id(0).to(tl.int64)
    row = pid % strips * ROWS + tl.arange(0, ROWS)
    row_mask = row < adjacent * ROW_UNIT
    x_base = x_ptr + row_offset(pid // strips, sizes, x_strides, X_UNIT)
    y_base = y_ptr + row_offset(pid // strips, sizes, y_strides, Y_UNIT)
    col = tl.arange(0, COLS)
    x_offs = (col.to(tl.int64) * x_col * X_UNIT)[:, None] + row[None, :]
    y_offs = (col.to(tl.int64) * y_col * Y_UNIT)[:, None] + (row * y_row)[None, :]
    # 64-bit before the first product that can pass 2^31.
    x_step = tl.full([], COLS * X_UNIT, tl.int64) * x_col
    y_step = tl.full([], COLS * Y_UNIT, tl.int64) * y_col
    tiles = tl.cdiv(cols, COLS)

    mask = (col < cols)[:, None] & row_mask[None, :]
    x = tl.load(x_base + x_offs, mask=mask, other=-float("inf")).to(ACC)
    m, l = state.of(x, 0, EXACT)
    if not WHOLE:
        for i in range(1, tiles):
            mask = (col < cols - i * COLS)[:, None] & row_mask[None, :]
            x = tl.load(x_base + i * x_step + x_offs, mask=mask, other=-float("inf")).to(ACC)
            m_tile, l_tile = state.of(x, 0, EXACT)
            m, l = state.merge(m, l, m_tile, l_tile, EXACT)

    if PER_ROW:
        tl.store(y_base + row * y_row, ops.result(m, l).to(y_ptr.dtype.element_ty), mask=row_mask)
    else:
        s = state.shift(m)[None, :]
        t = ops.term(m, l, OP)[None, :]
        if WHOLE:
            y = ops.finish(x, s, l[None, :], t, OP, EXACT).to(y_ptr.dtype.element_ty)
            tl.store(y_base + y_offs, y, mask=mask)
        else:
            for i in range(tiles):
                # Newest first: L2 still holds those.
                tile = tiles - 1 - i
                mask = (col < cols - tile * COLS)[:, None] & row_mask[None, :]
                x = tl.load(x_base + tile * x_step + x_offs, mask=mask).to(ACC)
                y = ops.finish(x, s, l[None, :], t, OP, EXACT).to(y_ptr.dtype.element_ty)
                tl.store(y_base + tile * y_step + y_offs, y, mask=mask)


def program(request: Request) -> Program:
    """The launch of `column` for a request."""
    plan, layout = request.plan, request.layout
    x_unit, y_unit, row_unit = layout.column_units
    y_row, y_col = layout.y_strides[0], layout.y_col
    # One outer dimension at least, so that offsets have something to count.
    sizes, x_strides, y_strides = layout.sizes[1:] or (1,), layout.x_strides[1:] or (0,), layout.y_strides[1:] or (0,)
    launch = Launch(
        column_kernel,
        plan.programs,
        ("x", "y"),
        (
            layout.cols, layout.adjacent // row_unit,
            sizes[:-1], in_units(x_strides, x_unit), in_units(y_strides, y_unit),
            y_row, layout.x_col // x_unit, y_col // y_unit,
        ),
        (
            *request.op_constants, x_unit, y_unit, row_unit,
            plan.rows_per_program, plan.block, plan.block >= layout.cols,
        ),
        plan.warps,
    )  # fmt: skip
    return Program([launch])
