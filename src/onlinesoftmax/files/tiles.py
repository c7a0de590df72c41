"""Tiles: the pieces of a tensor that memory holds at once. This file is pure arithmetic on sizes.

A tensor has the sizes (outer, axis, inner), in file order: `axis` is the dimension that softmax normalises,
`outer` counts the elements before it and `inner` the elements after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

RUN = 1 << 14
"""Number of elements that is worth a read call of its own: 64 KiB of float32, the least that a disk reads ahead."""

_RUNS_IN_A_TILE = 16
"""Runs in a tile of a strided axis. With more runs, each run is shorter; with fewer, the states take more memory."""

Sizes = tuple[int, int, int]
Span = tuple[int, int]


@dataclass(frozen=True)
class Tile:
    """A box of elements: three half-open spans, along outer, axis and inner."""

    outer: Span
    axis: Span
    inner: Span

    @property
    def shape(self) -> Sizes:
        """Sizes along (outer, axis, inner)."""
        return self.outer[1] - self.outer[0], self.axis[1] - self.axis[0], self.inner[1] - self.inner[0]

    def runs(self, split: Sizes) -> Iterator[tuple[int, int]]:
        """Yield (first element, number of elements) of each contiguous run in a tensor of sizes `split`, in order."""
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
    """Complete rows: tiles that cover the whole axis in order.

    Attributes:
        outer, inner: Spans that all tiles of the band share.
        length: Size of the axis.
        step: Size of each tile along the axis; the last tile may be shorter.
    """

    outer: Span
    inner: Span
    length: int
    step: int

    def __iter__(self) -> Iterator[Tile]:
        # An empty axis gives one empty tile, because the logsumexp of an empty row must be written.
        for start in range(0, max(self.length, 1), self.step):
            yield Tile(self.outer, (start, min(start + self.step, self.length)), self.inner)


def tile_shape(split: Sizes, limit: int) -> Sizes:
    """Return the sizes of the largest tile of at most `limit` elements.

    The tile holds the whole axis where that fits, so that a row is read once.

    Example:
        >>> tile_shape((1000, 4096, 1), limit=100_000)  # 24 whole rows
        (24, 4096, 1)
        >>> tile_shape((2, 1_000_000, 1), limit=100_000)  # a tenth of a row; the row is read twice
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
    """Cut a tensor of sizes `split` into bands whose tiles have at most `limit` elements."""
    rows, step, columns = tile_shape(split, limit)
    outer, axis, inner = split
    for row in range(0, outer, rows):
        for column in range(0, inner, columns):
            yield Band((row, min(row + rows, outer)), (column, min(column + columns, inner)), axis, step)


def reads(split: Sizes, limit: int) -> int:
    """Return how often softmax reads each element: once if a tile holds whole rows, otherwise twice."""
    return 1 if tile_shape(split, limit)[1] >= split[1] else 2
