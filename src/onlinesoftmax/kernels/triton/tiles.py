"""How a long slice of a row is visited tile by tile, and what is done with rows that begin anywhere in memory.

Those are cut into head, body and tail: the body begins and ends on 16-byte boundaries and is moved
with the widest loads and stores, the edges element by element.  Their states merge as those of any
other slices.
"""

import triton
import triton.language as tl

from . import operands, ops


@triton.jit
def body(offset, cols, VECTOR: tl.constexpr):
    """(head, length) of a row at `offset`: where its body begins, and how long it is.

    VECTOR is the elements of 16 bytes where rows begin anywhere, and 1 where all of a row is body.
    """
    head = (VECTOR - offset % VECTOR) % VECTOR
    return head, (cols - head) // VECTOR * VECTOR


@triton.jit
def edges(i, head, length, cols, VECTOR: tl.constexpr):
    """Columns of the head and the tail, for i from 0 to 2 · VECTOR, and which of them there are."""
    col = tl.where(i < VECTOR, i + head * 0, head + length + i - VECTOR)
    return col, tl.where(i < VECTOR, i < head, col < cols)


@triton.jit
def load_edges(p, places, at, head, length, cols, OP: tl.constexpr, ACC: tl.constexpr, VECTOR: tl.constexpr):
    """(a, b, counts) of the head and the tail of a row that begins at `at`."""
    col, inside = edges(tl.arange(0, 2 * VECTOR), head, length, cols, VECTOR)
    return operands.load(p, places, at, col, inside, OP, ACC, "")


@triton.jit
def finish_edges(
    p, places, at, y_row, edge, head, length, cols, m, l,
    OP: tl.constexpr, ACC: tl.constexpr, EXACT: tl.constexpr, ZERO: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Write the operation's output for the head and the tail, `edge` as `load_edges` gave it."""
    a, b, counts = edge
    col, inside = edges(tl.arange(0, 2 * VECTOR), head, length, cols, VECTOR)
    s, l, t = ops.term(m, l, cols, OP, ZERO)
    y = operands.finish(p, places, at, col, a, b, counts, s, l, t, OP, ACC, EXACT, ZERO)
    tl.store(y_row + col, y.to(y_row.dtype.element_ty), mask=inside)


@triton.jit
def reduce_slice(
    p, places, at, length, OP: tl.constexpr, ACC: tl.constexpr, EXACT: tl.constexpr, ZERO: tl.constexpr,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The state of `length` elements from the places `at` on.

    Each lane keeps a state of its own over the tiles, so the loop has no barrier; DEPTH elements
    of a lane share one rescaling of l, which makes exp, the scarce instruction, 1 + 2/DEPTH an
    element instead of 3.
    """
    m = tl.full([BLOCK], -float("inf"), ACC)
    if EXACT and (OP == "softmax_backward" or OP == "log_softmax_backward"):
        l = tl.zeros([BLOCK], tl.float64)
    else:
        l = tl.zeros([BLOCK], ACC)
    col = (tl.arange(0, DEPTH) * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    for first in range(0, length, DEPTH * BLOCK):
        # The tile will be read once more: ask L2 to keep it.
        a, b, _ = operands.load(
            p, places, operands.skip(p, places, at, first), col, col < length - first, OP, ACC, "evict_last"
        )
        m_tile, l_tile = ops.reduce(a, b, 0, OP, EXACT, ZERO)
        m, l = ops.merge(m, l, m_tile, l_tile, OP, EXACT)
    return ops.merge_all(m, l, 0, OP, EXACT)


@triton.jit
def finish_tile(
    p, places, at, y_body, first, length, cols, m, l,
    OP: tl.constexpr, ACC: tl.constexpr, EXACT: tl.constexpr, ZERO: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the operation's output for TILE of `length` elements, from the `first` after the places `at` on."""
    col = tl.arange(0, TILE)
    inside = col < length - first
    tile_at = operands.skip(p, places, at, first)
    a, b, counts = operands.load(p, places, tile_at, col, inside, OP, ACC, "evict_first")
    s, l, t = ops.term(m, l, cols, OP, ZERO)
    y = operands.finish(p, places, tile_at, col, a, b, counts, s, l, t, OP, ACC, EXACT, ZERO)
    y_at = y_body + first * places.y.col + col.to(tl.int64) * places.y.col
    tl.store(y_at, y.to(y_body.dtype.element_ty), mask=inside, eviction_policy="evict_first")
