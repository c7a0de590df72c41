"""Kernels of several GPUs that share rows, run by the host (tests/cuda_shards.py), against whole rows in float64."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuda_shards import MAIL_WORDS, Shard, requests_of, run_shards, shards_of
from cuda_simulator import set_words_of
from cuda_targets import (
    LOGPROB,
    LOGPROB_BACKWARD,
    LOSS,
    LOSS_BACKWARD,
    PIPELINE,
    SMOOTH,
    STREAM,
    Ask,
    a_task,
    assert_near,
    expected,
    some_values,
)
from onlinesoftmax.kernels.cuda.messages import COPIES, LINE_WORDS, SETS
from onlinesoftmax.ops import OPERATIONS
from pairs import rest_exhaustive, with_every_pair

ASKED = [
    Ask("softmax", ("y", "lse")),
    Ask("log_softmax", ("y",), (), ("scale", "mask", "zero")),
    Ask("logsumexp", ("y", "m", "l"), (), ("softcap",)),
    Ask("softmax_backward", ("y",)),
    Ask("log_softmax_backward", ("y",)),
    Ask(LOSS, ("loss", "y"), ("dy", "ignore_index")),
    Ask(LOSS, ("loss", "y"), ("dy", *SMOOTH, "z_loss"), ("scale",)),
    Ask(LOSS, ("loss", "y", "largest"), ("dy", "weight"), ("scale", "softcap")),
    Ask(LOSS, ("loss", "m", "l", "largest"), ("smoothing", "ignore_index")),
    Ask(LOSS_BACKWARD, ("y",), (*SMOOTH, "z_loss"), ("scale", "softcap")),
    Ask(LOGPROB, ("y", "lse", "entropy"), (), ("scale", "mask")),
    Ask(LOGPROB_BACKWARD, ("y",), ("dlse", "entropy", "dentropy"), ("scale", "softcap")),
]

CUTS = {
    "row": (0, 20, 37), "cluster": (0, 70, 133), "looped": (0, 150, 293), "grid": (0, 611, 1000),
    PIPELINE: (0, 611, 1222), STREAM: (0, 2021, 4042),
}  # fmt: skip
"""Columns at which the rows are cut for the kernels of each strategy."""


def _cells() -> list[Any]:
    """Every strategy meets every output, operand and option; dtypes and kept terms take turns.

    Few cells have what formulas treat together: every pair of an operation, outputs, operands and options.
    """
    cells: list[tuple[str, Ask, str, bool]] = []
    for (i, strategy), (j, ask) in itertools.product(enumerate(CUTS), enumerate(ASKED)):
        operation = OPERATIONS[ask.operation]
        writes = any(operation.output(name).kind == "element" for name in ask.outputs)
        if strategy in (PIPELINE, STREAM) and (not writes or not operation.reduces or "mask" in ask.options):
            # These kernels are for operations that reduce rows and write elements, without a mask.
            continue
        dtype = ("float32", "bfloat16", "float64")[(i + j) % 3]
        cells.append((strategy, ask, dtype, j % 2 == 0))
    chosen = with_every_pair(cells, lambda cell: (*cell[:1], *cell[2:], *cell[1].features()))
    return rest_exhaustive(chosen, lambda cell: (*cell[1].pairs(), cell[0], *enumerate(cell[2:])))


def _compare(ask: Ask, shards: list[Shard], total: int, values: Any, found: list[Any], dtypes: Any) -> None:
    """Every process against float64, and the results of the rows against those of the first process."""
    accumulator = "float64" if dtypes["x"] == "float64" else "float32"
    for name in ask.outputs:
        right = expected(ask, values, name)
        for shard, outputs in zip(shards, found, strict=True):
            y, part = outputs[name], right
            if right.shape[1] == total:
                part = right[:, shard.first : shard.end]
                if shard.first == total:
                    continue
            else:
                np.testing.assert_array_equal(y, found[0][name], "the processes have different bits")
            if name == "largest":
                np.testing.assert_array_equal(y, part)
                continue
            assert_near(f"{name} of {shard}", y, part, accumulator, dtypes[name], values["x"])


def _check(ask: Ask, shards: list[Shard], total: int, dtype: str, terms: bool, folder: Path) -> None:
    every = np.arange(total) if total < 100 else np.r_[0:9, shards[0].end - 3 : shards[0].end + 4, total - 9 : total]
    # Two targets of the last four are columns of no process.
    targets = np.r_[every, -100, -1, total, 1 << 40].astype(np.int64)
    values = some_values(ask, a_task(ask, len(targets), total, dtype), targets)
    requests = requests_of(ask, len(targets), dtype, shards, total, terms)
    mail = [np.zeros(MAIL_WORDS, np.uint64) for _ in shards]
    _compare(ask, shards, total, values, run_shards(requests, values, folder, mail), requests[0].task.dtypes)


@pytest.mark.parametrize(("strategy", "ask", "dtype", "terms"), _cells(), ids=str)
def test_two_shards(strategy: str, ask: Ask, dtype: str, terms: bool, folder: Path) -> None:
    """Every column beside a cut is the target of a row; others are ignored, or columns of no process."""
    cuts = CUTS[strategy]
    _check(ask, shards_of((strategy, strategy), cuts), cuts[-1], dtype, terms, folder)


@pytest.mark.parametrize(
    ("ask", "dtype"),
    rest_exhaustive(itertools.product((ASKED[0], ASKED[5], ASKED[6]), ("float32", "bfloat16"))), ids=str,
)  # fmt: skip
def test_processes_with_different_kernels(ask: Ask, dtype: str, folder: Path) -> None:
    """Three processes with different strategies; the last has no column."""
    shards = shards_of(("looped", "row", "row"), (0, 293, 330, 330))
    _check(ask, shards, 330, dtype, True, folder)


@pytest.mark.parametrize(
    ("strategy", "first"), rest_exhaustive(zip(CUTS, (0, 2**31 - 4) * 3, strict=True), lambda cell: cell[1:])
)
def test_successive_launches_use_two_sets_of_mailboxes_in_turn(strategy: str, first: int, folder: Path) -> None:
    """Launches of different operations, whose messages have different lengths, without clearing a mailbox.

    The host numbers some; the others are like those of a CUDA graph, which a small kernel counts.  From the larger
    first number on, the tags begin again.
    """
    mail = [np.zeros(MAIL_WORDS, np.uint64) for _ in range(2)]
    end = SETS * set_words_of(mail[0])
    by_host, by_replays = (slice(end + i, end + COPIES * LINE_WORDS, LINE_WORDS) for i in range(2))
    for box in mail:
        box[by_host] = first
    shards, total = shards_of((strategy, strategy), CUTS[strategy]), CUTS[strategy][-1]
    for launch, (which, replayed) in enumerate(((0, False), (5, True), (0, True), (6, False), (5, False), (0, True))):
        ask = ASKED[which]
        values = some_values(ask, a_task(ask, 20, total, "float32"), np.arange(20))
        requests = requests_of(ask, 20, "float32", shards, total, which % 2 == 0)
        before = [box.copy() for box in mail]
        number = 0 if replayed else int(mail[0][end]) + 1
        found = run_shards(requests, values, folder, mail, number)
        _compare(ask, shards, total, values, found, requests[0].task.dtypes)
        for box, old in zip(mail, before, strict=True):
            assert (box[by_host] == old[by_host] + (not replayed)).all()
            used = np.flatnonzero((box != old)[:end]) // (end // SETS)
            assert set(used.tolist()) == {(first + launch + 1) % SETS}
            box[by_replays] += replayed
