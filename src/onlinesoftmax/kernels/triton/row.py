"""Strategy `row`: a program holds whole rows on chip."""

import triton
import triton.language as tl

from . import formulas, operands
from .launch import Launch, Program, TritonRequest
from .operands import row_offset
from .tiles import body, edges


@triton.jit(do_not_specialize=("rows", "cols"))
def row_kernel(
    p, places, rows, cols,
    OP: tl.constexpr, UNITS: tl.constexpr, VECTOR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # One program: a tile of ROWS rows, with all of their columns in registers; with STAGES, one tile after another.
    # Chosen: whenever the row fits registers.
    # Bytes: one read, one write.
    # Limits: COLS is a power of two; ROWS × COLS elements must fit the registers of one block.
    if STAGES == 0:
        one_tile(p, places, tl.program_id(0), rows, cols, OP, UNITS, VECTOR, ROWS, COLS, EVEN)
    else:
        # One block fills the multiprocessor, so the next tiles must be loaded while this one is reduced.
        for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
            one_tile(p, places, tile, rows, cols, OP, UNITS, VECTOR, ROWS, COLS, EVEN)


@triton.jit
def one_tile(
    p, places, tile, rows, cols,
    OP: tl.constexpr, UNITS: tl.constexpr, VECTOR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Read, reduce and write one tile of rows."""
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = row < rows
    at = operands.rows_at(p, places, row[:, None], 0, row_mask[:, None], OP, UNITS)
    y_row = row
    if OP.writes_elements:
        y_row = row_offset(row, places.sizes, places.y, UNITS.y)
    cols = cols * UNITS.cols
    row_values = operands.row_operands(p, places, row, 0, row_mask, cols, OP, UNITS)
    if OP.target:
        at = operands.with_target(at, operands.target_of(row_values)[:, None])
    col = tl.arange(0, COLS)
    inside = row_mask[:, None]
    y_body = y_row
    if VECTOR > 1:
        # Rows are unaligned: each has its own head, and a body in which the loads of all rows are alike.
        head, length = body(row_offset(row, places.sizes, places.x, UNITS.x), cols, VECTOR)
        at = operands.skip_head(p, places, at, head[:, None], OP, VECTOR)
        y_body = (y_row + head) // VECTOR * VECTOR
        inside = inside & (col[None, :] < length.to(tl.int32)[:, None])
        # The edges have rows along the second axis.  Along the first they would get the layout of x, which is made
        # for long rows and gives every element of the edges to many threads at once.
        i = tl.arange(0, 2 * VECTOR)[:, None]
        edge_col, edge_inside = edges(i, head[None, :], length[None, :], cols, VECTOR)
        edge_inside = edge_inside & row_mask[None, :]
        edge_at = operands.rows_at(p, places, row[None, :], 0, row_mask[None, :], OP, UNITS)
        if OP.target:
            edge_at = operands.with_target(edge_at, operands.target_of(row_values)[None, :])
        edge = operands.load(p, places, edge_at, edge_col, edge_inside, OP, "")
    elif not EVEN:
        inside = inside & (col < cols)[None, :]

    element = operands.load(p, places, at, col[None, :], inside, OP, "")
    if len(OP.sums) == 0:
        m, sums = operands.given_state(p, places, row, 0, row_mask, OP)
    elif VECTOR > 1:
        m, sums = formulas.reduce_both(element, 1, edge, 0, OP)
    else:
        m, sums = formulas.reduce(element, 1, OP)

    operands.store_row_outputs(p, places, row, 0, m, sums, row_values, cols, row_mask, OP, UNITS)
    if OP.writes_elements:
        constants = formulas.row_constants(m, sums, row_values, cols, OP)
        y = operands.compute_output(p, places, at, col[None, :], element, operands.expand(constants, 1), OP)
        y_at = p.y + y_body[:, None] + (col.to(tl.int64) * places.y.col)[None, :]
        tl.store(y_at, y.to(p.y.dtype.element_ty), mask=inside)
        if VECTOR > 1:
            y = operands.compute_output(p, places, edge_at, edge_col, edge, operands.expand(constants, 0), OP)
            tl.store(p.y + y_row[None, :] + edge_col, y.to(p.y.dtype.element_ty), mask=edge_inside)


def program(request: TritonRequest) -> Program:
    """The launch of `row` for a request."""
    plan, task = request.plan, request.task
    launch = Launch(
        row_kernel,
        plan.programs,
        (request.pointers,),
        (request.places(), task.rows, request.cols_in_units),
        (
            request.op_constants, request.units, plan.vector, plan.rows_per_program, plan.block,
            plan.block == task.cols, plan.stages,
        ),
        plan.warps,
    )  # fmt: skip
    return Program([launch])
