"""Strategy `split`: many programs for one row, in three launches: states, merge, finish.

The merge is a tree: a program merges up to MERGE_FAN states, and the launch is repeated until one
is left for each row.  It can be of any height because merging is associative.
"""

import triton
import triton.language as tl

from ... import candidates
from . import ops, state
from .launch import Launch, Program, Request
from .tiles import body, finish_edges, finish_tile, load_edges, reduce_slice, row_offset


@triton.jit(do_not_specialize=("cols", "slice_tiles", "splits", "sizes", "x_strides"))
def split_state_kernel(
    x_ptr, m_ptr, l_ptr, cols, slice_tiles, splits, sizes, x_strides, x_col,
    ACC: tl.constexpr, EXACT: tl.constexpr, X_UNIT: tl.constexpr, COL_UNIT: tl.constexpr,
    VECTOR: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program: the state of slice_tiles × DEPTH × BLOCK columns of a row; the first one's edges are the row's.
    # Chosen: a few rows, too long or too few for one program each.
    # Bytes: one read; eight bytes written for a slice.
    # Limits: none on columns.
    pid = tl.program_id(0).to(tl.int64)
    x_offset = row_offset(pid // splits, sizes, x_strides, X_UNIT)
    cols = cols.to(tl.int64) * COL_UNIT
    head, length = body(x_offset, cols, VECTOR)
    slice_cols = slice_tiles * (DEPTH * BLOCK)
    start = pid % splits * slice_cols
    left = tl.maximum(tl.minimum(length - start, slice_cols), 0)
    x_slice = x_ptr + (x_offset + head) // VECTOR * VECTOR + start * x_col
    m, l = reduce_slice(x_slice, left, x_col, ACC, EXACT, DEPTH, BLOCK)
    if VECTOR > 1 and start == 0:
        x_edges = load_edges(x_ptr + x_offset, head, length, cols, VECTOR).to(ACC)
        m_edges, l_edges = state.of(x_edges, 0, EXACT)
        m, l = state.merge(m, l, m_edges, l_edges, EXACT)
    tl.store(m_ptr + pid, m)
    tl.store(l_ptr + pid, l)


@triton.jit(do_not_specialize=("count", "groups", "sizes", "y_strides"))
def split_merge_kernel(
    m_ptr, l_ptr, m_out_ptr, l_out_ptr, y_ptr, count, groups, sizes, y_strides,
    LAST: tl.constexpr, PER_ROW: tl.constexpr, EXACT: tl.constexpr, Y_UNIT: tl.constexpr, FAN: tl.constexpr,
):  # fmt: skip
    # One program: up to FAN of the `count` states of a row become one of its `groups`.
    # Chosen: with split_state_kernel, as often as it takes; the LAST writes an operation's one number a row.
    # Bytes: eight for a state.
    # Limits: FAN is a power of two that fits registers.
    pid = tl.program_id(0).to(tl.int64)
    row = pid // groups
    i = pid % groups * FAN + tl.arange(0, FAN)
    m = tl.load(m_ptr + row * count + i, mask=i < count, other=-float("inf"))
    l = tl.load(l_ptr + row * count + i, mask=i < count, other=0.0)
    m, l = state.merge_all(m, l, 0, EXACT)
    if LAST and PER_ROW:
        y_offset = row_offset(row, sizes, y_strides, Y_UNIT)
        tl.store(y_ptr + y_offset, ops.result(m, l.to(m.dtype)).to(y_ptr.dtype.element_ty))
    else:
        tl.store(m_out_ptr + pid, m)
        tl.store(l_out_ptr + pid, l)


@triton.jit(do_not_specialize=("cols", "tiles", "sizes", "x_strides", "y_strides"))
def split_finish_kernel(
    x_ptr, y_ptr, m_ptr, l_ptr, cols, tiles, sizes, x_strides, y_strides, x_col, y_col,
    OP: tl.constexpr, ACC: tl.constexpr, EXACT: tl.constexpr,
    X_UNIT: tl.constexpr, Y_UNIT: tl.constexpr, COL_UNIT: tl.constexpr, VECTOR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # One program: the output for TILE columns of a row.
    # Chosen: with split_state_kernel, for operations that write every element.
    # Bytes: one read, one write; what the first launch read last is read first, while L2 still has it.
    # Limits: none on columns.
    pid = tl.num_programs(0).to(tl.int64) - 1 - tl.program_id(0)
    row = pid // tiles
    x_offset = row_offset(row, sizes, x_strides, X_UNIT)
    y_offset = row_offset(row, sizes, y_strides, Y_UNIT)
    cols = cols.to(tl.int64) * COL_UNIT
    head, length = body(x_offset, cols, VECTOR)
    start = pid % tiles * TILE
    m = tl.load(m_ptr + row)
    l = tl.load(l_ptr + row).to(ACC)
    x_tile = x_ptr + (x_offset + head) // VECTOR * VECTOR + start * x_col
    y_tile = y_ptr + (y_offset + head) // VECTOR * VECTOR + start * y_col
    finish_tile(x_tile, y_tile, length - start, x_col, y_col, m, l, OP, ACC, EXACT, TILE)
    if VECTOR > 1 and start == 0:
        x_edges = load_edges(x_ptr + x_offset, head, length, cols, VECTOR).to(ACC)
        finish_edges(x_edges, y_ptr + y_offset, head, length, cols, m, l, OP, EXACT, VECTOR)


FINISH_TILE = 2048
"""Columns of a program of split_finish_kernel: it only copies and scales, and small blocks end evenly."""


def program(request: Request) -> Program:
    """The launches of `split` for a request: states, as many merges as it takes, finish."""
    plan, layout = request.plan, request.layout
    op, per_row, acc, exact = request.op_constants
    x_unit, y_unit, col_unit = layout.units
    sizes, x_strides, y_strides = request.row_numbers
    tiles = -(-layout.cols // plan.block)
    # In float64 l rounds once for a row, however high the tree.
    l_dtype = "float64" if exact else "float32"
    scratch = {"m0": (layout.rows * plan.splits, request.accumulator), "l0": (layout.rows * plan.splits, l_dtype)}
    launches = [
        Launch(
            split_state_kernel,
            plan.programs,
            ("x", "m0", "l0"),
            (request.cols_in_units, -(-tiles // plan.splits), plan.splits, sizes, x_strides, layout.x_col),
            (acc, exact, x_unit, col_unit, plan.vector, plan.depth, plan.block // plan.depth),
            plan.warps,
        )
    ]
    count, level = plan.splits, 0
    while count > 1 or level == 0:
        groups = -(-count // candidates.MERGE_FAN)
        fan = min(candidates.MERGE_FAN, triton.next_power_of_2(count))
        scratch |= {
            f"m{level + 1}": (layout.rows * groups, request.accumulator),
            f"l{level + 1}": (layout.rows * groups, l_dtype),
        }
        launches.append(
            Launch(
                split_merge_kernel,
                layout.rows * groups,
                (f"m{level}", f"l{level}", f"m{level + 1}", f"l{level + 1}", "y"),
                (count, groups, sizes, y_strides),
                (groups == 1, per_row, exact, y_unit, fan),
                max(1, min(8, fan // 128)),
            )
        )
        count, level = groups, level + 1
    if not per_row:
        tiles = -(-layout.cols // FINISH_TILE)
        launches.append(
            Launch(
                split_finish_kernel,
                layout.rows * tiles,
                ("x", "y", f"m{level}", f"l{level}"),
                (request.cols_in_units, tiles, sizes, x_strides, y_strides, layout.x_col, layout.y_col),
                (op, acc, exact, x_unit, y_unit, col_unit, plan.vector, FINISH_TILE),
                8,
            )
        )
    return Program(launches, scratch)
