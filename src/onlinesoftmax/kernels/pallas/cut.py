"""How `cluster` cuts rows to slices of whole 16 bytes, wherever the rows begin, and slices to pieces and tiles."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ...core.arrays import Array

PIECE_BYTES = 32 << 10
"""Fewest bytes of all inputs that a block waits for at once, while the rest is on its way."""

MOST_PIECES = 4
"""Pieces of a slice: each has a reduction of its own."""


class Cut(NamedTuple):
    """Where a slice of a row lies.

    All slices have one length, so the last of a row begins earlier, and holds what the one before counts.  Rows of
    whole 16 bytes lie in a matrix.  Ragged rows begin anywhere in one long vector: their first and last slices hold
    some of their neighbours'.

    Attributes:
        ragged: Whether rows begin anywhere.
        row: Which row.
        begin, end: Where it begins and ends, in itself; in the vector if ragged.
        first: Where the slice begins, in the same.
        before, after: What of the slice counts here is not before the one, and before the other.
        length, vector: Elements of a slice, and of 16 bytes.
    """

    ragged: bool
    row: Array
    begin: Array | int
    end: Array | int
    first: Array
    before: Array
    after: Array
    length: int
    vector: int

    @classmethod
    def of(cls, row: Array, rank: Array, rows: int, cols: int, length: int, vector: int) -> Cut:
        """The slice of a rank.

        Args:
            row, rank: Which slice of which row.
            rows: How many there are.
            cols: Elements of a row.
            length: Of a slice, in whole vectors.
            vector: Elements of 16 bytes.
        """
        ragged = cols % vector != 0
        begin = row * cols if ragged else 0
        end = begin + cols
        low, high = begin // vector * vector, -(-end // vector) * vector
        mine = low + rank * length
        last = high - length
        if ragged:
            # A slice of the whole row may hold 16 bytes more than this one; there are some behind all but the last.
            last = jnp.maximum(last, jnp.minimum(low, rows * cols - length))
        first = jnp.minimum(mine, last)
        return cls(ragged, row, begin, end, first, jnp.maximum(mine, begin) - first, end - first, length, vector)

    def place(self, array: Any, at: Array | int, columns: int) -> Any:
        """Columns of the slice, in the matrix or in the vector."""
        place = pl.ds(self.first + at, columns)
        return array.at[place] if self.ragged else array.at[self.row, place]

    def tiles(self, start: int, stop: int, tile: int, overlap: bool) -> tuple[list[int], range]:
        """Where tiles begin that may hold what does not count, and the numbers of all others.

        Args:
            start, stop: Columns of the slice; the first and all but the last tile begin at whole tiles.
            tile: Columns of a tile.
            overlap: Whether some of the slice count in the one before.
        """
        whole, edges = stop // tile * tile, set()
        if start == 0 and (overlap or self.ragged):
            edges.add(start)
        if stop > whole:
            edges.add(stop - tile)
        # Behind a row are less than 16 bytes up to whole ones, and 16 bytes more where one slice holds all of it.
        if self.ragged and stop == self.length and stop - whole < 2 * self.vector:
            edges.add(whole - tile)
        begin, end = start // tile + int(start in edges), whole // tile - int(whole - tile in edges)
        return sorted(edges), range(begin, max(begin, end))

    def counted(self, at: int, tile: int) -> tuple[Array, Array]:
        """Which columns of the tile that begins here count, as all are counted once: from one on, before another."""
        return jnp.maximum(self.before - at, -at % tile), self.after - at

    @property
    def whole(self) -> tuple[int, int]:
        """From where on how many columns of the slice are whole 16 bytes of its row, whatever the row."""
        return (2 * self.vector, self.length - 4 * self.vector) if self.ragged else (0, self.length)

    def edges(self, columns: int) -> tuple[Array, ...]:
        """From where on so many columns are of its row, which hold the rest between them."""
        if not self.ragged:
            return ()
        first, end = jnp.maximum(self.begin - self.first, 0), jnp.minimum(self.end - self.first, self.length)
        return first, end - columns


def pieces_of(length: int, tile: int, itemsize: int) -> list[tuple[int, int]]:
    """Where the pieces of a slice begin and end: a power of two of them, of whole tiles but for what is left over."""
    count = max(1, min(length * itemsize // PIECE_BYTES, MOST_PIECES))
    count = 1 << count.bit_length() - 1
    bounds = [length // tile * piece // count * tile for piece in range(count)]
    return list(pairwise([*bounds, length]))
