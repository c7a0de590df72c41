"""Any tensor, seen as rows: sizes and strides only, so no framework and no copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

LARGEST_UNIT = 16
"""Limit of the powers of two that describe strides: the widest load has 16 bytes, which are at most 16 elements."""


class Side(NamedTuple):
    """Strides of one tensor, in elements.

    Attributes:
        strides: Of the outer dimensions, in the order of `Layout.sizes`; 0 where the tensor is broadcast.
        col: From one column of a row to the next; 0 where a row has one value.
    """

    strides: tuple[int, ...]
    col: int

    @property
    def unit(self) -> int:
        """The largest power of two up to LARGEST_UNIT that divides the row strides; 1 if columns are not neighbours."""
        return power_of_two_divisor(*self.strides) if self.col == 1 else 1

    def congruent(self, other: Side) -> bool:
        """True where the row strides of both tensors are equal modulo LARGEST_UNIT."""
        return all((a - b) % LARGEST_UNIT == 0 for a, b in zip(self.strides, other.strides, strict=True))

    @property
    def one_value(self) -> bool:
        """True where the whole tensor is one value."""
        return not self.col and not any(self.strides)


@dataclass(frozen=True)
class Layout:
    """`rows` × `cols` of an input x, and where each tensor of a call has those rows.

    Attributes:
        cols: Elements of a row.
        sizes: Sizes of the outer dimensions, by their stride in x, smallest first; broadcast dimensions are last.
        sides: Strides of every tensor, by its name.  "query" is the position of a row's query, for causal masks.
    """

    cols: int
    sizes: tuple[int, ...]
    sides: Mapping[str, Side]

    @cached_property
    def rows(self) -> int:
        """Number of rows."""
        rows = 1
        for size in self.sizes:
            rows *= size
        return rows

    @property
    def x(self) -> Side:
        """Strides of the input."""
        return self.sides["x"]

    @property
    def adjacent(self) -> int:
        """Number of rows that lie side by side in x; 1 where the elements of a row are neighbours."""
        return self.sizes[0] if self.x.col != 1 and self.x.strides[0] == 1 else 1

    @cached_property
    def cols_unit(self) -> int:
        """The largest power of two up to LARGEST_UNIT that divides the row length."""
        return power_of_two_divisor(self.cols)

    def column_unit(self, name: str) -> int:
        """The largest power of two up to LARGEST_UNIT that divides all strides of a tensor except the first row stride.

        The first row stride must be 1, so that adjacent rows are neighbours; otherwise the result is 1.
        """
        side = self.sides[name]
        return power_of_two_divisor(side.col, *side.strides[1:]) if side.strides[0] == 1 else 1


def power_of_two_divisor(*numbers: int) -> int:
    """The largest power of two, at most LARGEST_UNIT, that divides all the numbers.

    >>> power_of_two_divisor(4096, 50256)
    16
    >>> power_of_two_divisor(1000), power_of_two_divisor(50257)
    (8, 1)
    """
    unit = LARGEST_UNIT
    for number in numbers:
        while number % unit:
            unit //= 2
    return unit


def rows_of(shape: tuple[int, ...], axis: int, strides: Mapping[str, tuple[int, ...]]) -> Layout:
    """The layout of a softmax over `axis`, with as few outer dimensions as the strides allow.

    Args:
        shape: Shape of the input, at least one dimension.
        axis: The softmax dimension, 0 ≤ axis < len(shape).
        strides: Strides of every tensor for that shape, in elements, by name: "x" first, then "y" where elements are
            written.  A stride is 0 where the tensor is broadcast, and at `axis` where a row has one value.

    Example:
        >>> rows_of((8, 3, 5), 1, {"x": (15, 5, 1), "y": (15, 5, 1)}).sizes
        (5, 8)
        >>> rows_of((8, 3, 5), 2, {"x": (15, 5, 1), "y": (15, 5, 1)}).sizes
        (24,)
    """
    tensors = list(strides.values())
    outer = [(size, *(tensor[i] for tensor in tensors)) for i, size in enumerate(shape) if i != axis and size != 1]
    # Neighbours in x first, so that a tile of rows reads whole cache lines; broadcast dimensions last.
    outer.sort(key=lambda d: (d[1] == 0, *d[1:3]))
    merged: list[tuple[int, ...]] = []
    for size, *steps in outer:
        if merged:
            inner_size, *inner_steps = merged[-1]
            if all(step == inner * inner_size for step, inner in zip(steps, inner_steps, strict=True)):
                merged[-1] = (inner_size * size, *inner_steps)
                continue
        merged.append((size, *steps))
    sizes, *columns = zip(*(merged or [(1,) + (0,) * len(tensors)]), strict=True)
    # A row of one element has no column stride.  Treat it as contiguous in x and in an element output.
    alike = ("x", *(name for name in strides if name == "y" and strides[name][axis]))
    single = alike if shape[axis] <= 1 else ()
    sides = {
        name: Side(outer_strides, 1 if name in single else tensor[axis])
        for (name, tensor), outer_strides in zip(strides.items(), columns, strict=True)
    }
    return Layout(shape[axis], sizes, sides)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def strides_of_rows(strides: tuple[int, ...], axis: int, keepdim: bool = False) -> tuple[int, ...]:
    """Strides of a tensor with one value per row, written for the input's shape: 0 at the softmax dimension.

    >>> strides_of_rows((4, 1), 1)
    (4, 0, 1)
    """
    return (*strides[:axis], 0, *strides[axis + keepdim :])
