"""Where the elements of a row lie, and how a long slice of one is visited tile by tile.

`looped` visits a whole row with these functions, `split` a slice of one.
"""

import triton
import triton.language as tl

from . import ops, state


@triton.jit
def row_offset(row, sizes, strides, UNIT: tl.constexpr):
    """Offset of the first element of each `row` (int64), counted through the outer dimensions.

    `sizes` and `strides` are tuples, the fastest dimension first; the slowest needs no size.  So
    no copy is made to bring a permuted, sliced or expanded tensor into rows.  Strides arrive in units: a product with UNIT
    tells the compiler how wide it may load.
    """
    offset = row * 0
    for i in tl.static_range(len(sizes)):
        offset += row % sizes[i] * strides[i]
        row = row // sizes[i]
    return (offset + row * strides[len(sizes)]) * UNIT


@triton.jit
def reduce_slice(x_ptr, start, stop, stride, ACC: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr):
    """The state of elements start to stop of the row at x_ptr.

    Each lane keeps a state of its own over the tiles, so the loop has no barrier; DEPTH elements
    of a lane share one rescaling of l, which makes exp, the scarce instruction, 1 + 2/DEPTH an
    element instead of 3.
    """
    m = tl.full([BLOCK], -float("inf"), ACC)
    l = tl.zeros([BLOCK], ACC)
    col = (tl.arange(0, DEPTH) * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    offs = col.to(tl.int64) * stride
    for first in range(start, stop, DEPTH * BLOCK):
        mask = col < stop - first
        # The tile will be read once more: ask L2 to keep it.
        x = tl.load(x_ptr + first * stride + offs, mask=mask, other=-float("inf"), eviction_policy="evict_last")
        m_tile, l_tile = state.of(x.to(ACC), 0)
        m, l = state.merge(m, l, m_tile, l_tile)
    return state.merge_all(m, l, 0)


@triton.jit
def finish_slice(
    x_ptr, y_ptr, start, stop, x_stride, y_stride, m, l,
    OP: tl.constexpr, ACC: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the operation's output for elements start to stop, newest first: L2 still holds those."""
    s = state.shift(m)
    t = ops.term(m, l, OP)
    col = tl.arange(0, TILE)
    x_offs = col.to(tl.int64) * x_stride
    y_offs = col.to(tl.int64) * y_stride
    tiles = tl.cdiv(stop - start, TILE)
    for i in range(tiles):
        first = start + (tiles - 1 - i) * TILE
        mask = col < stop - first
        # Neither is needed again: leave L2 to what is.
        x = tl.load(x_ptr + first * x_stride + x_offs, mask=mask, eviction_policy="evict_first")
        y = ops.finish(x.to(ACC), s, t, OP).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + first * y_stride + y_offs, y, mask=mask, eviction_policy="evict_first")
