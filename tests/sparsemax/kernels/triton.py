"""Sparsemax and its gradient: a program holds whole rows, and finds the tau of each by bisection."""

import triton
import triton.language as tl

from onlinesoftmax.kernels.triton import operands
from onlinesoftmax.kernels.triton.launch import Launch, Program, TritonRequest


@triton.jit
def projected(z, OP: tl.constexpr, STEPS: tl.constexpr):
    """The sparsemax of each row of scores."""
    m = tl.max(z, 1, keep_dims=True)
    w = z - m
    low = tl.zeros_like(m) - 1.0
    high = tl.zeros_like(m)
    for _ in range(STEPS):
        tau = (low + high) * 0.5
        sums_to_more = tl.sum(tl.where(w > tau, w - tau, 0.0), 1, keep_dims=True) > 1.0
        low = tl.where(sums_to_more, tau, low)
        high = tl.where(sums_to_more, high, tau)
    if OP.exact:
        # The last sum may cancel all but the last places.
        w = w.to(tl.float64)
    count = tl.sum((w > low).to(w.dtype), 1, keep_dims=True)
    tau = (tl.sum(tl.where(w > low, w, 0.0), 1, keep_dims=True) - 1.0) / count
    y = tl.where(w > tau, w - tau, 0.0)
    # The maximum of Triton passes over NaN.
    undefined = (tl.sum((z != z).to(tl.int32), 1, keep_dims=True) > 0) | (m == float("inf"))
    if not OP.zero:
        undefined = undefined | (m == -float("inf"))
    return tl.where(undefined, float("nan"), y)


@triton.jit
def gradient(y, dy, OP: tl.constexpr):
    """The gradient in the scores of each row, from the saved output and its gradient."""
    wide = dy
    if OP.exact:
        wide = dy.to(tl.float64)
    support = y > 0.0
    mean = tl.sum(tl.where(support, wide, 0.0), 1, keep_dims=True) / tl.sum(support.to(dy.dtype), 1, keep_dims=True)
    return tl.where(support, wide - mean, 0.0 * y)


@triton.jit(do_not_specialize=("rows", "cols"))
def sparsemax_kernel(
    p, places, rows, cols,
    OP: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    # One program: ROWS rows, with all of their columns in registers.
    # Chosen: where a row fits registers.
    # Bytes: one read, one write.
    # Limits: COLS is a power of two; a mean of the support needs no more accuracy than one sum.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = row < rows
    at = operands.rows_at(p, places, row[:, None], 0, row_mask[:, None], OP, UNITS)
    col = tl.arange(0, COLS)[None, :]
    inside = row_mask[:, None] & (col < cols * UNITS.cols)
    element = operands.load(p, places, at, col, inside, OP, "")
    if OP.scores:
        y = projected(element[0], OP, STEPS)
    else:
        y = gradient(element[0], element[1], OP)
        y = operands.through_score(p, places, at, col, element, y, OP)
    y_row = operands.row_offset(row, places.sizes, places.y, UNITS.y)
    tl.store(p.y + y_row[:, None] + col.to(tl.int64) * places.y.col, y.to(p.y.dtype.element_ty), mask=inside)


def program(request: TritonRequest) -> Program:
    """The launch for a request."""
    plan, task = request.plan, request.task
    constants = (request.op_constants, request.units, plan.rows_per_program, plan.block)
    launch = Launch(
        sparsemax_kernel, plan.programs, (request.pointers,), (request.places(), task.rows, request.cols_in_units),
        (*constants, 55 if task.accumulator == "float64" else 30), plan.warps,
    )  # fmt: skip
    return Program([launch])
