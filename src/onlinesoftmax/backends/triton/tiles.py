"""Where the elements of a row lie, and how a long slice of one is visited tile by tile.

Rows that begin anywhere in memory are cut into head, body and tail: the body begins and ends on
16-byte boundaries and is moved with the widest loads and stores, the edges element by element.
Their states merge as those of any other slices.
"""

import triton
import triton.language as tl

from . import ops, state


@triton.jit
def row_offset(row, sizes, strides, UNIT: tl.constexpr):
    """Offset of the first element of each `row` (int64), counted through the outer dimensions.

    `sizes` and `strides` are tuples, the fastest dimension first; the slowest needs no size.  So
    no copy is made to bring a permuted, sliced or expanded tensor into rows.  Strides arrive in
    units: a product with UNIT tells the compiler how wide it may load.
    """
    offset = row * 0
    for i in tl.static_range(len(sizes)):
        offset += row % sizes[i] * strides[i]
        row = row // sizes[i]
    return (offset + row * strides[len(sizes)]) * UNIT


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
def load_edges(x_row, head, length, cols, VECTOR: tl.constexpr):
    """The elements of the head and the tail, -inf where there are none."""
    col, mask = edges(tl.arange(0, 2 * VECTOR), head, length, cols, VECTOR)
    return tl.load(x_row + col, mask=mask, other=-float("inf"))


@triton.jit
def finish_edges(x, y_row, head, length, cols, m, l, OP: tl.constexpr, EXACT: tl.constexpr, VECTOR: tl.constexpr):
    """Write the operation's output for the head and the tail, x as `load_edges` gave it."""
    col, mask = edges(tl.arange(0, 2 * VECTOR), head, length, cols, VECTOR)
    y = ops.finish(x, state.shift(m), l, ops.term(m, l, OP), OP, EXACT)
    tl.store(y_row + col, y.to(y_row.dtype.element_ty), mask=mask)


@triton.jit
def reduce_slice(
    x_ptr, length, stride, ACC: tl.constexpr, EXACT: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr
):
    """The state of `length` elements from x_ptr on.

    Each lane keeps a state of its own over the tiles, so the loop has no barrier; DEPTH elements
    of a lane share one rescaling of l, which makes exp, the scarce instruction, 1 + 2/DEPTH an
    element instead of 3.
    """
    m = tl.full([BLOCK], -float("inf"), ACC)
    l = tl.zeros([BLOCK], ACC)
    col = (tl.arange(0, DEPTH) * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    offs = col.to(tl.int64) * stride
    for first in range(0, length, DEPTH * BLOCK):
        # The tile will be read once more: ask L2 to keep it.
        x = tl.load(
            x_ptr + first * stride + offs, mask=col < length - first, other=-float("inf"), eviction_policy="evict_last"
        )
        m_tile, l_tile = state.of(x.to(ACC), 0, EXACT)
        m, l = state.merge(m, l, m_tile, l_tile, EXACT)
    return state.merge_all(m, l, 0, EXACT)


@triton.jit
def finish_tile(
    x_ptr, y_ptr, left, x_stride, y_stride, m, l,
    OP: tl.constexpr, ACC: tl.constexpr, EXACT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the operation's output for the `left` elements, at most TILE, from x_ptr on."""
    col = tl.arange(0, TILE)
    mask = col < left
    x = tl.load(x_ptr + col.to(tl.int64) * x_stride, mask=mask, eviction_policy="evict_first").to(ACC)
    y = ops.finish(x, state.shift(m), l, ops.term(m, l, OP), OP, EXACT)
    tl.store(
        y_ptr + col.to(tl.int64) * y_stride, y.to(y_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first"
    )
