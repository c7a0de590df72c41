"""Strategy `looped`: a program streams one row, once for its state and once more to write."""

import triton
import triton.language as tl

from . import ops, state
from .launch import Launch, Program, Request
from .tiles import finish_slice, reduce_slice, row_offset


@triton.jit(do_not_specialize=("cols", "sizes", "x_strides", "y_strides"))
def looped_kernel(
    x_ptr, y_ptr, cols, sizes, x_strides, y_strides, x_col, y_col,
    OP: tl.constexpr, PER_ROW: tl.constexpr, ACC: tl.constexpr,
    X_UNIT: tl.constexpr, Y_UNIT: tl.constexpr, COL_UNIT: tl.constexpr,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program: one row, read in tiles of DEPTH × BLOCK columns.
    # Chosen: the row does not fit registers and there are rows enough to fill the device.
    # Bytes: two reads, one write; the second read hits L2 for what the resident rows still have there.
    # Limits: none on columns.
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row_offset(row, sizes, x_strides, X_UNIT)
    y_row = y_ptr + row_offset(row, sizes, y_strides, Y_UNIT)
    cols = cols.to(tl.int64) * COL_UNIT
    m, l = reduce_slice(x_row, 0, cols, x_col, ACC, DEPTH, BLOCK)
    if PER_ROW:
        tl.store(y_row, ops.result(state.shift(m), l).to(y_ptr.dtype.element_ty))
    else:
        finish_slice(x_row, y_row, 0, cols, x_col, y_col, m, l, OP, ACC, DEPTH * BLOCK)


def program(request: Request) -> Program:
    """The launch of `looped` for a request."""
    plan, layout = request.plan, request.layout
    launch = Launch(
        looped_kernel,
        plan.programs,
        ("x", "y"),
        (request.cols_in_units, *request.row_numbers, layout.x_col, layout.y_col),
        (*request.op_constants, *layout.units, plan.depth, plan.block // plan.depth),
        plan.warps,
    )
    return Program([launch], request.accumulator)
