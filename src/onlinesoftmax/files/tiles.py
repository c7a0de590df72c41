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
    """Complete rows, or the part of them that one process has: tiles that cover a span of the axis in order.

    Attributes:
        outer, inner: Spans that all tiles of the band share.
        axis: Span that the tiles cover.
        step: Size of each tile along the axis; the last tile may be shorter.
    """

    outer: Span
    inner: Span
    axis: Span
    step: int

    @property
    def is_one_tile(self) -> bool:
        """True where one tile covers the span."""
        return self.step >= self.axis[1] - self.axis[0]

    def __iter__(self) -> Iterator[Tile]:
        first, end = self.axis
        # An empty axis gives one empty tile, because the logsumexp of an empty row must be written.
        for start in range(first, max(end, first + 1), self.step):
            yield Tile(self.outer, (start, min(start + self.step, end)), self.inner)


@dataclass(frozen=True)
class Share:
    """The part of a tensor that one process reads and writes.

    Attributes:
        box: The elements.
        largest: Sizes of the largest box of all processes.
        merges: True where the axis is divided, so that the processes merge their states.
    """

    box: Tile
    largest: Sizes
    merges: bool


def share_of(split: Sizes, rank: int, size: int) -> Share:
    """Divide a tensor of sizes `split` evenly among processes, along the dimension that makes the shares most equal.

    Rows stay whole, and the processes independent, unless the shares along the axis are smaller by more than 5 %.

    Example:
        >>> share_of((1000, 4096, 1), rank=1, size=4).box.outer
        (250, 500)
        >>> share_of((1, 1_000_000, 1), rank=1, size=4).box.axis
        (250000, 500000)
    """
    most = [-(-n // size) for n in split]
    parts = [each / n if n else 1.0 for each, n in zip(most, split, strict=True)]
    # A share of the inner dimension must be worth a read call of its own.
    order = (0, 2, 1) if split[2] >= size * RUN else (0, 1)
    best = min(parts[i] for i in order)
    chosen = next(i for i in order if parts[i] <= 1.05 * best)
    spans = [(0, n) for n in split]
    spans[chosen] = split[chosen] * rank // size, split[chosen] * (rank + 1) // size
    largest = tuple(most[i] if i == chosen else n for i, n in enumerate(split))
    return Share(Tile(spans[0], spans[1], spans[2]), (largest[0], largest[1], largest[2]), chosen == 1 and size > 1)


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


def bands(share: Share, limit: int) -> Iterator[Band]:
    """Cut a share into bands whose tiles have at most `limit` elements; processes that merge have the same bands."""
    rows, step, columns = tile_shape(share.largest, limit)
    box = share.box
    for row in range(*box.outer, rows):
        for column in range(*box.inner, columns):
            outer, inner = (row, min(row + rows, box.outer[1])), (column, min(column + columns, box.inner[1]))
            yield Band(outer, inner, box.axis, step)


def reads(split: Sizes, limit: int) -> int:
    """Return how often softmax reads each element: once if a tile holds whole rows, otherwise twice."""
    return 1 if tile_shape(split, limit)[1] >= split[1] else 2
