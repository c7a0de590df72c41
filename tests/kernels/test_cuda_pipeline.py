"""The kernels of the CUDA strategy `grid` that load through a ring, run by the host (tests/cuda_simulator.py).

Lengths lie around the ends of tiles, slices and chunks, rows begin at every offset from 16 bytes, and a team holds from
one row to several.  The kernel that streams tiles gets rows that just fit on chip, and longer ones.  The reference is
float64, and what lies between the rows must stay as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from cuda_targets import Ask, a_task, expected, run, some_values
from onlinesoftmax.core.task import ITEMSIZE
from onlinesoftmax.kernels.cuda.strategy.blocks import slice_tiles
from onlinesoftmax.kernels.cuda.strategy.grid.ring_proposals import SPECIAL_WARPS
from onlinesoftmax.kernels.request import Request
from onlinesoftmax.planner.plan import Plan
from pairs import rest_exhaustive

WARPS, TEAMS = 2, 2
"""Warps of a block that hold rows; teams of a launch."""


class Sizes(NamedTuple):
    """Blocks of a team, tiles of a slice, chunks of a thread in a tile, and stages of the ring."""

    team: int
    tiles: int
    depth: int
    stages: int


SIZES = [Sizes(3, 2, 2, 3), Sizes(2, 1, 1, 5), Sizes(1, 3, 1, 4)]


def lengths(sizes: Sizes, vector: int) -> list[int]:
    """Columns of rows whose slices have that many tiles: around the first and the last, and one between."""
    tile = sizes.team * sizes.depth * 32 * WARPS * vector
    ends = (tile * (sizes.tiles - 1) + 1, tile * sizes.tiles - tile // 3, tile * sizes.tiles)
    found = {max(vector, end + more) for end in ends for more in (-1, 0, vector - 1)}
    lanes = 32 * WARPS * sizes.depth
    return sorted(n for n in found if slice_tiles(n // vector, sizes.team, lanes) == sizes.tiles)


def streamed_lengths(sizes: Sizes, vector: int) -> list[int]:
    """Columns of rows of which blocks stream no tile, one, or a few; some blocks may stream one more than others."""
    tile = sizes.depth * 32 * WARPS * vector
    on_chip = (sizes.tiles + sizes.stages) * sizes.team
    return [on_chip * tile - 1, on_chip * tile + vector, (on_chip + sizes.team + 1) * tile - 3, 3 * on_chip * tile + 1]


def check(
    operation: str, dtype: str, sizes: Sizes, rows: int, cols: int, terms: bool, folder: Path, streams: bool = False
) -> None:
    """Run a kernel, and compare elements and the per-row output with the reference."""
    ask = Ask(operation, ("y", "lse") if operation == "softmax" else ("y",))
    lanes, vector = 32 * WARPS, 16 // ITEMSIZE[dtype]
    plan = Plan(
        sizes.team * TEAMS, sizes.tiles * sizes.depth * lanes * vector, depth=sizes.depth, warps=WARPS + SPECIAL_WARPS,
        stages=sizes.stages, splits=sizes.team, vector=vector, lanes=lanes, shared=sizes.stages * sizes.depth,
        terms=terms, kernel="stream" if streams else "pipeline", backend="cuda", strategy="grid", reads=1 + streams,
    )  # fmt: skip
    task = a_task(ask, rows, cols, dtype, stride=cols + 1 - cols % 2)
    request = Request(task, plan)
    values = some_values(ask, task, np.zeros(rows, np.int64), seed=cols)
    found = run(ask, request, values, folder)
    y, right = found["y"], expected(ask, values, "y")
    # Sums of some thousand numbers, and one more rounding of an element of 16 bits.
    unit = {"bfloat16": 2.0**-8, "float32": 2.0**-20, "float64": 2.0**-48}[dtype]
    assert (np.abs(y - right) <= unit * (np.abs(right) + 1e-3 * np.abs(right).max())).all()
    if "lse" in found:
        lse = expected(ask, values, "lse")
        assert np.abs(found["lse"] - lse).max() <= 2.0**-18 * np.abs(lse).max()


CASES = [("softmax", "bfloat16", False), ("softmax", "float32", True), ("softmax_backward", "bfloat16", False)]
CASES += [("softmax", "float64", True), ("softmax_backward", "float32", False)]


@pytest.mark.parametrize(
    ("operation", "dtype", "terms", "sizes"),
    rest_exhaustive((*case, sizes) for case in CASES for sizes in SIZES),
    ids=str,
)
def test_rows_of_every_length(operation: str, dtype: str, terms: bool, sizes: Sizes, folder: Path) -> None:
    # One row, two rows of one team, and enough rows to use every slot for messages and every phase of the ring again.
    # Each of the three meets each length in one of CASES.
    turn = CASES.index((operation, dtype, terms))
    for i, cols in enumerate(lengths(sizes, 16 // ITEMSIZE[dtype])):
        check(operation, dtype, sizes, (1, 3, 17)[(i + turn) % 3], cols, terms, folder)


STREAMED = Sizes(3, 2, 1, 3), Sizes(2, 1, 2, 2)


@pytest.mark.parametrize(
    ("operation", "dtype", "sizes"),
    rest_exhaustive((*case[:2], sizes) for case in CASES for sizes in STREAMED),
    ids=str,
)
def test_rows_that_do_not_fit_on_chip(operation: str, dtype: str, sizes: Sizes, folder: Path) -> None:
    # Three rows of a team use both slots of every exchange, and one of them again; a single row takes turns with them.
    turn = [case[:2] for case in CASES].index((operation, dtype))
    for i, cols in enumerate(streamed_lengths(sizes, 16 // ITEMSIZE[dtype])):
        check(operation, dtype, sizes, (1, 5)[(i + turn) % 2], cols, False, folder, streams=True)
