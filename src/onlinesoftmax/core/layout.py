"""Any tensor, seen as rows: sizes and strides only, so no framework and no copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

LARGEST_UNIT = 16


@dataclass(frozen=True)
class Layout:
    """`rows` × `cols` of an input x and an output y, with strides in elements.

    Attributes:
        cols: Elements of a row, `x_col` and `y_col` apart.
        sizes: Sizes of the outer dimensions, the one with the closest neighbours in x first.
        x_strides, y_strides: Strides of those dimensions.
        more: Name, strides of those dimensions and stride of a column for every other tensor that
            is visited with x: dy, a bias, a mask; 0 where it is broadcast.
    """

    cols: int
    sizes: tuple[int, ...]
    x_strides: tuple[int, ...]
    y_strides: tuple[int, ...]
    x_col: int
    y_col: int
    more: tuple[tuple[str, tuple[int, ...], int], ...] = ()

    @cached_property
    def rows(self) -> int:
        rows = 1
        for size in self.sizes:
            rows *= size
        return rows

    @property
    def adjacent(self) -> int:
        """How many rows lie side by side in x, element by element (1 when rows are contiguous)."""
        return self.sizes[0] if self.x_col != 1 and self.x_strides[0] == 1 else 1

    @cached_property
    def units(self) -> tuple[int, int, int]:
        """Powers of two up to 16 that divide the row strides of x, those of y, and the row length.

        Where all three are as wide as a vector, so may be every load and store.
        """
        return (
            self.unit_of(self.x_strides, self.x_col),
            self.unit_of(self.y_strides, self.y_col),
            power_of_two_divisor(self.cols),
        )

    @property
    def unit(self) -> int:
        """The least of them that bounds a load or a store of several elements."""
        x_unit, y_unit, cols_unit = self.units
        units = [x_unit, cols_unit] + ([y_unit] if self.y_col else [])
        return min(units + [self.unit_of(*side) for side in self._beside_x if side[1] == 1])

    @property
    def _beside_x(self) -> list[tuple[tuple[int, ...], int]]:
        """(strides, col) of what is read element by element with x: the dy of a gradient that is given no lse."""
        sides = {name: (strides, col) for name, strides, col in self.more}
        return [sides["dy"]] if "dy" in sides and "lse" not in sides else []

    @staticmethod
    def unit_of(strides: tuple[int, ...], col: int) -> int:
        """The power of two up to 16 that divides the row strides of one tensor; 1 where its columns are apart."""
        return power_of_two_divisor(*strides) if col == 1 else 1

    @property
    def congruent(self) -> bool:
        """Whether a row of y, and of dy, begins, modulo the widest unit, where the same row of x does."""
        sides = [(self.y_strides, self.y_col)] if self.y_col else []
        # One number for all of x begins everywhere.
        sides += [(strides, col) for strides, col in self._beside_x if col or any(strides)]
        return self.x_col == 1 and all(
            col == 1 and all((x - y) % LARGEST_UNIT == 0 for x, y in zip(self.x_strides, strides, strict=True))
            for strides, col in sides
        )

    @cached_property
    def column_units(self) -> tuple[int, int, int]:
        """The same where rows lie side by side: of the other strides of x, of y, and `adjacent`."""
        x_unit = power_of_two_divisor(self.x_col, *self.x_strides[1:])
        y_unit = power_of_two_divisor(self.y_col, *self.y_strides[1:]) if self.y_strides[0] == 1 else 1
        return x_unit, y_unit, power_of_two_divisor(self.adjacent)


def power_of_two_divisor(*numbers: int) -> int:
    """The largest power of two, at most 16, that divides all the numbers.

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


def rows_of(
    shape: tuple[int, ...], dim: int, x_strides: tuple[int, ...], y_strides: tuple[int, ...],
    more: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> Layout:  # fmt: skip
    """The layout of a softmax over `dim`, with as few outer dimensions as the strides allow.

    Args:
        shape: Shape of the input, at least one dimension.
        dim: The softmax dimension, 0 ≤ dim < len(shape).
        x_strides: Strides of the input, in elements; 0 where it is expanded.
        y_strides: Strides of the output for the same shape (0 at `dim` if a row gives one number).
        more: Strides of other tensors for the same shape, by name.

    Example:
        >>> rows_of((8, 3, 5), 1, (15, 5, 1), (15, 5, 1)).sizes
        (5, 8)
        >>> rows_of((8, 3, 5), 2, (15, 5, 1), (15, 5, 1)).sizes
        (24,)
    """
    sides = (x_strides, y_strides, *more.values())
    outer = [(size, *(side[i] for side in sides)) for i, size in enumerate(shape) if i != dim and size != 1]
    # Neighbours in x first, so that a tile of rows reads whole cache lines; repeated rows last.
    outer.sort(key=lambda d: (d[1] == 0, d[1], d[2]))
    merged: list[tuple[int, ...]] = []
    for size, *strides in outer:
        if merged:
            inner, *steps = merged[-1]
            if all(stride == step * inner for stride, step in zip(strides, steps, strict=True)):
                merged[-1] = (inner * size, *steps)
                continue
        merged.append((size, *strides))
    sizes, x_outer, y_outer, *others = zip(*(merged or [(1,) + (0,) * len(sides)]), strict=True)
    cols = shape[dim]
    # A dimension of one element has no neighbours: call it contiguous.
    x_col, y_col = (x_strides[dim], y_strides[dim]) if cols > 1 else (1, 1)
    columns = (side[dim] for side in more.values())
    return Layout(cols, sizes, x_outer, y_outer, x_col, y_col, tuple(zip(more, others, columns, strict=True)))


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
    """Strides of an output with one number a row, as for the input's shape: the number does not move with the column.

    >>> strides_of_rows((4, 1), 1)
    (4, 0, 1)
    """
    return (*strides[:axis], 0, *strides[axis + keepdim :])
