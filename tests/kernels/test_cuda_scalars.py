"""Losses that the loss kernel itself reduces to a scalar, run by the host (tests/cuda_simulator.py)."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

import onlinesoftmax.core.device as devices
from cuda_targets import (
    KERNELS,
    LOSS,
    NUMBERS,
    PIPELINE,
    PROPOSALS,
    STRATEGY_COLS,
    STREAM,
    TOTAL,
    Ask,
    a_task,
    check,
    run,
    small_plan,
    some_values,
)
from onlinesoftmax.core.problem import Problem
from onlinesoftmax.core.task import Choice
from onlinesoftmax.kernels.cuda import arguments, source
from onlinesoftmax.kernels.request import Request
from onlinesoftmax.planner.plan import plan
from onlinesoftmax.torch.loss_kernels import MOST_BYTES_IN_ONE_LAUNCH, MOST_ROWS_IN_ONE_LAUNCH
from pairs import rest_exhaustive

SCALARS = [
    Ask(LOSS, ("mean_loss", "y"), ("ignore_index",)),
    Ask(LOSS, ("mean_loss",), ("weight", "ignore_index")),
    Ask(LOSS, ("total_loss", "y")),
]


@pytest.mark.parametrize(("strategy", "ask"), rest_exhaustive(itertools.product(PROPOSALS, SCALARS)), ids=str)
def test_scalars_of_many_rows(strategy: str, ask: Ask, folder: Path) -> None:
    """Numbers of rows around those that the threads of a block load at once; every run gives the same bits.

    Dtypes take turns.  The simulation of blocks that run together is slow, so `cluster` and `grid` get few rows: all
    strategies count and add by the same code.
    """
    dtype = ("float64", "bfloat16")[(list(PROPOSALS).index(strategy) + SCALARS.index(ask)) % 2]
    batch = source.BATCH * 32 * small_plan(strategy, 1, STRATEGY_COLS[strategy][1], dtype, True, True).warps
    several = {"row": (batch - 1, batch, 2 * batch + 1), "looped": (batch + 1,)}
    for rows in (1, *several.get(strategy, (7,))):
        cols = min(STRATEGY_COLS[strategy][1], 48)
        task = a_task(ask, rows, cols, dtype)
        request = Request(task, small_plan(strategy, rows, cols, dtype, True, True))
        values = some_values(ask, task, np.arange(rows) % cols)
        first = run(ask, request, values, folder)
        check(ask, request, values, first)
        again = run(ask, request, values, folder)
        assert all(np.array_equal(again[name], y, equal_nan=True) for name, y in first.items())


@pytest.mark.parametrize("weight", [(), ("weight",)], ids=str)
def test_scalars_of_no_loss(weight: tuple[str, ...], folder: Path) -> None:
    """All rows ignored: 0 / 0 is NaN, as in PyTorch.  A target that is no column, or a NaN, makes the scalar NaN."""
    cols, ignored = 40, int(NUMBERS["ignore_index"])
    for scalar, targets in ((TOTAL, [ignored] * 7), ("mean_loss", [ignored] * 7), ("mean_loss", [1, cols, 2])):
        ask = Ask(LOSS, (scalar, "y"), ("ignore_index", *weight))
        task = a_task(ask, len(targets), cols, "float32")
        request = Request(task, small_plan("row", len(targets), cols, "float32", True, True))
        values = some_values(ask, task, np.array(targets))
        found = run(ask, request, values, folder)
        assert found[scalar] == 0 if scalar == TOTAL else np.isnan(found[scalar])
        if targets[0] == ignored:
            assert (found["y"] == 0).all()


SMALL = 16
"""Rows of a segment in the tests of several segments, so that few rows are enough."""

SEVERAL = [
    Ask(LOSS, ("mean_loss", "y"), ("weight", "ignore_index")),
    Ask(LOSS, ("mean_loss",), ("ignore_index",)),
    Ask(LOSS, (TOTAL, "y"), ("weight",)),
]


@pytest.mark.parametrize(("kernel", "ask"), rest_exhaustive(itertools.product(KERNELS, SEVERAL)), ids=str)
def test_scalars_of_several_segments(kernel: str, ask: Ask, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of a few rows, and any number of blocks that count, in turn; `grid` has six blocks in all.

    The simulator runs the blocks of `row` and `looped`, and the clusters, one after another, so a block that waits for
    a later one never ends.
    """
    turn = KERNELS.index(kernel) + SEVERAL.index(ask)
    if kernel in (PIPELINE, STREAM) and "y" not in ask.outputs:
        ask = ask._replace(outputs=(*ask.outputs, "y"))
    monkeypatch.setattr(source, "SEGMENT", SMALL)
    several, most = 2 * SMALL + 1, 6 if kernel.startswith("grid") else 32
    rows, dtype, counters = ((SMALL, "float64", 1), (several, "bfloat16", 3), (several, "float64", most))[turn % 3]
    monkeypatch.setattr(source, "counters", lambda _: counters if "mean_loss" in ask.outputs else 0)
    cols = STRATEGY_COLS[kernel][1]
    task = a_task(ask, rows, cols, dtype)
    request = Request(task, small_plan(kernel, rows, cols, dtype, True, True))
    values = some_values(ask, task, np.arange(rows) % cols)
    check(ask, request, values, run(ask, request, values, folder))


