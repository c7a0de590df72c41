"""Strategy `row`: a program holds whole rows on chip."""

import triton
import triton.language as tl

from . import ops, state
from .launch import Launch, Program, Request
from .tiles import row_offset


@triton.jit(do_not_specialize=("rows", "cols", "sizes", "x_strides", "y_strides"))
def row_kernel(
    x_ptr, y_ptr, rows, cols, sizes, x_strides, y_strides, x_col, y_col,
    OP: tl.constexpr, PER_ROW: tl.constexpr, ACC: tl.constexpr,
    X_UNIT: tl.constexpr, Y_UNIT: tl.constexpr, COL_UNIT: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # One program: a tile of ROWS rows, all of their columns in registers; with STAGES, one tile after another.
    # Chosen: whenever the row fits registers.
    # Bytes: one read, one write.
    # Limits: COLS is a power of two; ROWS × COLS elements must fit the registers of one block.
    if STAGES == 0:
        one_tile(
            x_ptr, y_ptr, tl.program_id(0), rows, cols, sizes, x_strides, y_strides, x_col, y_col,
            OP, PER_ROW, ACC, X_UNIT, Y_UNIT, COL_UNIT, ROWS, COLS, EVEN,
        )  # fmt: skip
    else:
        # One block fills the multiprocessor: the next tiles must travel while this one is reduced.
        for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
            one_tile(
                x_ptr, y_ptr, tile, rows, cols, sizes, x_strides, y_strides, x_col, y_col,
                OP, PER_ROW, ACC, X_UNIT, Y_UNIT, COL_UNIT, ROWS, COLS, EVEN,
            )  # fmt: skip


@triton.jit
def one_tile(
    x_ptr, y_ptr, tile, rows, cols, sizes, x_strides, y_strides, x_col, y_col,
    OP: tl.constexpr, PER_ROW: tl.constexpr, ACC: tl.constexpr,
    X_UNIT: tl.constexpr, Y_UNIT: tl.constexpr, COL_UNIT: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    row_mask = row < rows
    mask = row_mask[:, None]
    if not EVEN:
        mask = mask & (col < cols * COL_UNIT)[None, :]
    x_offs = row_offset(row, sizes, x_strides, X_UNIT)[:, None] + (col.to(tl.int64) * x_col)[None, :]
    x = tl.load(x_ptr + x_offs, mask=mask, other=-float("inf")).to(ACC)
    m, l = state.of(x, 1)
    s = state.shift(m)
    y_offs = row_offset(row, sizes, y_strides, Y_UNIT)
    if PER_ROW:
        tl.store(y_ptr + y_offs, ops.result(s, l).to(y_ptr.dtype.element_ty), mask=row_mask)
    else:
        y = ops.finish(x, s[:, None], ops.term(m, l, OP)[:, None], OP)
        y_offs = y_offs[:, None] + (col.to(tl.int64) * y_col)[None, :]
        tl.store(y_ptr + y_offs, y.to(y_ptr.dtype.element_ty), mask=mask)


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
            plan.rows_per_program, plan.block, plan.block == layout.cols, plan.stages,
        ),
        plan.warps,
    )  # fmt: skip
    return Program([launch], request.accumulator)
