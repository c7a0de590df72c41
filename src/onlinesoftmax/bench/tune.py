"""What `onlinesoftmax tune` does: time all proposals of the CUDA strategies over a grid of shapes, keep the fastest."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

from ..core.device import Device
from ..core.operations import OPERATIONS
from ..core.problem import Problem
from ..core.task import ITEMSIZE, Task, contiguous_spec, row_spec, task_of
from ..kernels.request import Request
from ..planner import strategies
from ..planner.measured import Cell, Key, Table, Timing, key_of
from ..planner.plan import price
from .timing import CudaClock

BACKEND = "cuda"
"""The backend whose strategies have more than one proposal."""

FULL_BYTES = 1 << 27
"""Bytes of an input that is as large as the measurement needs: several times any L2."""

SHORT = 1 << 18
"""Columns up to which steps are of 1.5 and 1.33; longer rows are fewer, in steps of 2 and 4."""

FEW_ROWS = (1, 16, 128, 1024, 8192)
"""Rows that are measured beside those of a full input, where columns are a power of two."""

VOCABULARIES = (32000, 50256, 128256, 151936, 256000)
"""Columns of language models' logits; GPT-2's 50257 is among them with its rows that begin anywhere."""

KEPT = 1.5
"""A strategy is kept in the table for a shape where it takes no longer than the fastest by this factor."""

CLOSE = 1.05
"""A proposal that is slower than the fastest of its strategy by less may be the faster one."""


class Shape(NamedTuple):
    """A shape to measure."""

    operation: str
    dtype: str
    rows: int
    cols: int


def shapes(quick: bool = False) -> list[Shape]:
    """The grid; `quick` is a small part of it that shows whether all works."""
    if quick:
        return [Shape("softmax", dtype, 1024, cols) for dtype in ("bfloat16", "float32") for cols in (256, 4096, 65536)]
    powers, between = [64 << i for i in range(13)], [96 << i for i in range(12)]
    between += VOCABULARIES
    long = [1 << i for i in (19, 20, 21, 22, 23, 24, 26, 28)]
    found = []
    for operation in ("softmax", "logsumexp", "softmax_backward"):
        for dtype in ("bfloat16", "float32"):
            # What gives one number a row has little to choose.
            short = powers if operation == "logsumexp" else powers + between
            for cols in sorted(short + long):
                full = max(FULL_BYTES // (cols * ITEMSIZE[dtype]), 1)
                few_rows = [few for few in FEW_ROWS if 4 * few <= full and cols not in between]
                found += [Shape(operation, dtype, few, cols) for few in few_rows]
                found.append(Shape(operation, dtype, full, cols))
                if cols <= SHORT and operation == "softmax":
                    # Rows that begin anywhere.
                    found.append(Shape(operation, dtype, full, cols + 1))
    return found


def task(shape: Shape) -> Task:
    """The task of a shape, all of its tensors contiguous."""
    operation, sizes = OPERATIONS[shape.operation], (shape.rows, shape.cols)
    whole, per_row = contiguous_spec(sizes, shape.dtype), row_spec(sizes, 1, shape.dtype)
    written = operation.written(operation.always)
    kinds = {t.name: t.kind for t in operation.operands} | {t.name: t.kind for t in written}
    tensors = {name: whole if kind == "element" else per_row for name, kind in kinds.items()}
    return task_of(operation, operation.always, sizes, 1, tensors)


def proposals(shape: Shape, device: Device) -> list[Request]:
    """All that the CUDA strategies propose for a shape."""
    wanted, found = task(shape), []
    problem = Problem.of(wanted)
    for backend, _, propose in strategies.TABLE:
        options = propose(problem, device) if backend == BACKEND else ""
        for option in options if not isinstance(options, str) else ():
            found.append(Request(wanted, price(option, problem, device)))
    return found


def compile_all(requests: Iterable[Request], arch: str) -> int:
    """Compile what is not in the cache yet, on all cores; how many kernels there are."""
    from ..kernels.cuda.compile import cubin
    from ..kernels.cuda.source import source

    texts = list(dict.fromkeys(source(request) for request in requests))
    workers = min(len(os.sched_getaffinity(0)), len(texts))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for _ in pool.map(cubin, texts, [arch] * len(texts), chunksize=4):
            pass
    return len(texts)


class Tuner:
    """Times proposals on one device, in memory that is allocated once.

    Args:
        device: A torch device.
        largest: Elements of the largest input.
    """

    def __init__(self, device: Any, largest: int) -> None:
        import torch

        from ..kernels.registry import load

        self._torch, self._prepare, self._clock = torch, load(BACKEND).prepare, CudaClock(device)
        self._x = torch.randn(largest, device=device)
        self._y = torch.empty_like(self._x)

    def cell(self, shape: Shape, options: list[Request]) -> tuple[Key, Cell]:
        """The fastest proposal of each strategy, as far as it is any good."""
        problem = Problem.of(task(shape))
        x, y = self._tensors(shape)
        calls = [(option.plan, self._call(option, x, y)) for option in options]
        # One round shows who is worth more.
        rough = self._clock.on_end([call for _, call in calls], 1)
        limit = KEPT * min(rough)
        rest = [pair for pair, us in zip(calls, rough, strict=True) if us <= limit]
        fine = self._clock.on_end([call for _, call in rest], 9)
        # Who may be the fastest of its strategy runs often enough to show it.
        fastest: dict[str, float] = {}
        for (plan, _), us in zip(rest, fine, strict=True):
            fastest[plan.strategy] = min(us, fastest.get(plan.strategy, us))
        last = [pair for pair, us in zip(rest, fine, strict=True) if us <= CLOSE * fastest[pair[0].strategy]]
        final = self._clock.on_end([call for _, call in last], 31)
        best: dict[str, Timing] = {}
        for (plan, _), us in sorted(zip(last, final, strict=True), key=lambda pair: pair[1]):
            best.setdefault(plan.strategy, Timing(BACKEND, plan.strategy, plan.variant, us))
        return key_of(problem), Cell(shape.rows, shape.cols, tuple(best.values()))

    def _tensors(self, shape: Shape) -> tuple[Any, Any]:
        dtype = getattr(self._torch, shape.dtype)
        count = shape.rows * shape.cols
        x, y = (t.view(dtype)[:count].view(shape.rows, shape.cols) for t in (self._x, self._y))
        if dtype != self._x.dtype:
            # Bits of float32 numbers would be large and small in turns.
            x.copy_(self._torch.randn_like(x))
        return x, y[:, 0] if OPERATIONS[shape.operation].per_row else y

    def _call(self, option: Request, x: Any, y: Any) -> Callable[[], None]:
        run = self._prepare(option)
        more = {"dy": x} if "dy" in option.dtypes else {}
        run(x, y, more)
        return lambda: run(x, y, more)


def tune(device: Any, machine: Device, todo: list[Shape], begun: Table) -> Iterator[Table]:
    """The table after every shape.

    Args:
        device: A torch device with CUDA.
        machine: The same, as the planner sees it.
        todo: The shapes; those that `begun` has are not measured again.
        begun: A table of this device, empty or what an interrupted run has left.

    Raises:
        RuntimeError: a kernel does not compile or cannot be launched.
    """
    known = {(key, cell.rows, cell.cols) for key, cells in begun.cells.items() for cell in cells}
    options = {
        shape: proposals(shape, machine)
        for shape in todo
        if (key_of(Problem.of(task(shape))), shape.rows, shape.cols) not in known
    }
    table = begun
    if options:
        compile_all((option for found in options.values() for option in found), machine.arch)
        tuner = Tuner(device, max(shape.rows * shape.cols for shape in options))
    for shape, found in options.items():
        key, cell = tuner.cell(shape, found)
        table = replace(table, cells={**table.cells, key: [*table.cells.get(key, []), cell]})
        yield table
