"""Strategy `row`: a program holds whole rows on chip."""

import triton
import triton.language as tl

from . import operands, ops
from .launch import Launch, Program, TritonRequest
from .operands import row_offset
from .tiles import body, edges


@triton.jit(do_not_specialize=("rows", "cols"))
def row_kernel(
    p, y_ptr, places, rows, cols,
    OP: tl.constexpr, PER_ROW: tl.constexpr, REDUCES: tl.constexpr, ACC: tl.constexpr, EXACT: tl.constexpr,
    ZERO: tl.constexpr, UNITS: tl.constexpr,
    VECTOR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # One program: a tile of ROWS rows, all of their columns in registers; with STAGES, one tile after another.
    # Chosen: whenever the row fits registers.
    # Bytes: one read, one write.
    # Limits: COLS is a power of two; ROWS × COLS elements must fit the registers of one block.
    if STAGES == 0:
        one_tile(
            p, y_ptr, places, tl.program_id(0), rows, cols,
            OP, PER_ROW, REDUCES, ACC, EXACT, ZERO, UNITS, VECTOR, ROWS, COLS, EVEN,
        )  # fmt: skip
    else:
        # One block fills the multiprocessor: the next tiles must travel while this one is reduced.
        for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
            one_tile(
                p, y_ptr, places, tile, rows, cols,
                OP, PER_ROW, REDUCES, ACC, EXACT, ZERO, UNITS, VECTOR, ROWS, COLS, EVEN,
            )  # fmt: skip


@triton.jit
def one_tile(
    p, y_ptr, places, tile, rows, cols,
    OP: tl.constexpr, PER_ROW: tl.constexpr, REDUCES: tl.constexpr, ACC: tl.constexpr, EXACT: tl.constexpr,
    ZERO: tl.constexpr, UNITS: tl.constexpr,
    VECTOR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = row < rows
    at = operands.first_elements(p, places, row[:, None], UNITS)
    y_row = row_offset(row, places.sizes, places.y, UNITS[1])
    y_body = y_row
    cols = cols * UNITS[2]
    col = tl.arange(0, COLS)
    inside = row_mask[:, None]
    if VECTOR > 1:
        # Rows begin anywhere: each has its own head, and a body where all rows load alike.
        head, length = body(row_offset(row, places.sizes, places.x, UNITS[0]), cols, VECTOR)
        at = operands.skip_head(p, places, at, head[:, None], VECTOR)
        y_body = (y_row + head) // VECTOR * VECTOR
        inside = inside & (col[None, :] < length.to(tl.int32)[:, None])
        # The edges' tile stands on end: lying like x's it would be given x's layout, which is made for
        # long rows, and every element of it to many threads at once.
        i = tl.arange(0, 2 * VECTOR)[:, None]
        edge, edge_inside = edges(i, head[None, :], length[None, :], cols, VECTOR)
        edge_inside = edge_inside & row_mask[None, :]
        edge_at = operands.first_elements(p, places, row[None, :], UNITS)
        a_edge, b_edge, counts_edge = operands.load(p, places, edge_at, edge, edge_inside, OP, ACC, "")
    elif not EVEN:
        inside = inside & (col < cols)[None, :]

    a, b, counts = operands.load(p, places, at, col[None, :], inside, OP, ACC, "")
    if not REDUCES:
        m, l = operands.given(p, places, row, 0, row_mask, ACC)
    elif VECTOR > 1:
        m, l = ops.reduce_both(a, b, 1, a_edge, b_edge, 0, OP, EXACT, ZERO)
    else:
        m, l = ops.reduce(a, b, 1, OP, EXACT, ZERO)

    if PER_ROW:
        tl.store(y_ptr + y_row, ops.result(m, l).to(y_ptr.dtype.element_ty), mask=row_mask)
    else:
        s, l, t = ops.term(m, l, cols, OP, ZERO)
        y = operands.finish(
            p, places, at, col[None, :], a, b, counts, s[:, None], l[:, None], t[:, None], OP, ACC, EXACT, ZERO
        )
        y_at = y_ptr + y_body[:, None] + (col.to(tl.int64) * places.y.col)[None, :]
        tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=inside)
        if VECTOR > 1:
            y = operands.finish(
                p, places, edge_at, edge, a_edge, b_edge, counts_edge, s[None, :], l[None, :], t[None, :],
                OP, ACC, EXACT, ZERO,
            )  # fmt: skip
            tl.store(y_ptr + y_row[None, :] + edge, y.to(y_ptr.dtype.element_ty), mask=edge_inside)


def program(request: TritonRequest) -> Program:
    """The launch of `row` for a request."""
    plan, layout = request.plan, request.layout
    launch = Launch(
        row_kernel,
        plan.programs,
        (request.pointers, "y"),
        (request.places(), layout.rows, request.cols_in_units),
        (
            *request.op_constants, request.units,
            plan.vector, plan.rows_per_program, plan.block, plan.block == layout.cols, plan.blocks.stages,
        ),
        plan.warps,
    )  # fmt: skip
    return Program([launch])
