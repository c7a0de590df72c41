"""The slices of `cluster`: how a row is divided into slices of whole 16 bytes, and a slice into pieces and tiles.

Rows may begin anywhere.  Nothing here needs a GPU, so the tests check on every machine that each element is reduced
once and written.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ...core.arrays import Array

PIECE_BYTES = 32 << 10
"""Fewest bytes of all inputs in one piece: a block waits for one piece while the next ones are on their way."""

MOST_PIECES = 4
"""Most pieces of a slice: each piece costs a reduction."""


class SliceBounds(NamedTuple):
    """The place of one block's slice of a row.

    All slices have one length, so the last slice of a row begins earlier and overlaps the slice before it.  Aligned
    rows lie in a matrix, and positions are measured from the row's beginning.  Unaligned rows lie in one long vector,
    and positions are measured from the vector's beginning; the first and the last slice of a row then hold a few
    elements of the neighbouring rows.

    Attributes:
        unaligned: True where rows do not begin on 16 bytes.
        row: Index of the row.
        row_begin, row_end: Positions where the row begins and ends.
        first: Position where the slice begins.
        own_begin, own_end: This block reduces the slice columns [own_begin, own_end).
        length: Elements of a slice.
        vector: Elements of 16 bytes.
    """

    unaligned: bool
    row: Array
    row_begin: Array | int
    row_end: Array | int
    first: Array
    own_begin: Array
    own_end: Array
    length: int
    vector: int

    @classmethod
    def of(cls, row: Array, rank: Array, rows: int, cols: int, length: int, vector: int) -> SliceBounds:
        """The bounds of one slice.

        Args:
            row, rank: Index of the row, and of the slice in the row.
            rows: Number of rows.
            cols: Elements of a row.
            length: Elements of a slice, a multiple of `vector`.
            vector: Elements of 16 bytes.
        """
        unaligned = cols % vector != 0
        begin = row * cols if unaligned else 0
        end = begin + cols
        low, high = begin // vector * vector, -(-end // vector) * vector
        mine = low + rank * length
        last = high - length
        if unaligned:
            # A slice that holds a whole row may hold 16 bytes more than this row needs.  They lie behind the row;
            # behind the last row there are none, so its slice begins earlier.
            last = jnp.maximum(last, jnp.minimum(low, rows * cols - length))
        first = jnp.minimum(mine, last)
        return cls(unaligned, row, begin, end, first, jnp.maximum(mine, begin) - first, end - first, length, vector)

    def place(self, array: Any, at: Array | int, columns: int) -> Any:
        """`columns` columns of the slice from column `at` on, in the matrix or the vector."""
        place = pl.ds(self.first + at, columns)
        return array.at[place] if self.unaligned else array.at[self.row, place]

    def tiles(self, start: int, stop: int, tile: int, overlap: bool) -> tuple[list[int], range]:
        """The first columns of the edge tiles, and the numbers of the inner tiles, which are reduced whole.

        Args:
            start, stop: Slice columns of a piece.  The first tile, and every tile but the last, begins at a multiple
                of `tile`.
            tile: Columns of a tile.
            overlap: True where the slice may overlap the slice before it.
        """
        whole, edges = stop // tile * tile, set()
        if start == 0 and (overlap or self.unaligned):
            edges.add(start)
        if stop > whole:
            edges.add(stop - tile)
        # The last slice of an unaligned row can end with fewer than `vector` foreign elements; a slice that holds the
        # whole row, with fewer than 2 * `vector`.
        if self.unaligned and stop == self.length and stop - whole < 2 * self.vector:
            edges.add(whole - tile)
        begin, end = start // tile + int(start in edges), whole // tile - int(whole - tile in edges)
        return sorted(edges), range(begin, max(begin, end))

    def owned(self, at: int, tile: int) -> tuple[Array, Array]:
        """Columns [begin, end) that the tile at slice column `at` reduces, so that no column is reduced twice."""
        return jnp.maximum(self.own_begin - at, -at % tile), self.own_end - at

    @property
    def whole(self) -> tuple[int, int]:
        """(first, number) of slice columns that are whole 16 bytes of the row, for every row."""
        return (2 * self.vector, self.length - 4 * self.vector) if self.unaligned else (0, self.length)

    def ends(self, columns: int) -> tuple[Array, ...]:
        """First slice columns of two ranges of `columns` columns, at the row's beginning and end in this slice.

        Together the ranges contain every column of the row in this slice that is not in `whole`.  Aligned rows have no
        such columns.
        """
        if not self.unaligned:
            return ()
        first, end = jnp.maximum(self.row_begin - self.first, 0), jnp.minimum(self.row_end - self.first, self.length)
        return first, end - columns


def pieces_of(length: int, tile: int, itemsize: int) -> list[tuple[int, int]]:
    """Bounds of the pieces of a slice: a power of two of pieces, of whole tiles; the last piece also has the rest."""
    count = max(1, min(length * itemsize // PIECE_BYTES, MOST_PIECES))
    count = 1 << count.bit_length() - 1
    bounds = [length // tile * piece // count * tile for piece in range(count)]
    return list(pairwise([*bounds, length]))
