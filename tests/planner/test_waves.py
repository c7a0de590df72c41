"""Forecasts beyond a change of the resident blocks, of a last wave of few rows, and of the best of many proposals."""

from __future__ import annotations

import pytest

from onlinesoftmax.core.device import known
from onlinesoftmax.core.problem import Problem
from onlinesoftmax.core.task import Choice
from onlinesoftmax.planner.fastest import anchors, forecast_for
from onlinesoftmax.planner.measured import Cell, Key, Table, Timing, table_for
from onlinesoftmax.planner.plan import plan
from onlinesoftmax.planner.strategies import TABLE, strategies_of
from onlinesoftmax.planner.variant import Variant

H100 = known("h100")


def table_of(key: Key, *cells: Cell) -> Table:
    """A table as if measured on an H100."""
    return Table("made up", "a test", H100.bandwidth, {key: list(cells)})


def test_a_block_that_becomes_alone_on_its_multiprocessor_is_slower_than_measured() -> None:
    """With 262208 columns, a thread holds one chunk more, so that a multiprocessor holds one block instead of two."""
    large, small = Variant(threads=512, blocks=8), Variant(threads=256, blocks=16)
    cell = Cell(1024, 262144, (Timing("cuda", "cluster", large, 360.0), Timing("cuda", "cluster", small, 362.0)))
    table = table_of(Key("softmax", True, 2, False), cell)
    measured, longer = (Problem("softmax", 1024, cols, "bfloat16") for cols in (262144, 262208))
    assert plan(measured, H100, table=table).variant == large
    assert plan(measured, H100, table=table).resident == 2
    assert plan(longer, H100, table=table).variant == small


def test_a_last_wave_of_few_rows_takes_a_part_of_a_whole_one() -> None:
    """A multiprocessor holds two blocks of 512 threads: 528 rows are two waves, 280 rows one wave and 16 rows more."""
    two, four = Variant(threads=512, chunks=2), Variant(threads=256, chunks=4)
    key, cols = Key("cross_entropy", False, 2, False), 1 << 18
    cell = Cell(528, cols, (Timing("cuda", "looped", two, 98.0), Timing("cuda", "looped", four, 100.0)))
    table = table_of(key, cell)
    assert plan(key.problem(528, cols, "bfloat16"), H100, table=table).variant == two
    assert plan(key.problem(280, cols, "bfloat16"), H100, table=table).variant == four


def test_a_last_tile_of_few_columns_takes_as_long_as_a_whole_one() -> None:
    """A block of 1024 threads streams 16384 float32 columns at a time: 16736 are two tiles."""
    large, small = Variant(threads=1024, chunks=4), Variant(threads=128, chunks=4)
    key = Key("cross_entropy", False, 4, False)
    table = table_of(
        key, Cell(2048, 16384, (Timing("cuda", "looped", large, 50.0), Timing("cuda", "looped", small, 52.0)))
    )
    forced = Choice("cuda", "looped")
    assert plan(key.problem(2048, 16384, "float32"), H100, forced, table=table).variant == large
    assert plan(key.problem(2048, 16736, "float32"), H100, forced, table=table).variant == small
    # The last column of an unaligned row is no tile.
    assert plan(key.problem(2048, 16385, "float32"), H100, forced, table=table).variant == large


def test_unaligned_rows_far_from_all_measured_ones_take_the_times_of_aligned_ones() -> None:
    far = [
        Cell(1024, cols, (Timing("cuda", "looped", Variant(threads=512, chunks=2), 90.0),)) for cols in (1001, 32001)
    ]
    near = Cell(1024, 4096, (Timing("cuda", "row", Variant(threads=256, lanes=256, depth=1), 10.0),))
    own = Key("cross_entropy_backward", True, 4, True)
    table = Table("made up", "a test", H100.bandwidth, {own: far, own._replace(unaligned=False): [near]})
    for cols, measured in ((4385, 4096), (1101, 1001), (30001, 32001)):
        nearest = anchors(table, own.problem(1024, cols, "float32"), ["cuda"])
        assert measured in {anchor.cell.cols for anchor in nearest}, cols


@pytest.mark.parametrize("name", ["h100", "h200"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("rows", "cols"), [(2048, 262208), (2048, 262152), (4096, 100277), (2048, 300000)])
def test_rows_beside_a_measured_length_are_not_given_to_lone_blocks(
    name: str, dtype: str, rows: int, cols: int
) -> None:
    """262208 columns are the vocabulary of Gemma 3, 100277 that of GPT-4."""
    device = known(name)
    chosen = plan(Problem("softmax", rows, cols, dtype), device, table=table_for(device))
    assert chosen.reads == 1
    assert chosen.resident > 1 or chosen.kernel, chosen


@pytest.mark.parametrize("rows", [1, 4096])
@pytest.mark.parametrize("operation", ["softmax", "logsumexp", "cross_entropy"])
def test_the_best_of_many_proposals_is_the_least_of_each(operation: str, rows: int) -> None:
    """Estimates of proposals that cannot win are left out; a proposal alone always has its own."""
    table = table_for(H100)
    assert table is not None
    compared = 0
    for cols in (5, 300, 4096, 30000, 100277, 1 << 22):
        problem = Problem(operation, rows, cols, "bfloat16")
        forecast = forecast_for(table, problem, H100, ("cuda", "triton", "eager"))
        assert forecast is not None
        for _, _, propose in strategies_of(problem.declaration, TABLE)[0]:
            options = propose(problem, H100)
            if isinstance(options, str) or len(options) < 2:
                continue
            alone = [forecast.best([option], propose) for option in options]
            least = min(alone, key=lambda plan: plan.rank_us)
            assert forecast.best(options, propose) == least
            compared += 1
    assert compared > 6
