"""The elements that each Pallas program owns: every element of a row is counted once, and written where it lies.

The kernels of `cluster` only run on a GPU, and the others mask their loads, so a wrong bound may change no result in
the interpreter.  These tests run the functions that decide on bounds, over all residues of lengths and alignments.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jaxlib", reason="jax is not installed")

import jax
import jax.numpy as jnp

from onlinesoftmax.core.device import known
from onlinesoftmax.core.options import PLAIN
from onlinesoftmax.core.task import Choice
from onlinesoftmax.jax import custom_op
from onlinesoftmax.jax.signature import Signature
from onlinesoftmax.kernels.pallas import looped, row, split
from onlinesoftmax.kernels.pallas.bounds import PIECE_BYTES, SliceBounds, pieces_of
from onlinesoftmax.kernels.pallas.formulas import Op
from onlinesoftmax.kernels.pallas.operands import Operands, Tile
from onlinesoftmax.planner.plan import Plan
from pairs import rest_exhaustive

H200 = known("h200")
ROWS = 16
"""As many rows as 16-bit elements in two vectors: rows of an odd length then begin at every alignment."""

RESIDUES = (*range(1, 18), *range(508, 525), *range(1021, 1030), *range(8190, 8200), 20001, 20006)
"""Row lengths: every residue modulo 16 bytes, below and above the lengths from which unaligned rows are split."""


def planned(cols: int, dtype: str, strategy: str, rows: int = ROWS) -> Plan:
    operands = {"x": jax.ShapeDtypeStruct((rows, cols), jnp.dtype(dtype))}
    return custom_op.plan_for(Signature("softmax", ("y",), choice=Choice("pallas", strategy)), operands, H200)


def row_tiles(operands: Operands, plan: Plan) -> list[Tile]:
    """The tiles of all programs; each attribute has one more axis, of the programs."""
    shape = (plan.rows_per_program, plan.block)
    first = jnp.arange(plan.programs, dtype=jnp.int32) * shape[0]
    return jax.vmap(lambda one: [tile._replace(at=()) for tile in row.tiles_of(operands, one, shape)])(first)


def looped_tiles(operands: Operands, plan: Plan) -> list[Tile]:
    return _slices(operands, plan.block, 1, looped.tiles_of(operands, plan.block))


def split_tiles(operands: Operands, plan: Plan) -> list[Tile]:
    return _slices(operands, plan.block, plan.splits, split.depth_of(operands, plan.block, plan.splits))


def _slices(operands: Operands, block: int, splits: int, depth: int) -> list[Tile]:
    """The tiles of all rows, slice by slice; the first slice has the head and the tail of an unaligned row."""
    rows = jnp.arange(operands.rows, dtype=jnp.int32)

    def of_row(r: Any) -> list[Tile]:
        tiles = [looped.tile_of(operands, r, i, block) for i in range(splits * depth)]
        tiles += [edge for part in range(splits) for edge in operands.edges(r, part == 0)]
        return [tile._replace(at=()) for tile in tiles]

    return jax.vmap(of_row)(rows)


TILES = {"row": row_tiles, "looped": looped_tiles, "split": split_tiles}


@pytest.mark.parametrize(("strategy", "dtype"), rest_exhaustive(itertools.product(TILES, ("bfloat16", "float32"))))
def test_programs_count_each_element_once(strategy: str, dtype: str) -> None:
    for cols in RESIDUES:
        plan = planned(cols, dtype, strategy)
        x = jax.ShapeDtypeStruct((ROWS, cols), jnp.dtype(dtype))
        operands = Operands.of(Op("softmax"), {"x": x}, PLAIN, plan.vector)
        counted = np.zeros(ROWS * cols, int)
        for tile in TILES[strategy](operands, plan):
            inside = np.asarray(tile.inside)
            rows, columns = (np.broadcast_to(np.asarray(t), inside.shape)[inside] for t in (tile.row, tile.column))
            counted += np.bincount(rows * cols + columns, minlength=counted.size)
        assert (counted == 1).all(), (cols, plan)


@pytest.mark.parametrize("vector", [4, 8])
def test_tiles_of_unaligned_rows_lie_where_their_elements_lie(vector: int) -> None:
    block, rows = 128, jnp.arange(2 * vector, dtype=jnp.int32)
    for cols in (*range(2 * vector, 4 * vector + 1), 519, 1023, 1025):
        held = np.zeros(len(rows) * cols, int)
        tiles = [
            jax.vmap(lambda r, at=at, cols=cols: Tile.of_body(r, jnp.int32(at), block, cols, vector))(rows)
            for at in range(0, cols, block)
        ]
        for at, inside in ((np.asarray(tile.at), np.asarray(tile.inside)) for tile in tiles):
            # Triton has to see one mask value for 16 bytes that begin on 16 bytes.
            assert (at[..., ::vector] % vector == 0).all()
            assert (inside.reshape(-1, vector).all(1) == inside.reshape(-1, vector).any(1)).all()
        edges = jax.vmap(lambda r, cols=cols: Tile.of_edges(r, cols, vector, True))(rows)
        for tile in (*tiles, edges):
            inside = np.asarray(tile.inside)
            at, column = (np.asarray(t)[inside] for t in (tile.at, tile.column))
            row_of = np.broadcast_to(np.asarray(tile.row), inside.shape)[inside]
            np.testing.assert_array_equal(at, row_of * cols + column)
            held[at] += 1
        assert (held == 1).all(), cols


LENGTHS = {
    "bfloat16": (1024, *range(4089, 4106), 5001, 8191, 8192, 17408, 17409, *range(50249, 50266)),
    "float32": (1024, *range(4093, 4102), 5001, 8191, 8192, 17408, 17409, *range(50253, 50262)),
}
"""Row lengths of `cluster`: one slice and several, every residue modulo 16 bytes around two lengths."""


@pytest.mark.parametrize("piece_bytes", [PIECE_BYTES, 4096])
@pytest.mark.parametrize("dtype", LENGTHS)
def test_slices_count_each_element_once_and_lie_in_the_array(
    dtype: str, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onlinesoftmax.kernels.pallas.bounds.PIECE_BYTES", piece_bytes)
    for cols in LENGTHS[dtype]:
        check_slices(cols, jnp.dtype(dtype).itemsize, planned(cols, dtype, "cluster"), piece_bytes)


def check_slices(cols: int, itemsize: int, plan: Plan, piece_bytes: int) -> None:
    vector, length, size = 16 // itemsize, plan.block, plan.splits
    tile, total = 128 * vector, ROWS * cols
    pieces = pieces_of(length, tile, itemsize)
    assert (len(pieces) > 1) == (length * itemsize >= 2 * piece_bytes)
    counted, written = np.zeros(total + 1, int), np.zeros(total + 1, int)

    def mark(where: Any, begin: Any, end: Any) -> None:
        """Count the elements [begin, end) of every slice, by the differences of the counts."""
        np.add.at(where, np.asarray(begin), 1)
        np.add.at(where, np.asarray(end), -1)

    rows, ranks = (index.reshape(-1) for index in np.mgrid[:ROWS, :size])
    bounds = SliceBounds.of(rows, ranks, ROWS, cols, length, vector)
    first = np.asarray(bounds.first) + (0 if bounds.unaligned else rows * cols)
    assert (first % vector == 0).all()
    assert ((first >= 0) & (first <= total - length)).all()
    for start, stop in pieces:
        edges, inner = bounds.tiles(start, stop, tile, size * length > cols)
        for at in edges:
            assert start <= at <= stop - tile
            begin, end = (np.broadcast_to(np.asarray(column), first.shape) for column in bounds.owned(at, tile))
            assert (begin >= 0).all()
            mark(counted, first + at + begin, first + at + np.maximum(np.minimum(end, tile), begin))
        mark(counted, first + inner.start * tile, first + inner.stop * tile)
    at, count = bounds.whole
    for begin, end in ((at, at + count), *((np.asarray(e), np.asarray(e) + 128) for e in bounds.ends(128))):
        assert (np.asarray(begin) >= 0).all()
        assert (np.asarray(end) <= length).all()
        assert ((rows * cols <= first + begin) & (first + begin < first + end)).all()
        assert (first + end <= rows * cols + cols).all()
        mark(written, first + begin, first + end)
    assert (counted.cumsum()[:-1] == 1).all(), cols
    assert (written.cumsum()[:-1] >= 1).all(), cols
