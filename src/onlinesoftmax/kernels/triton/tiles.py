"""The columns and rows that a program owns, and how a long slice is read and written tile by tile.

An unaligned row has a head, a body and a tail.  The body begins and ends on 16-byte boundaries and moves with the
widest loads and stores; head and tail, the edges, move element by element.  Their states merge like any others.
"""

import triton
import triton.language as tl

from . import formulas, operands, state


@triton.jit
def body(offset, cols, VECTOR: tl.constexpr):
    """(head, length) of the row at `offset`: the column where its body begins, and the columns of the body.

    VECTOR is the number of elements in 16 bytes where rows are unaligned, and 1 where a whole row is body.  An
    unaligned row has at least 2 · VECTOR columns (Problem.peels_narrow), so it is never shorter than its head.
    """
    head = (VECTOR - offset % VECTOR) % VECTOR
    return head, (cols - head) // VECTOR * VECTOR


@triton.jit
def edges(i, head, length, cols, VECTOR: tl.constexpr):
    """Columns of head and tail for i from 0 to 2 · VECTOR - 1, and a mask of those that exist."""
    col = tl.where(i < VECTOR, i + head * 0, head + length + i - VECTOR)
    return col, tl.where(i < VECTOR, i < head, col < cols)


@triton.jit
def slice_bounds(i, slice_cols, length):
    """SliceBounds (start, count) of slice i of a body: its first column in the body, and its number of columns."""
    start = i * slice_cols
    return start, tl.maximum(tl.minimum(length - start, slice_cols), 0)


@triton.jit
def strip(pid, adjacent, ROWS: tl.constexpr):
    """(outer, inner, row_mask): the strip of up to ROWS of the `adjacent` rows side by side that program `pid` owns.

    `outer` counts the groups of adjacent rows, `inner` the rows in their group.
    """
    strips = tl.cdiv(adjacent, ROWS)
    inner = pid % strips * ROWS + tl.arange(0, ROWS)
    return pid // strips, inner, inner < adjacent


@triton.jit
def load_edges(p, places, at, head, length, cols, OP: tl.constexpr, VECTOR: tl.constexpr):
    """The elements of the head and the tail of the row at the offsets `at`, as `operands.load` returns them."""
    col, inside = edges(tl.arange(0, 2 * VECTOR), head, length, cols, VECTOR)
    return operands.load(p, places, at, col, inside, OP, "")


@triton.jit
def finish_edges(
    p, places, at, y_row, edge, head, length, cols, m, sums, row_values, OP: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """Write the output of the head and the tail; `edge` is the result of `load_edges`."""
    col, inside = edges(tl.arange(0, 2 * VECTOR), head, length, cols, VECTOR)
    constants = formulas.row_constants(m, sums, row_values, cols, OP)
    y = operands.compute_output(p, places, at, col, edge, constants, OP)
    tl.store(y_row + col, y.to(y_row.dtype.element_ty), mask=inside)


@triton.jit
def reduce_slice(p, places, at, length, OP: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr):
    """The state of `length` elements from the offsets `at` on.

    Each lane keeps its own state over the tiles, so the loop has no barrier.  DEPTH elements of a lane share one
    rescaling of l, so an element takes 1 + 2/DEPTH exp, the scarcest instruction, instead of 3.
    """
    m, sums = state.identity(BLOCK, OP)
    col = (tl.arange(0, DEPTH) * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    for first in range(0, length, DEPTH * BLOCK):
        # The tile may be read again, so L2 is asked to keep it.
        element = operands.load(
            p, places, operands.skip(p, places, at, first, OP), col, col < length - first, OP, "evict_last"
        )
        m_tile, sums_tile = formulas.reduce(element, 0, OP)
        m, sums = state.merge(m, sums, m_tile, sums_tile, OP)
    return state.merge_all(m, sums, 0, OP)


@triton.jit
def finish_tile(p, places, at, y_body, first, length, cols, m, sums, row_values, OP: tl.constexpr, TILE: tl.constexpr):
    """Write the output for TILE columns of a body of `length`, from the column `first` on; `at` is its beginning."""
    col = tl.arange(0, TILE)
    inside = col < length - first
    tile_at = operands.skip(p, places, at, first, OP)
    element = operands.load(p, places, tile_at, col, inside, OP, "evict_first")
    constants = formulas.row_constants(m, sums, row_values, cols, OP)
    y = operands.compute_output(p, places, tile_at, col, element, constants, OP)
    y_at = y_body + first * places.y.col + col.to(tl.int64) * places.y.col
    tl.store(y_at, y.to(y_body.dtype.element_ty), mask=inside, eviction_policy="evict_first")
