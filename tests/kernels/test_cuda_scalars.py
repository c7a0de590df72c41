"""Losses that the loss kernel itself reduces to a scalar, run by the host (tests/cuda_simulator.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cuda_simulator import COMPILER
from cuda_targets import (
    LOSS,
    NUMBERS,
    PROPOSALS,
    STRATEGY_COLS,
    TOTAL,
    Ask,
    a_task,
    check,
    run,
    small_plan,
    some_values,
)
from onlinesoftmax.kernels.request import Request

SCALARS = [
    Ask(LOSS, ("mean_loss", "y"), ("ignore_index",)),
    Ask(LOSS, ("mean_loss",), ("weight", "ignore_index")),
    Ask(LOSS, ("total_loss", "y")),
]


@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("ask", SCALARS, ids=str)
@pytest.mark.parametrize("strategy", PROPOSALS)
def test_scalars_of_many_rows(strategy: str, ask: Ask, dtype: str, folder: Path) -> None:
    """Numbers of rows around those that the threads of a block load at once; every run gives the same bits.

    The simulation of blocks that run together is slow, so `cluster` and `grid` get few rows: all strategies count and
    add by the same code.
    """
    batch = 8 * 32 * small_plan(strategy, 1, STRATEGY_COLS[strategy][1], dtype, True, True).warps
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


@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
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
