"""Strategy `row`: a program holds whole rows on chip."""

import triton
import triton.language as tl

from . import ops, state
from .launch import Launch, Program, Request
from .tiles import body, edges, row_offset


@triton.jit(do_not_specialize=("rows", "cols", "sizes", "x_strides", "y_strides"))
def row_kernel(
    x_ptr, y_ptr, rows, cols, sizes, x_strides, y_strides, x_col, y_col,
    OP: tl.constexpr, PER_ROW: tl.constexpr, ACC: tl.constexpr, EXACT: tl.constexpr,
    X_UNIT: tl.constexpr, Y_UNIT: tl.constexpr, COL_UNIT: tl.constexpr,
    VECTOR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # One program: a tile of ROWS rows, all of their columns in registers; with STAGES, one tile after another.
    # Chosen: whenever the row fits registers.
    # Bytes: one read, one write.
    # Limits: COLS is a power of two; ROWS × COLS elements must fit the registers of one block.
    if STAGES == 0:
        one_tile(
            x_ptr, y_ptr, tl.program_id(0), rows, cols, sizes, x_strides, y_strides, x_col, y_col,
            OP, PER_ROW, ACC, EXACT, X_UNIT, Y_UNIT, COL_UNIT, VECTOR, ROWS, COLS, EVEN,
        )  # fmt: skip
    else:
        # One block fills the multiprocessor: the next tiles must travel while this one is reduced.
        for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
            one_tile(
                x_ptr, y_ptr, tile, rows, cols, sizes, x_strides, y_strides, x_col, y_col,
                OP, PER_ROW, ACC, EXACT, X_UNIT, Y_UNIT, COL_UNIT, VECTOR, ROWS, COLS, EVEN,
            )  # fmt: skip


@triton.jit
def one_tile(
    x_ptr, y_ptr, tile, rows, cols, sizes, x_strides, y_strides, x_col, y_col,
    OP: tl.constexpr, PER_ROW: tl.constexpr, ACC: tl.constexpr, EXACT: tl.constexpr,
    X_UNIT: tl.constexpr, Y_UNIT: tl.constexpr, COL_UNIT: tl.constexpr,
    VECTOR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = row < rows
    x_row = row_offset(row, sizes, x_strides, X_UNIT)
    y_row = row_offset(row, sizes, y_strides, Y_UNIT)
    cols = cols * COL_UNIT
    col = tl.arange(0, COLS)
    mask = row_mask[:, None]
    if VECTOR > 1:
        # Rows begin anywhere: each has its own head, and a body where all rows load alike.
        head, length = body(x_row, cols, VECTOR)
        x_body = (x_row + head) // VECTOR * VECTOR
        y_body = (y_row + head) // VECTOR * VECTOR
        mask = mask & (col[None, :] < length.to(tl.int32)[:, None])
        # The edges' tile stands on end: lying like x's it would be given x's layout, which is made for
        # long rows, and every element of it to many threads at once.
        i = tl.arange(0, 2 * VECTOR)[:, None]
        edge, edge_mask = edges(i, head[None, :], length[None, :], cols, VECTOR)
        edge_mask = edge_mask & row_mask[None, :]
        x_edges = tl.load(x_ptr + x_row[None, :] + edge, mask=edge_mask, other=-float("inf")).to(ACC)
    else:
        x_body = x_row
        y_body = y_row
        if not EVEN:
            mask = mask & (col < cols)[None, :]

    x = tl.load(x_ptr + x_body[:, None] + (col.to(tl.int64) * x_col)[None, :], mask=mask, other=-float("inf")).to(ACC)
    if VECTOR > 1:
        m, l = state.of_both(x, 1, x_edges, 0, EXACT)
    else:
        m, l = state.of(x, 1, EXACT)

    if PER_ROW:
        tl.store(y_ptr + y_row, ops.result(m, l).to(y_ptr.dtype.element_ty), mask=row_mask)
    else:
        s = state.shift(m)
        t = ops.term(m, l, OP)
        y = ops.finish(x, s[:, None], l[:, None], t[:, None], OP, EXACT).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + y_body[:, None] + (col.to(tl.int64) * y_col)[None, :], y, mask=mask)
        if VECTOR > 1:
            y = ops.finish(x_edges, s[None, :], l[None, :], t[None, :], OP, EXACT).to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + y_row[None, :] + edge, y, mask=edge_mask)


def program(request: Request) -> Program:
    """The launch of `row` for a request."""
    plan, layout = request.plan, request.layout
    launch = Launch(
        row_kernel,
        plan.programs,
        ("x", "y"),
        (layout.rows, request.cols_in_units, *request.row_numbers, layout.x_col, layout.y_col),
        (
            *request.op_constants, *layout.units,
            plan.vector, plan.rows_per_program, plan.block, plan.block == layout.cols, plan.stages,
        ),
        plan.warps,
    )  # fmt: skip
    return Program([launch])
