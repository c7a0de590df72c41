"""The view of a tensor: its sizes and strides as rows, so that no kernel needs a framework or a copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

LARGEST_UNIT = 16
"""Limit of the powers of two that describe strides: the widest load has 16 bytes, which are at most 16 elements."""


class View(NamedTuple):
    """One tensor of a call without its data.

    A framework gives the first three fields, and `rows_of` adds the others.

    Attributes:
        strides: Strides for the shape of the input, in elements.  A stride is 0 where the tensor is broadcast, and at
            the softmax dimension if the tensor has one value per row.
        dtype: Name of its dtype.
        aligned: True where the address of its first element is a multiple of 16 bytes.
        outer: Strides of the outer dimensions, in the order of `Task.sizes`; empty for one value per call.
        col: Distance from one column of a row to the next; 0 where a row has one value.
        unit: The largest power of two up to LARGEST_UNIT that divides the row strides; 1 if columns are not neighbours.
    """

    strides: tuple[int, ...]
    dtype: str
    aligned: bool = True
    outer: tuple[int, ...] = ()
    col: int = 0
    unit: int = 1

    def with_rows(self, outer: tuple[int, ...], col: int) -> View:
        """The view with these strides of its rows."""
        unit = power_of_two_divisor(*outer) if col == 1 else 1
        return View(self.strides, self.dtype, self.aligned, outer, col, unit)

    def congruent(self, other: View) -> bool:
        """True where the row strides of both tensors are equal modulo LARGEST_UNIT."""
        return all((a - b) % LARGEST_UNIT == 0 for a, b in zip(self.outer, other.outer, strict=True))


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


def rows_of(shape: tuple[int, ...], axis: int, views: Mapping[str, View]) -> tuple[tuple[int, ...], dict[str, View]]:
    """The rows of a softmax over `axis`: sizes of the outer dimensions, as few as the strides allow, and the views.

    The outer dimensions are in the order of their stride in x, smallest first; broadcast dimensions are last.

    Args:
        shape: Shape of the input, at least one dimension.
        axis: The softmax dimension, 0 ≤ axis < len(shape).
        views: Every tensor by name: "x" first, then "y" where elements are written.

    Example:
        >>> dense = View((15, 5, 1), "float32")
        >>> rows_of((8, 3, 5), 1, {"x": dense, "y": dense})[0]
        (5, 8)
        >>> rows_of((8, 3, 5), 2, {"x": dense, "y": dense})[0]
        (24,)
    """
    tensors = [view.strides for view in views.values()]
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

    def col(name: str, stride: int) -> int:
        # A row of one element has no column stride.  Treat it as contiguous in x and in an element output.
        return 1 if shape[axis] <= 1 and (name == "x" or (name == "y" and stride)) else stride

    return sizes, {
        name: view.with_rows(outer_strides, col(name, view.strides[axis]))
        for (name, view), outer_strides in zip(views.items(), columns, strict=True)
    }


def contiguous_view(shape: tuple[int, ...], dtype: str) -> View:
    """A contiguous tensor of the shape of the input."""
    return View(contiguous_strides(shape), dtype)


def row_view(shape: tuple[int, ...], axis: int, dtype: str) -> View:
    """A contiguous tensor with one value per row of an input of this shape."""
    return View(strides_of_rows(contiguous_strides((*shape[:axis], *shape[axis + 1 :])), axis), dtype)


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
