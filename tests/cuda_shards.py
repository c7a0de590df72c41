"""CUDA kernels of several processes that share rows, run by the host at the same time (tests/cuda_simulator.py)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cuda_simulator import simulate
from cuda_targets import NUMBERS, Ask, Values, a_task, aligned, from_bits, small_plan, to_bits
from onlinesoftmax.core.task import ColumnRange
from onlinesoftmax.kernels.request import Request

POISON = 8192.0

MAIL_WORDS = 1 << 14
"""64-bit words of the mailboxes of a process."""


class Shard(NamedTuple):
    """One process's part of the rows of a call.

    Attributes:
        strategy: The kernel that takes it.
        first, end: Its columns [first, end) of the whole row.  A process without columns has one, past the end, which
            its kernel neither reads nor writes.
    """

    strategy: str
    first: int
    end: int


def shards_of(strategies: Sequence[str], cuts: Sequence[int]) -> list[Shard]:
    """The shards between two cuts each."""
    return [
        Shard(strategy, first if end > first else cuts[-1], end if end > first else cuts[-1] + 1)
        for strategy, first, end in zip(strategies, cuts[:-1], cuts[1:], strict=True)
    ]


def requests_of(ask: Ask, rows: int, dtype: str, shards: Sequence[Shard], total: int, terms: bool) -> list[Request]:
    """The request of each process; every row of a shard begins at another offset from 16 bytes."""
    found = []
    for process, (strategy, first, end) in enumerate(shards):
        cols = end - first
        task = a_task(ask, rows, cols, dtype, cols + 1 - cols % 2)
        part = ColumnRange(first, total, process, len(shards), "mail")
        task = replace(task, part=part)
        found.append(Request(task, small_plan(strategy, rows, cols, dtype, True, terms)))
    return found


def run_shards(
    requests: Sequence[Request], values: Values, folder: Path, mail: Sequence[NDArray[Any]], number: int = 1
) -> list[Values]:
    """The outputs of each process in float64.

    Args:
        requests: The request of each process.
        values: Every operand of the whole rows, as in `cuda_targets.some_values`.
        folder: Where to put the shared libraries.
        mail: The mailboxes of each process, and its numbers of launches behind them.
        number: The number of this launch among those that the host makes; 0 as in a CUDA graph.
    """
    arrays = [_arrays(request, values) for request in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        runs = []
        for request, given in zip(requests, arrays, strict=True):
            numbers = {name: NUMBERS[name] for name in request.task.numbers}
            runs.append(pool.submit(simulate, request, given, numbers, folder, shard_mail=mail, number=number))
        for one in runs:
            one.result()
    return [_outputs(request, given) for request, given in zip(requests, arrays, strict=True)]


def _arrays(request: Request, values: Values) -> Values:
    """The memory of every tensor of a request."""
    task = request.task
    assert task.part is not None
    first, end, total = task.part.first, task.part.first + task.cols, task.part.total
    stride = task.tensors["x"].outer[0] or task.cols
    arrays: Values = {}
    for name, dtype in task.dtypes.items():
        if name in ("x", "dy") and name in values and values[name].shape[1] == total:
            memory = np.full((task.rows, stride), POISON)
            if first < total:
                memory[:, : task.cols] = values[name][:, first:end]
            arrays[name] = aligned(to_bits(memory, dtype))
        elif name in task.outputs:
            shape = (task.rows, stride) if task.operation.output(name).kind == "element" else task.rows
            arrays[name] = aligned(to_bits(np.full(shape, POISON), dtype))
        elif name in ("weight", "bias"):
            # The weights of a shard lie among those of all classes.
            padded = np.r_[values[name], np.zeros(1)]
            arrays[name] = to_bits(padded, dtype)[first:]
        elif name == "mask":
            arrays[name] = np.ascontiguousarray(np.c_[values[name], values[name][:, :1]][:, first:end])
        else:
            arrays[name] = to_bits(values[name], dtype)
    return arrays


def _outputs(request: Request, arrays: Values) -> Values:
    task, cols = request.task, request.task.cols
    found: Values = {}
    for name in task.outputs:
        y = from_bits(arrays[name], task.dtypes[name])
        if y.ndim == 2:
            assert task.part is not None
            written = cols if task.part.first < task.part.total else 0
            assert (y[:, written:] == POISON).all(), "elements past the end of a row are written"
            y = y[:, :cols]
        found[name] = y.reshape(request.task.rows, -1)
    return found