@pytest.mark.parametrize("ask", SEVERAL, ids=str)
@pytest.mark.parametrize("strategy", ["row", "looped"])
def test_blocks_at_once_give_the_bits_of_blocks_in_turn(
    strategy: str, ask: Ask, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "SEGMENT", SMALL)
    monkeypatch.setattr(source, "counters", lambda _: 3 if "mean_loss" in ask.outputs else 0)
    rows, cols = 3 * SMALL - 1, STRATEGY_COLS[strategy][1]
    task = a_task(ask, rows, cols, "float64")
    request = Request(task, small_plan(strategy, rows, cols, "float64", True, True))
    values = some_values(ask, task, np.arange(rows) % cols)
    in_turn = run(ask, request, values, folder)
    for _ in range(5):
        at_once = run(ask, request, values, folder, at_once=True)
        assert all(np.array_equal(at_once[name], y) for name, y in in_turn.items())


def planned(ask: Ask, rows: int, cols: int, dtype: str, strategy: str) -> Request:
    """A request with the plan for an H200."""
    task = a_task(ask, rows, cols, dtype)
    return Request(task, plan(Problem.of(task, False), devices.known("h200"), Choice("cuda", strategy, False)))


SHAPES = {"row": (65536, 1024), "cluster": (512, 100000), "grid": (64, 1 << 20), "looped": (8192, 128256)}


@pytest.mark.parametrize("strategy", SHAPES)
def test_blocks_that_count(strategy: str) -> None:
    """Only a mean has them.  Clusters stay whole, and the teams of `grid` count themselves."""
    for ask in SEVERAL:
        for rows in (1, 1000, SHAPES[strategy][0]):
            request = planned(ask, rows, SHAPES[strategy][1], "bfloat16", strategy)
            blocks, team, *_ = arguments.configuration(request)
            owners, counters = request.plan.programs, source.counters(request)
            assert counters == 0 if ask.outputs[0] == TOTAL else 1 <= counters <= source.COUNTERS
            if strategy == "grid":
                assert blocks * team == owners >= counters
            else:
                cluster = request.plan.splits if strategy == "cluster" else 1
                assert owners + counters <= blocks < owners + counters + cluster
                assert blocks % cluster == 0


def test_the_kernel_says_which_losses_it_reduces() -> None:
    [limits] = re.findall(r"(\d+) rows,\n//\s+(\d+) MiB", source.text("row/scalar_loss.cuh"))
    assert [int(limit) for limit in limits] == [MOST_ROWS_IN_ONE_LAUNCH, MOST_BYTES_IN_ONE_LAUNCH >> 20]
