"""The tensors of a launch: where their rows lie, how they are loaded, and how elements and per-row outputs are stored.

An operation reads two numbers per column, (a, b): (score, class weight), or (saved output, dy) where OP.scores is
False.  It may also read numbers per row, which `row_operands` loads.
Scale, softcap, bias and masks are applied while loading, so strategies do not know them.  An absent operand or
output is None and costs nothing.
"""

from collections import namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...core.options import SCORE_OPTIONS
from ...ops import OPERATIONS
from . import formulas, state

OPERANDS = tuple(operand for operation in OPERATIONS.values() for operand in operation.operands)

NUMBERS = tuple(
    dict.fromkeys(
        (
            *(name for name, option in SCORE_OPTIONS.items() if option.kind == "call"),
            *(operand.name for operand in OPERANDS if operand.kind == "call"),
        )
    )
)
"""Score options and operands that are one number per call."""

TENSORS = tuple(
    dict.fromkeys(
        (
            "x",
            "y",
            *(operand.name for operand in OPERANDS if operand.kind != "call"),
            *(name for name, option in SCORE_OPTIONS.items() if option.tensor),
            # The logits of a gradient, at which the slope of the softcap is taken.
            "logits",
            *(output.name for operation in OPERATIONS.values() for output in operation.outputs),
        )
    )
)
"""Names of the tensors that have rows, operands and outputs of all operations; x and y first."""

READ_FIELDS = tuple(TENSORS.index(name) for name in ("x", "dy", "bias", "mask", "logits", "weight"))
"""Positions of the tensors that are read element by element, in the order of the offsets of `rows_at`."""

# Type checkers read only the fields of a namedtuple that are written out.
_tuple_of: Callable[..., Any] = namedtuple

Pointers: Any = _tuple_of("Pointers", (*TENSORS, *NUMBERS), defaults=(None,) * len(TENSORS + NUMBERS))
"""The tensors and numbers of a launch, each None where absent.

A number is the bits of a float64, so that every dtype gets its full precision.  The scale is one, or a tensor.
"""

Units: Any = _tuple_of("Units", (*TENSORS, "cols"), defaults=(1,) * len((*TENSORS, "cols")))
"""For each tensor, the power of two that divides its row strides; `cols` divides the row length.

Strides are passed as multiples of a unit.  The product with the unit, a constant, tells the compiler how wide it may
load.
"""

# Triton 3.6 forgets the constants of nested tuples at the next loop, unless a constant of the outer tuple follows them.
Places: Any = _tuple_of(
    "Places", (*TENSORS, "query", "sizes", "diagonal", "last"), defaults=(None,) * (len(TENSORS) + 4)
)
"""The `Place` of each tensor, in the order of Pointers, and of the query's position; the outer sizes, the diagonal, and
`last`, a constant that works around a Triton 3.6 bug.

sizes: Sizes of the outer dimensions, without the slowest.
diagonal: Column q + diagonal - 1 is the last that query q sees; None without a causal mask.
"""


class Place(NamedTuple):
    """The strides of one tensor, from which the offset of each row and element is computed.

    Attributes:
        strides: Strides of the outer dimensions, the fastest first, in units; without the fastest for `column`.
        col: Distance from an element of a row to the next; 0 where a row has one value.
        adjacent_stride: Distance from a row to the next for `column`; else 0, as Triton cannot read a tuple with a
            None in it.
    """

    strides: tuple[int, ...]
    col: int
    adjacent_stride: int = 0


@triton.jit
def row_offset(row, sizes, place, UNIT: tl.constexpr):
    """Offset of the first element of each `row` (int64), computed from its index in each outer dimension.

    A permuted, sliced or expanded tensor is therefore read in place, without a copy.
    """
    offset = row * 0
    for i in tl.static_range(len(sizes)):
        offset += row % sizes[i] * place.strides[i]
        row = row // sizes[i]
    return (offset + row * place.strides[len(sizes)]) * UNIT


