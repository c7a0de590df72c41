"""Strategy `split`: many programs share a row, in three launches: states, merge, finish.

The merge is a tree.  A program merges up to MERGE_FAN states, and the launch is repeated until one state is left for
each row.  Merging is associative, so the tree may have any height.
"""

import triton
import triton.language as tl

from ...planner.strategies import triton as proposals
from . import formulas, operands, state
from .launch import Launch, Program, TritonRequest
from .operands import row_offset
from .tiles import body, finish_edges, finish_tile, load_edges, reduce_slice, slice_bounds


@triton.jit(do_not_specialize=("cols", "slice_tiles", "splits"))
def split_state_kernel(
    p, states, places, cols, slice_tiles, splits,
    OP: tl.constexpr, UNITS: tl.constexpr, VECTOR: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program: the state of slice_tiles × DEPTH × BLOCK columns of a row; the first program also owns the edges.
    # Chosen: few rows: one program per row would not fill the GPU, or a row does not fit one program.
    # Bytes: one read; a slice writes its state, eight bytes for softmax in 16 bits.
    # Limits: none on columns.
    pid = tl.program_id(0).to(tl.int64)
    row_at = operands.rows_at(p, places, pid // splits, 0, None, OP, UNITS)
    cols = cols.to(tl.int64) * UNITS.cols
    head, length = body(row_at[0][0], cols, VECTOR)
    start, count = slice_bounds(pid % splits, slice_tiles * (DEPTH * BLOCK), length)
    at = operands.skip(p, places, operands.skip_head(p, places, row_at, head, OP, VECTOR), start, OP)
    m, sums = reduce_slice(p, places, at, count, OP, DEPTH, BLOCK)
    if VECTOR > 1 and start == 0:
        edge = load_edges(p, places, row_at, head, length, cols, OP, VECTOR)
        m_edge, sums_edge = formulas.reduce(edge, 0, OP)
        m, sums = state.merge(m, sums, m_edge, sums_edge, OP)
    store_state(states, pid, m, sums, OP)


@triton.jit
def store_state(states, i, m, sums, OP: tl.constexpr):
    """Write a state to scratch memory; `states` are pointers to m and to each sum."""
    tl.store(states[0] + i, m)
    for k in tl.static_range(len(OP.sums)):
        tl.store(states[1 + k] + i, sums[k])


@triton.jit
def load_sums(states, i, mask, OP: tl.constexpr):
    """The sums of states in scratch memory; those of an empty slice where `mask` is False; a mask of None loads all."""
    sums = ()
    for k in tl.static_range(len(OP.sums)):
        if mask is None:
            sums += (tl.load(states[1 + k] + i),)
        elif OP.kinds[k] == "key" or OP.kinds[k] == "index":
            _, empty = state.identity(i.shape[0], OP)
            sums += (tl.load(states[1 + k] + i, mask=mask, other=empty[k]),)
        else:
            sums += (tl.load(states[1 + k] + i, mask=mask, other=0.0),)
    return sums


@triton.jit(do_not_specialize=("count", "groups", "cols"))
def split_merge_kernel(
    p, states, merged, places, count, groups, cols,
    OP: tl.constexpr, UNITS: tl.constexpr, LAST: tl.constexpr, FAN: tl.constexpr,
):  # fmt: skip
    # One program: up to FAN of the `count` states of a row become one of its `groups` states.
    # Chosen: after split_state_kernel, as often as needed; the LAST launch writes the per-row outputs.
    # Bytes: one read of the states.
    # Limits: FAN is a power of two that fits registers.
    pid = tl.program_id(0).to(tl.int64)
    row = pid // groups
    i = pid % groups * FAN + tl.arange(0, FAN)
    m = tl.load(states[0] + row * count + i, mask=i < count, other=-float("inf"))
    sums = load_sums(states, row * count + i, i < count, OP)
    m, sums = state.merge_all(m, sums, 0, OP)
    if LAST:
        cols = cols.to(tl.int64) * UNITS.cols
        row_values = operands.row_operands(p, places, row, 0, None, cols, OP, UNITS)
        operands.store_row_outputs(p, places, row, 0, m, sums, row_values, cols, None, OP, UNITS)
    # The last state is kept only for the elements.
    if OP.writes_elements or not LAST:
        store_state(merged, pid, m, sums, OP)


@triton.jit(do_not_specialize=("cols", "tiles"))
def split_finish_kernel(
    p, states, places, cols, tiles,
    OP: tl.constexpr, UNITS: tl.constexpr, VECTOR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # One program: the output for TILE columns of a row; the first program of a row also owns the edges.
    # Chosen: after split_merge_kernel, for operations that write elements.
    # Bytes: one read, one write; the columns that the first launch read last come first, while L2 still holds them.
    # Limits: none on columns.
    pid = tl.num_programs(0).to(tl.int64) - 1 - tl.program_id(0)
    row = pid // tiles
    row_at = operands.rows_at(p, places, row, 0, None, OP, UNITS)
    y_row = row_offset(row, places.sizes, places.y, UNITS.y)
    cols = cols.to(tl.int64) * UNITS.cols
    row_values = operands.row_operands(p, places, row, 0, None, cols, OP, UNITS)
    if OP.target:
        row_at = operands.with_target(row_at, operands.target_of(row_values))
    head, length = body(row_at[0][0], cols, VECTOR)
    start = pid % tiles * TILE
    if len(OP.sums) > 0:
        m, sums = tl.load(states[0] + row), load_sums(states, row, None, OP)
    else:
        m, sums = operands.given_state(p, places, row, 0, None, OP)
    at = operands.skip_head(p, places, row_at, head, OP, VECTOR)
    y_body = p.y + (y_row + head) // VECTOR * VECTOR
    finish_tile(p, places, at, y_body, start, length, cols, m, sums, row_values, OP, TILE)
    if VECTOR > 1 and start == 0:
        edge = load_edges(p, places, row_at, head, length, cols, OP, VECTOR)
        finish_edges(p, places, row_at, p.y + y_row, edge, head, length, cols, m, sums, row_values, OP, VECTOR)


FINISH_TILE = 2048
"""Columns of a program of split_finish_kernel.  It reduces nothing.  Small programs finish at about the
same time."""


def program(request: TritonRequest) -> Program:
    """The launches of `split` for a request: states, as many merges as it takes, finish."""
    plan, task, op = request.plan, request.task, request.op_constants
    launches, scratch = _reduction(request) if op.sums else ([], {})
    # The merge launches follow the one that fills level 0.
    states = _names(request, len(launches) - 1) if op.sums else None
    if op.writes_elements:
        tiles = -(-task.cols // FINISH_TILE)
        launches.append(
            Launch(
                split_finish_kernel,
                task.rows * tiles,
                (request.pointers, states),
                (request.places(), request.cols_in_units, tiles),
                (op, request.units, plan.vector, FINISH_TILE),
                8,
            )
        )
    return Program(launches, scratch)


def _names(request: TritonRequest, level: int) -> tuple[str, ...]:
    """Names of the scratch memory of one level of the tree: of m and of each sum."""
    return (f"m{level}", *(f"{name}{level}" for name in request.op_constants.sums))


def _reduction(request: TritonRequest) -> tuple[list[Launch], dict[str, tuple[int, str]]]:
    """The launches that leave one state for each row, and their scratch memory."""
    plan, task, places, op = request.plan, request.task, request.places(), request.op_constants
    # In float64 a sum is rounded once per row, whatever the height of the tree.
    sum_dtype, accumulator = "float64" if op.exact else "float32", task.accumulator
    integers = {"key": "int64" if accumulator == "float64" else "int32", "index": "int64"}
    dtypes = [accumulator, *(integers.get(kind, sum_dtype) for kind in op.kinds)]

    def room(level: int, count: int) -> dict[str, tuple[int, str]]:
        parts = zip(_names(request, level), dtypes, strict=True)
        return {name: (task.rows * count, dtype) for name, dtype in parts}

    tiles = -(-task.cols // plan.block)
    scratch = room(0, plan.splits)
    launches = [
        Launch(
            split_state_kernel,
            plan.programs,
            (request.pointers, _names(request, 0)),
            (places, request.cols_in_units, -(-tiles // plan.splits), plan.splits),
            (op, request.units, plan.vector, plan.depth, plan.block // plan.depth),
            plan.warps,
        )
    ]
    count, level = plan.splits, 0
    while count > 1 or level == 0:
        groups = -(-count // proposals.MERGE_FAN)
        fan = min(proposals.MERGE_FAN, triton.next_power_of_2(count))
        scratch |= room(level + 1, groups)
        launches.append(
            Launch(
                split_merge_kernel,
                task.rows * groups,
                (request.pointers, _names(request, level), _names(request, level + 1)),
                (places, count, groups, request.cols_in_units),
                (op, request.units, groups == 1, fan),
                max(1, min(8, fan // 128)),
            )
        )
        count, level = groups, level + 1
    return launches, scratch
