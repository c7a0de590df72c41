"""Any tensor, seen as rows: sizes and strides only, so no framework and no copy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

LARGEST_UNIT = 16


@dataclass(frozen=True)
class Layout:
    """`rows` × `cols` of an input x and an output y, with strides in elements.

    Attributes:
        cols: Elements of a row, `x_col` and `y_col` apart.
        sizes: Sizes of the outer dimensions, the one with the closest neighbours in x first.
        x_strides, y_strides: Strides of those dimensions.
    """

    cols: int
    sizes: tuple[int, ...]
    x_strides: tuple[int, ...]
    y_strides: tuple[int, ...]
    x_col: int
    y_col: int

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
        x_unit = power_of_two_divisor(*self.x_strides) if self.x_col == 1 else 1
        y_unit = power_of_two_divisor(*self.y_strides) if self.y_col == 1 else 1
        return x_unit, y_unit, power_of_two_divisor(self.cols)

    @property
    def unit(self) -> int:
        """The least of them that bounds a load or a store of several elements."""
        x_unit, y_unit, cols_unit = self.units
        return min(x_unit, cols_unit) if self.y_col == 0 else min(x_unit, y_unit, cols_unit)

    @property
    def congruent(self) -> bool:
        """Whether a row of y begins, modulo the widest unit, where the same row of x does."""
        pairs = zip(self.x_strides, self.y_strides, strict=True)
        return self.x_col == 1 and (
            self.y_col == 0 or (self.y_col == 1 and all((x - y) % LARGEST_UNIT == 0 for x, y in pairs))
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


def rows_of(shape: tuple[int, ...], dim: int, x_strides: tuple[int, ...], y_strides: tuple[int, ...]) -> Layout:
    """The layout of a softmax over `dim`, with as few outer dimensions as the strides allow.

    Args:
        shape: Shape of the input, at least one dimension.
        dim: The softmax dimension, 0 ≤ dim < len(shape).
        x_strides: Strides of the input, in elements; 0 where it is expanded.
        y_strides: Strides of the output for the same shape (0 at `dim` if a row gives one number).

    Example:
        >>> rows_of((8, 3, 5), 1, (15, 5, 1), (15, 5, 1)).sizes
        (5, 8)
        >>> rows_of((8, 3, 5), 2, (15, 5, 1), (15, 5, 1)).sizes
        (24,)
    """
    outer = [(x_strides[i], y_strides[i], size) for i, size in enumerate(shape) if i != dim and size != 1]
    # Neighbours in x first, so that a tile of rows reads whole cache lines; repeated rows last.
    outer.sort(key=lambda d: (d[0] == 0, d[0], d[1]))
    merged: list[tuple[int, int, int]] = []
    for x_stride, y_stride, size in outer:
        if merged:
            x_inner, y_inner, inner = merged[-1]
            if x_stride == x_inner * inner and y_stride == y_inner * inner:
                merged[-1] = (x_inner, y_inner, inner * size)
                continue
        merged.append((x_stride, y_stride, size))
    merged = merged or [(0, 0, 1)]
    cols = shape[dim]
    # A dimension of one element has no neighbours: call it contiguous.
    return Layout(
        cols=cols,
        sizes=tuple(size for _, _, size in merged),
        x_strides=tuple(x for x, _, _ in merged),
        y_strides=tuple(y for _, y, _ in merged),
        x_col=x_strides[dim] if cols > 1 else 1,
        y_col=y_strides[dim] if cols > 1 else 1,
    )


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