@triton.jit
def rows_at(p, places, row, inner, row_mask, OP: tl.constexpr, UNITS: tl.constexpr):
    """Where rows begin: (offsets, first, seen, target, scale).

    offsets   of each row's first element in the tensors of OP.read_fields
    first     the column of this element, 0
    seen      the number of columns that the row's query sees
    target    its target column, which `with_target` sets
    scale     its scale, if the scale is a tensor

    `row` counts the rows that do not lie side by side, `inner` those that do.
    """
    x = row_offset(row, places.sizes, places.x, UNITS.x) + inner * places.x.adjacent_stride
    offsets = (x,)
    for i in tl.static_range(1, len(OP.read_fields)):
        # An absent tensor gets the offset of x, which is never used.
        offset = x
        if p[OP.read_fields[i]] is not None:
            place = places[OP.read_fields[i]]
            offset = row_offset(row, places.sizes, place, UNITS[OP.read_fields[i]]) + inner * place.adjacent_stride
        offsets += (offset,)
    seen, scale = x, x
    if places.diagonal is not None:
        seen = row_offset(row, places.sizes, places.query, 1) + places.diagonal + inner * places.query.adjacent_stride
    if p.scale is not None:  # noqa: SIM102  Triton compiles both sides of `and`
        if p.scale.dtype.is_ptr():
            scale = row_value(p.scale, places, places.scale, row, inner, row_mask, OP.acc)
    return offsets, x * 0, seen, x, scale


@triton.jit
def with_target(at, target):
    """The beginnings `at` of rows, with the target columns of these rows."""
    return at[0], at[1], at[2], target, at[4]


@triton.jit
def times_scale(p, at, x, OP: tl.constexpr):
    """The elements x times the scale of the row, or the number of the call; x itself without a scale."""
    scale = at[4]
    if p.scale is not None:
        if p.scale.dtype.is_ptr():  # noqa: SIM108  Triton's ternary compiles both
            x = x * scale
        else:
            x = x * formulas.number(p.scale, OP.acc)
    return x


@triton.jit
def times_sign(p, at, x, OP: tl.constexpr):
    """Logits in the order of their scores without bias: a softcap keeps the order, a negative scale reverses it."""
    if p.scale is not None:
        if p.scale.dtype.is_ptr():  # noqa: SIM108  Triton's ternary compiles both
            scale = at[4]
        else:
            scale = formulas.number(p.scale, OP.acc)
        x = tl.where(scale < 0, -x, x)
    return x


