"""Strategy `split`: many programs for one row, in three launches: states, merge, finish.

The merge is a tree: a program merges up to FAN states, and the launch is repeated until one is
left for each row.  It can be of any length because merging is associative.
"""

import triton
import triton.language as tl

from . import ops, state
from ... import candidates
from .launch import Launch, Program, Request
from .tiles import finish_slice, reduce_slice, row_offset


@triton.jit(do_not_specialize=("cols", "slice_cols", "splits", "sizes", "x_strides"))
def split_state_kernel(
    x_ptr, m_ptr, l_ptr, cols, slice_cols, splits, sizes, x_strides, x_col,
    ACC: tl.constexpr, X_UNIT: tl.constexpr, COL_UNIT: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program: the state of slice_cols columns of a row.
    # Chosen: a few rows, too long or too few for one program each.
    # Bytes: one read; eight bytes written for a slice.
    # Limits: none on columns.
    pid = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row_offset(pid // splits, sizes, x_strides, X_UNIT)
    start = pid % splits * slice_cols * COL_UNIT
    length = tl.minimum(cols * COL_UNIT - start, slice_cols * COL_UNIT)
    m, l = reduce_slice(x_row + start * x_col, 0, length, x_col, ACC, DEPTH, BLOCK)
    tl.store(m_ptr + pid, m)
    tl.store(l_ptr + pid, l)


@triton.jit(do_not_specialize=("count", "sizes", "y_strides"))
def split_merge_kernel(
    m_ptr, l_ptr, m_out_ptr, l_out_ptr, y_ptr, count, groups, sizes, y_strides,
    LAST: tl.constexpr, PER_ROW: tl.constexpr, Y_UNIT: tl.constexpr, FAN: tl.constexpr,
):  # fmt: skip
    # One program: up to FAN of the `count` states of a row become one of its `groups`.
    # Chosen: with split_state_kernel, as often as it takes; LAST writes an operation's one number a row.
    # Bytes: eight for a state.
    # Limits: FAN is a power of two that fits registers.
    pid = tl.program_id(0).to(tl.int64)
    row = pid // groups
    i = pid % groups * FAN + tl.arange(0, FAN)
    m = tl.load(m_ptr + row * count + i, mask=i < count, other=-float("inf"))
    l = tl.load(l_ptr + row * count + i, mask=i < count, other=0.0)
    m, l = state.merge_all(m, l, 0)
    if LAST and PER_ROW:
        tl.store(
            y_ptr + row_offset(row, sizes, y_strides, Y_UNIT), ops.result(state.shift(m), l).to(y_ptr.dtype.element_ty)
        )
    else:
        tl.store(m_out_ptr + pid, m)
        tl.store(l_out_ptr + pid, l)


@triton.jit(do_not_specialize=("cols", "slice_cols", "splits", "programs", "sizes", "x_strides", "y_strides"))
def split_finish_kernel(
    x_ptr, y_ptr, m_ptr, l_ptr, cols, slice_cols, splits, programs, sizes, x_strides, y_strides, x_col, y_col,
    OP: tl.constexpr, ACC: tl.constexpr,
    X_UNIT: tl.constexpr, Y_UNIT: tl.constexpr, COL_UNIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # One program: the output for slice_cols columns of a row.
    # Chosen: with split_state_kernel, for operations that write every element.
    # Bytes: one read, one write; what the first launch read last is read first, while L2 still has it.
    # Limits: none on columns.
    pid = programs - 1 - tl.program_id(0).to(tl.int64)
    row = pid // splits
    x_row = x_ptr + row_offset(row, sizes, x_strides, X_UNIT)
    y_row = y_ptr + row_offset(row, sizes, y_strides, Y_UNIT)
    start = pid % splits * slice_cols * COL_UNIT
    length = tl.minimum(cols * COL_UNIT - start, slice_cols * COL_UNIT)
    m = tl.load(m_ptr + row)
    l = tl.load(l_ptr + row)
    finish_slice(x_row + start * x_col, y_row + start * y_col, 0, length, x_col, y_col, m, l, OP, ACC, TILE)


def program(request: Request) -> Program:
    """The launches of `split` for a request: states, as many merges as it takes, finish."""
    plan, layout, scratch = request.plan, request.layout, {}
    op, per_row, acc = request.op_constants
    x_unit, y_unit, col_unit = layout.units
    sizes, x_strides, y_strides = request.row_numbers
    tiles = -(-layout.cols // plan.block)
    slice_cols = -(-tiles // plan.splits) * plan.block

    def states(level: int, count: int) -> tuple[str, str]:
        scratch.update({f"m{level}": layout.rows * count, f"l{level}": layout.rows * count})
        return f"m{level}", f"l{level}"

    count, partial = plan.splits, states(0, plan.splits)
    cols = (request.cols_in_units, slice_cols // col_unit, plan.splits)
    launches = [
        Launch(
            split_state_kernel, plan.programs, ("x", *partial), (*cols, sizes, x_strides, layout.x_col),
            (acc, x_unit, col_unit, plan.depth, plan.block // plan.depth), plan.warps,
        )  # fmt: skip
    ]
    while count > 1 or partial == ("m0", "l0"):
        groups = -(-count // candidates.MERGE_FAN)
        merged = states(len(launches), groups)
        fan = min(candidates.MERGE_FAN, triton.next_power_of_2(count))
        launches.append(
            Launch(
                split_merge_kernel, layout.rows * groups, (*partial, *merged, "y"), (count, groups, sizes, y_strides),
                (groups == 1, per_row, y_unit, fan), max(1, min(8, fan // 128)),
            )  # fmt: skip
        )
        count, partial = groups, merged
    if not per_row:
        launches.append(
            Launch(
                split_finish_kernel, plan.programs, ("x", "y", *partial),
                (*cols, plan.programs, sizes, x_strides, y_strides, layout.x_col, layout.y_col),
                (op, acc, x_unit, y_unit, col_unit, plan.block), plan.warps,
            )  # fmt: skip
        )
    return Program(launches, request.accumulator, scratch)
