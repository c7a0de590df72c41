"""Which pieces of a tensor in a file are held in memory at once: pure arithmetic on sizes.

A tensor is seen as (outer, axis, inner), in the order of the file: the elements before, along and
after the axis that softmax normalises.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

RUN = 1 << 14
"""Elements that are worth a read call of their own: 64 KiB of float32, what a disk reads ahead at least."""

_RUNS_IN_A_TILE = 16
"""A narrower tile would read shorter runs; a wider one would hold few elements for each state."""

Sizes = tuple[int, int, int]
Span = tuple[int, int]


@dataclass(frozen=True)
class Tile:
    """A box in (outer, axis, inner): three half-open spans."""

    outer: Span
    axis: Span
    inner: Span

    @property
    def shape(self) -> Sizes:
        return self.outer[1] - self.outer[0], self.axis[1] - self.axis[0], self.inner[1] - self.inner[0]

    def runs(self, split: Sizes) -> Iterator[tuple[int, int]]:
        """(first element, number of elements) of each contiguous run in a tensor of sizes `split`, in order."""
        outer, axis, inner = self.shape
        _, whole_axis, whole_inner = split
        if inner == whole_inner and (outer == 1 or axis == whole_axis):
            yield (self.outer[0] * whole_axis + self.axis[0]) * whole_inner, outer * axis * inner
            return
        for row in range(*self.outer):
            for position in range(*self.axis):
                yield (row * whole_axis + position) * whole_inner + self.inner[0], inner


@dataclass(frozen=True)
class Band:
    """Some rows in full: tiles with the same outer and inner span that cover the axis in order, `step` at a time."""

    outer: Span
    inner: Span
    length: int
    step: int

    def __iter__(self) -> Iterator[Tile]:
        # An empty axis is one empty tile: its logsumexp still has to be written.
        for start in range(0, max(self.length, 1), self.step):
            yield Tile(self.outer, (start, min(start + self.step, self.length)), self.inner)


def tile_shape(split: Sizes, limit: int) -> Sizes:
    """The largest tile of at most `limit` elements; the axis whole if it can be, so that a row is read once.

    Example:
        >>> tile_shape((1000, 4096, 1), limit=100_000)  # 24 rows at once
        (24, 4096, 1)
        >>> tile_shape((2, 1_000_000, 1), limit=100_000)  # a tenth of a row: it is read twice
        (1, 100000, 1)
        >>> tile_shape((1, 1000, 1_000_000), limit=100_000)  # a block of 6250 columns
        (1, 16, 6250)
    """
    _, axis, inner = (max(size, 1) for size in split)
    if axis * inner <= limit:
        return limit // (axis * inner), axis, inner
    width = max(1, limit // _RUNS_IN_A_TILE)
    if limit // axis >= min(RUN, width):
        return 1, axis, limit // axis
    width = min(inner, width)
    return 1, limit // width, width


def bands(split: Sizes, limit: int) -> Iterator[Band]:
    """All of a tensor of sizes `split`, in bands whose tiles have at most `limit` elements."""
    rows, step, columns = tile_shape(split, limit)
    outer, axis, inner = split
    for row in range(0, outer, rows):
        for column in range(0, inner, columns):
            yield Band((row, min(row + rows, outer)), (column, min(column + columns, inner)), axis, step)


def reads(split: Sizes, limit: int) -> int:
    """How often softmax reads each element: once if a tile holds whole rows, else twice."""
    return 1 if tile_shape(split, limit)[1] >= split[1] else 2