@triton.jit
def skip_head(p, places, at, head, OP: tl.constexpr, VECTOR: tl.constexpr):
    """The beginnings `at` moved by `head` columns to the body, where x and dy lie on 16 bytes if VECTOR > 1.

    `x // VECTOR * VECTOR` changes no value; it tells the compiler that x is a multiple of VECTOR.
    """
    offsets, first, seen, target, scale = skip(p, places, at, head, OP)
    if VECTOR > 1:
        x, dy, bias, mask, logits, weight = offsets
        offsets = (x // VECTOR * VECTOR, dy // VECTOR * VECTOR, bias, mask, logits, weight)
    return offsets, first, seen, target, scale


@triton.jit
def skip(p, places, at, cols, OP: tl.constexpr):
    """The beginnings `at` moved by `cols` columns."""
    offsets, first, seen, target, scale = at
    moved = ()
    for i in tl.static_range(len(OP.read_fields)):
        offset = offsets[i]
        if p[OP.read_fields[i]] is not None:
            offset += cols * places[OP.read_fields[i]].col
        moved += (offset,)
    return moved, first + cols, seen - cols, target - cols, scale


@triton.jit
def load(p, places, at, col, inside, OP: tl.constexpr, POLICY: tl.constexpr):
    """(a, b, kept, argmax) of the columns `col` (int32) that are `inside`; `col` is measured from the beginnings `at`.

    `kept` is False for columns outside and for masked columns.  `argmax` has the keys and the indices of the columns
    where OP.argmax asks for them.
    """
    offsets, first, seen, _, _ = at
    x_at, dy_at, bias_at, mask_at, _, weight_at = offsets
    wide = col.to(tl.int64)
    kept = inside
    if places.diagonal is not None:
        kept = kept & (col < seen)
    if OP.scores:
        x = tl.load(p.x + x_at + wide * places.x.col, mask=kept, other=-float("inf"), eviction_policy=POLICY)
        a = formulas.score(times_scale(p, at, x.to(OP.acc), OP), p.softcap, OP.acc)
        if p.bias is not None:
            a += tl.load(p.bias + bias_at + wide * places.bias.col, mask=kept, other=0.0).to(OP.acc)
    else:
        a = tl.load(p.x + x_at + wide * places.x.col, mask=inside, other=0.0, eviction_policy=POLICY).to(OP.acc)
        b = tl.load(p.dy + dy_at + wide * places.dy.col, mask=inside, other=0.0, eviction_policy=POLICY).to(OP.acc)
    if p.mask is not None:
        kept = kept & tl.load(p.mask + mask_at + wide * places.mask.col, mask=kept, other=0).to(tl.int1)
    if OP.scores and (p.scale is not None or p.softcap is not None or p.mask is not None):
        # A softcap or a negative scale turns -inf into another value.
        a = tl.where(kept, a, -float("inf"))
    if p.weight is not None:
        b = tl.load(p.weight + weight_at + wide * places.weight.col, mask=inside, other=0.0).to(OP.acc)
    elif OP.scores:
        # The weight of a column of the row is 1, that of a column outside is 0.
        b = tl.where(inside, 1.0, 0.0).to(OP.acc)
    argmax = ()
    if OP.argmax:
        # Logits may differ where scores are rounded to the same number.
        key = a if p.bias is not None else times_sign(p, at, x.to(OP.acc), OP)
        argmax = (state.key_of(tl.where(kept, key, -float("inf")), inside), first + wide)
    return a, b, kept, argmax


@triton.jit
def compute_output(p, places, at, col, element, constants, OP: tl.constexpr):
    """The output for an element = (a, b, ...) of `load`, given the per-row constants of formulas.row_constants."""
    a, b, _, _ = element
    target = at[3]
    return through_score(p, places, at, col, element, formulas.output(a, b, col == target, constants, OP), OP)


@triton.jit
def through_score(p, places, at, col, element, y, OP: tl.constexpr):
    """A gradient in the scores times their slope in the logits; an output that is no gradient as it is.

    `element` is the result of `load`.
    """
    _, _, kept, _ = element
    x_at, _, _, _, logits_at, _ = at[0]
    if OP.gradient:
        if p.mask is not None or places.diagonal is not None:
            # An excluded element has no gradient, not even in a row that holds NaN or has no softmax.
            y = tl.where(kept, y, 0.0)
        if p.softcap is not None:
            if OP.scores:
                x = tl.load(p.x + x_at + col.to(tl.int64) * places.x.col, mask=kept, other=0.0).to(OP.acc)
            else:
                logits = p.logits + logits_at + col.to(tl.int64) * places.logits.col
                x = tl.load(logits, mask=kept, other=0.0).to(OP.acc)
            slope = formulas.softcap_slope(times_scale(p, at, x, OP), p.softcap, OP.acc)
            # A row that counts for nothing may hold NaN.
            y = tl.where(y == 0.0, 0.0, y * slope)
        y = times_scale(p, at, y, OP)
    return y


@triton.jit
def row_value(pointer, places, place, row, inner, mask, ACC: tl.constexpr):
    """The value of a per-row operand; 0 where `mask` is False."""
    offset = row_offset(row, places.sizes, place, 1) + inner * place.adjacent_stride
    if mask is None:  # noqa: SIM108  Triton's ternary compiles both
        value = tl.load(pointer + offset)
    else:
        value = tl.load(pointer + offset, mask=mask, other=0)
    return value.to(ACC)


@triton.jit
def given_state(p, places, row, inner, mask, OP: tl.constexpr):
    """The state of an operation that reduces nothing: the saved state; or m = lse, and dy as the only sum."""
    if OP.target:
        m = row_value(p.m, places, places.m, row, inner, mask, OP.acc)
        sums = (row_value(p.l, places, places.l, row, inner, mask, OP.acc),)
    else:
        m = row_value(p.lse, places, places.lse, row, inner, mask, OP.acc)
        sums = (row_value(p.dy, places, places.dy, row, inner, mask, OP.acc),)
    return m, sums


@triton.jit
def row_operands(p, places, row, inner, mask, cols, OP: tl.constexpr, UNITS: tl.constexpr):
    """The per-row operands of an operation with a target column; an absent one is 0.  Else the empty tuple.

        target      the target column, -1 for a row that does not exist
        valid       True where the target is a column
        ignored     True where the target is ignore_index
        z_target    score of the target column
        w_target    weight of the target column
        dy, dlse, entropy, dentropy
        smoothing, total, z_loss: numbers of the call; total is the sum of all weights

    Nothing is written before this call: the gradient may overwrite the logits.
    """
    values = ()
    if OP.target:
        at = rows_at(p, places, row, inner, mask, OP, UNITS)
        values = _row_operands(p, places, at, row, inner, mask, cols, OP)
    return values


@triton.jit
def _row_operands(p, places, at, row, inner, mask, cols, OP: tl.constexpr):
    zero = tl.zeros([], OP.acc)
    smoothing, total, z_loss = zero, zero + cols.to(OP.acc), zero
    target = row_value(p.target, places, places.target, row, inner, mask, tl.int64)
    # Hazard: if `ignored` came after the select below, Triton 3.6 could not compile 32-bit targets for some layouts.
    ignored = target < target
    if p.ignore_index is not None:
        ignored = target == formulas.number(p.ignore_index, tl.float64).to(tl.int64)
    if mask is not None:
        target = tl.where(mask, target, -1)
    valid = (target >= 0) & (target < cols)
    z_target, w_target, _, _ = load(p, places, at, tl.where(valid, target, 0), valid, OP, "")
    dy, dlse, entropy, dentropy = zero, zero, zero, zero
    if p.dy is not None:
        dy = row_value(p.dy, places, places.dy, row, inner, mask, OP.acc)
    if p.dlse is not None:
        dlse = row_value(p.dlse, places, places.dlse, row, inner, mask, OP.acc)
    if p.dentropy is not None:
        entropy = row_value(p.entropy, places, places.entropy, row, inner, mask, OP.acc)
        dentropy = row_value(p.dentropy, places, places.dentropy, row, inner, mask, OP.acc)
    if p.smoothing is not None:
        smoothing = formulas.number(p.smoothing, OP.acc)
    if p.weight_sum is not None:
        total = formulas.number(p.weight_sum, OP.acc)
    if p.z_loss is not None:
        z_loss = formulas.number(p.z_loss, OP.acc)
    return target, valid, ignored, z_target, w_target, dy, dlse, entropy, dentropy, smoothing, total, z_loss


@triton.jit
def target_of(row_values):
    """The target columns of rows, from the result of `row_operands`."""
    target, _, _, _, _, _, _, _, _, _, _, _ = row_values
    return target


@triton.jit
def store_row_outputs(p, places, row, inner, m, sums, row_values, cols, mask, OP: tl.constexpr, UNITS: tl.constexpr):
    """Write every per-row output of the operation, from the rows' states and per-row operands."""
    for i in tl.static_range(len(OP.row_outputs)):
        place = places[OP.row_fields[i]]
        pointer = p[OP.row_fields[i]]
        offset = row_offset(row, places.sizes, place, UNITS[OP.row_fields[i]]) + inner * place.adjacent_stride
        value = formulas.row_output(m, sums, row_values, cols, i, OP)
        tl.store(pointer + offset, value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def expand(constants, axis: tl.constexpr):
    """Per-row constants with a dimension of size 1 at `axis`, for the columns."""
    expanded = ()
    for i in tl.static_range(len(constants)):
        expanded += (tl.expand_dims(constants[i], axis),)
    return expanded
