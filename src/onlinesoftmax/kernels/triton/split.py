"""Strategy `split`: many programs for one row, in three launches: states, merge, finish.

The merge is a tree: a program merges up to MERGE_FAN states, and the launch is repeated until one
is left for each row.  It can be of any height because merging is associative.
"""

import triton
import triton.language as tl

from ...planner.strategies import triton as candidates
from . import operands, ops
from .launch import Launch, Program, TritonRequest
from .operands import row_offset
from .tiles import body, finish_edges, finish_tile, load_edges, reduce_slice


@triton.jit(do_not_specialize=("cols", "slice_tiles", "splits"))
def split_state_kernel(
    p, m_ptr, l_ptr, places, cols, slice_tiles, splits,
    OP: tl.constexpr, ACC: tl.constexpr, EXACT: tl.constexpr, ZERO: tl.constexpr, UNITS: tl.constexpr,
    VECTOR: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program: the state of slice_tiles × DEPTH × BLOCK columns of a row; the first one's edges are the row's.
    # Chosen: a few rows, too long or too few for one program each.
    # Bytes: one read; eight bytes written for a slice.
    # Limits: none on columns.
    pid = tl.program_id(0).to(tl.int64)
    row_at = operands.first_elements(p, places, pid // splits, UNITS)
    cols = cols.to(tl.int64) * UNITS[2]
    head, length = body(row_at[0], cols, VECTOR)
    slice_cols = slice_tiles * (DEPTH * BLOCK)
    start = pid % splits * slice_cols
    left = tl.maximum(tl.minimum(length - start, slice_cols), 0)
    at = operands.skip(p, places, operands.skip_head(p, places, row_at, head, VECTOR), start)
    m, l = reduce_slice(p, places, at, left, OP, ACC, EXACT, ZERO, DEPTH, BLOCK)
    if VECTOR > 1 and start == 0:
        a, b, _ = load_edges(p, places, row_at, head, length, cols, OP, ACC, VECTOR)
        m_edge, l_edge = ops.reduce(a, b, 0, OP, EXACT, ZERO)
        m, l = ops.merge(m, l, m_edge, l_edge, OP, EXACT)
    tl.store(m_ptr + pid, m)
    tl.store(l_ptr + pid, l)


@triton.jit(do_not_specialize=("count", "groups"))
def split_merge_kernel(
    m_ptr, l_ptr, m_out_ptr, l_out_ptr, y_ptr, places, count, groups,
    OP: tl.constexpr, LAST: tl.constexpr, PER_ROW: tl.constexpr, EXACT: tl.constexpr, UNITS: tl.constexpr,
    FAN: tl.constexpr,
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
    m, l = ops.merge_all(m, l, 0, OP, EXACT)
    if LAST and PER_ROW:
        y_row = row_offset(row, places.sizes, places.y, UNITS[1])
        tl.store(y_ptr + y_row, ops.result(m, l.to(m.dtype)).to(y_ptr.dtype.element_ty))
    else:
        tl.store(m_out_ptr + pid, m)
        tl.store(l_out_ptr + pid, l)


@triton.jit(do_not_specialize=("cols", "tiles"))
def split_finish_kernel(
    p, y_ptr, m_ptr, l_ptr, places, cols, tiles,
    OP: tl.constexpr, REDUCES: tl.constexpr, ACC: tl.constexpr, EXACT: tl.constexpr, ZERO: tl.constexpr,
    UNITS: tl.constexpr, VECTOR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # One program: the output for TILE columns of a row.
    # Chosen: with split_state_kernel, for operations that write every element.
    # Bytes: one read, one write; what the first launch read last is read first, while L2 still has it.
    # Limits: none on columns.
    pid = tl.num_programs(0).to(tl.int64) - 1 - tl.program_id(0)
    row = pid // tiles
    row_at = operands.first_elements(p, places, row, UNITS)
    y_row = row_offset(row, places.sizes, places.y, UNITS[1])
    cols = cols.to(tl.int64) * UNITS[2]
    head, length = body(row_at[0], cols, VECTOR)
    start = pid % tiles * TILE
    if REDUCES:
        m = tl.load(m_ptr + row)
        l = tl.load(l_ptr + row)
    else:
        m, l = operands.given(p, places, row, 0, None, ACC)
    at = operands.skip_head(p, places, row_at, head, VECTOR)
    y_body = y_ptr + (y_row + head) // VECTOR * VECTOR
    finish_tile(p, places, at, y_body, start, length, cols, m, l, OP, ACC, EXACT, ZERO, TILE)
    if VECTOR > 1 and start == 0:
        edge = load_edges(p, places, row_at, head, length, cols, OP, ACC, VECTOR)
        finish_edges(p, places, row_at, y_ptr + y_row, edge, head, length, cols, m, l, OP, ACC, EXACT, ZERO, VECTOR)


FINISH_TILE = 2048
"""Columns of a program of split_finish_kernel: it only copies and scales, and small blocks end evenly."""


def program(request: TritonRequest) -> Program:
    """The launches of `split` for a request: states, as many merges as it takes, finish."""
    plan, layout, places = request.plan, request.layout, request.places()
    op, per_row, reduces, acc, exact, zero = request.op_constants
    launches, scratch = _reduction(request) if reduces else ([], {})
    level = len(launches) - 1
    if not per_row:
        tiles = -(-layout.cols // FINISH_TILE)
        launches.append(
            Launch(
                split_finish_kernel,
                layout.rows * tiles,
                # Without a reduction there is no scratch: y stands where nothing is read.
                (request.pointers, "y", *((f"m{level}", f"l{level}") if reduces else ("y", "y"))),
                (places, request.cols_in_units, tiles),
                (op, reduces, acc, exact, zero, request.units, plan.vector, FINISH_TILE),
                8,
            )
        )
    return Program(launches, scratch)


def _reduction(request: TritonRequest) -> tuple[list[Launch], dict[str, tuple[int, str]]]:
    """The launches that leave one state for each row, and their scratch memory."""
    plan, layout, places = request.plan, request.layout, request.places()
    op, per_row, _, acc, exact, zero = request.op_constants
    # In float64 l rounds once for a row, however high the tree.
    l_dtype = "float64" if exact else "float32"

    def room(level: int, count: int) -> dict[str, tuple[int, str]]:
        return {
            f"m{level}": (layout.rows * count, request.task.accumulator),
            f"l{level}": (layout.rows * count, l_dtype),
        }

    tiles = -(-layout.cols // plan.block)
    scratch = room(0, plan.splits)
    launches = [
        Launch(
            split_state_kernel,
            plan.programs,
            (request.pointers, "m0", "l0"),
            (places, request.cols_in_units, -(-tiles // plan.splits), plan.splits),
            (op, acc, exact, zero, request.units, plan.vector, plan.blocks.depth, plan.block // plan.blocks.depth),
            plan.warps,
        )
    ]
    count, level = plan.splits, 0
    while count > 1 or level == 0:
        groups = -(-count // candidates.MERGE_FAN)
        fan = min(candidates.MERGE_FAN, triton.next_power_of_2(count))
        scratch |= room(level + 1, groups)
        launches.append(
            Launch(
                split_merge_kernel,
                layout.rows * groups,
                (f"m{level}", f"l{level}", f"m{level + 1}", f"l{level + 1}", "y"),
                (places, count, groups),
                (op, groups == 1, per_row, exact, request.units, fan),
                max(1, min(8, fan // 128)),
            )
        )
        count, level = groups, level + 1
    return launches, scratch
