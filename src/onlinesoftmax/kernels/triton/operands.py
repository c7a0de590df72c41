"""What a kernel reads: the tensors, where their rows lie, and the elements as an operation wants them.

An operation is given two numbers for a column, (a, b): the score of a logit and nothing beside it, or
for a gradient the saved output and dy.  Scale, softcap, bias and masks happen here, at load; so no
strategy knows of them, and what is not asked for is None and costs nothing.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import ops


class Pointers(NamedTuple):
    """Tensors and numbers, or None.

    Attributes:
        x: Logits; for a gradient, the saved output of softmax or log_softmax.
        dy: Gradient of the output; one number a row for logsumexp.
        bias, mask: Added to the scores; False where a score does not count.
        logits: The logits again, where a gradient goes through a softcap.
        lse: The saved output of logsumexp.
        scale, softcap: Bits of a float64, so that every dtype gets the whole number; or, for the
            scale, a tensor of one element.
    """

    x: Any
    dy: Any = None
    bias: Any = None
    mask: Any = None
    logits: Any = None
    lse: Any = None
    scale: Any = None
    softcap: Any = None


class Place(NamedTuple):
    """Where a tensor's rows lie.

    Attributes:
        strides: Of the outer dimensions, the fastest first, in units; of all but the fastest for `column`.
        col: From an element of a row to the next.
        near: For `column`, from a row to the next; else 0, as Triton cannot look at a tuple with a None in it.
    """

    strides: tuple[int, ...]
    col: int
    near: int = 0


class Places(NamedTuple):
    """The `Place` of each of the Pointers, of the output y, and of the query's position for causal masks.

    Attributes:
        sizes: Of the outer dimensions, without the slowest.
        diagonal: Column q + diagonal - 1 is the last that query q attends to; None where causality is not asked for.
    """

    sizes: tuple[int, ...]
    x: Any
    y: Any
    dy: Any = None
    bias: Any = None
    mask: Any = None
    logits: Any = None
    lse: Any = None
    query: Any = None
    diagonal: Any = None
    # Triton 3.6 forgets the constants of nested tuples at the next loop, unless one of this tuple follows them.
    last: None = None


@triton.jit
def row_offset(row, sizes, place, UNIT: tl.constexpr):
    """Offset of the first element of each `row` (int64), counted through the outer dimensions.

    So no copy is made to bring a permuted, sliced or expanded tensor into rows.  Strides arrive in
    units: a product with UNIT tells the compiler how wide it may load.
    """
    offset = row * 0
    for i in tl.static_range(len(sizes)):
        offset += row % sizes[i] * place.strides[i]
        row = row // sizes[i]
    return (offset + row * place.strides[len(sizes)]) * UNIT


@triton.jit
def first_elements(p, places, row, UNITS: tl.constexpr):
    """Offsets of the first element of each `row` in x, dy, bias, mask, logits; and how many columns causality keeps."""
    x = row_offset(row, places.sizes, places.x, UNITS[0])
    # What is absent is given what is there already: nothing will read it.
    dy, bias, mask, logits, kept = x, x, x, x, x
    if p.dy is not None:
        dy = row_offset(row, places.sizes, places.dy, UNITS[3])
    if p.bias is not None:
        bias = row_offset(row, places.sizes, places.bias, UNITS[4])
    if p.mask is not None:
        mask = row_offset(row, places.sizes, places.mask, UNITS[5])
    if p.logits is not None:
        logits = row_offset(row, places.sizes, places.logits, UNITS[6])
    if places.diagonal is not None:
        kept = row_offset(row, places.sizes, places.query, 1) + places.diagonal
    return x, dy, bias, mask, logits, kept


@triton.jit
def skip_head(p, places, at, head, VECTOR: tl.constexpr):
    """The same places, `head` columns on: x and dy are there on 16-byte boundaries, and the compiler may know."""
    x, dy, bias, mask, logits, kept = skip(p, places, at, head)
    if VECTOR > 1:
        x = x // VECTOR * VECTOR
        dy = dy // VECTOR * VECTOR
    return x, dy, bias, mask, logits, kept


@triton.jit
def skip(p, places, at, cols):
    """The same places, `cols` columns on."""
    x, dy, bias, mask, logits, kept = at
    x += cols * places.x.col
    if p.dy is not None:
        dy += cols * places.dy.col
    if p.bias is not None:
        bias += cols * places.bias.col
    if p.mask is not None:
        mask += cols * places.mask.col
    if p.logits is not None:
        logits += cols * places.logits.col
    return x, dy, bias, mask, logits, kept - cols


@triton.jit
def beside(p, places, at, rows):
    """The same places, `rows` rows on, where rows lie side by side."""
    x, dy, bias, mask, logits, kept = at
    x += rows * places.x.near
    if p.dy is not None:
        dy += rows * places.dy.near
    if p.bias is not None:
        bias += rows * places.bias.near
    if p.mask is not None:
        mask += rows * places.mask.near
    if p.logits is not None:
        logits += rows * places.logits.near
    if places.diagonal is not None:
        kept += rows * places.query.near
    return x, dy, bias, mask, logits, kept


@triton.jit
def load(p, places, at, col, inside, OP: tl.constexpr, ACC: tl.constexpr, POLICY: tl.constexpr):
    """(a, b, counts) of the columns `col`, int32, from the places `at` on: of those that are `inside`."""
    x_at, dy_at, bias_at, mask_at, _, kept = at
    wide = col.to(tl.int64)
    counts = inside
    if places.diagonal is not None:
        counts = counts & (col < kept)
    if OP == "softmax_backward" or OP == "log_softmax_backward":
        a = tl.load(p.x + x_at + wide * places.x.col, mask=inside, other=0.0, eviction_policy=POLICY).to(ACC)
        b = tl.load(p.dy + dy_at + wide * places.dy.col, mask=inside, other=0.0, eviction_policy=POLICY).to(ACC)
        if p.mask is not None:
            counts = counts & tl.load(p.mask + mask_at + wide * places.mask.col, mask=counts, other=0).to(tl.int1)
    else:
        a = tl.load(p.x + x_at + wide * places.x.col, mask=counts, other=-float("inf"), eviction_policy=POLICY).to(ACC)
        a = ops.score(a, p.scale, p.softcap, ACC)
        if p.bias is not None:
            a += tl.load(p.bias + bias_at + wide * places.bias.col, mask=counts, other=0.0).to(ACC)
        if p.mask is not None:
            counts = counts & tl.load(p.mask + mask_at + wide * places.mask.col, mask=counts, other=0).to(tl.int1)
        if p.scale is not None or p.softcap is not None or p.mask is not None:
            # -inf does not survive a softcap or a negative scale.
            a = tl.where(counts, a, -float("inf"))
        b = a
    return a, b, counts


@triton.jit
def finish(
    p, places, at, col, a, b, counts, s, l, t, OP: tl.constexpr, ACC: tl.constexpr, EXACT: tl.constexpr,
    ZERO: tl.constexpr,
):  # fmt: skip
    """The output for (a, b), given the row's s, l and t as ops.term describes them."""
    y = ops.finish(a, b, s, l, t, OP, EXACT, ZERO)
    if OP == "log_softmax_backward" and (p.mask is not None or places.diagonal is not None):
        y = tl.where(counts, y, 0.0)
    if OP == "softmax_backward" or OP == "log_softmax_backward" or OP == "logsumexp_backward":
        if p.softcap is not None:
            x = tl.load(p.logits + at[4] + col.to(tl.int64) * places.logits.col, mask=counts, other=0.0).to(ACC)
            y *= ops.softcap_slope(x, p.scale, p.softcap, ACC)
        if p.scale is not None:
            y *= ops.number(p.scale, ACC)
    return y


@triton.jit
def given(p, places, row, near, mask, ACC: tl.constexpr):
    """What the gradient of logsumexp is given for a row in place of (m, l): its lse and its dy."""
    lse_at = row_offset(row, places.sizes, places.lse, 1) + near * places.lse.near
    dy_at = row_offset(row, places.sizes, places.dy, 1) + near * places.dy.near
    return tl.load(p.lse + lse_at, mask=mask).to(ACC), tl.load(p.dy + dy_at, mask=mask).to(ACC)
