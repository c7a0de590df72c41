"""`onlinesoftmax tune`: time the proposals of strategies over a grid of shapes, and keep the fast ones in a table."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from time import perf_counter
from typing import Any, NamedTuple

from ..core.device import Device
from ..core.operations import OPERATIONS
from ..core.problem import Problem
from ..core.task import ITEMSIZE, Task, contiguous_spec, row_spec, task_of
from ..kernels import registry
from ..kernels.request import Request
from ..planner import strategies
from ..planner.measured import KEPT, Cell, Key, Table, Timing, key_of, stand_in
from ..planner.plan import Plan, priced
from .timing import CudaClock

BACKENDS = ("cuda", "triton", "pallas")
"""Backends whose strategies have more than one proposal."""

FULL_BYTES = 1 << 27
"""Bytes of an input that is as large as the measurement needs: several times any L2."""

SHORT = 1 << 18
"""Columns up to which steps are of 1.5 and 1.33; longer rows are fewer, in steps of 2 and 4."""

FEW_ROWS = (1, 16, 128, 1024, 8192)
"""Numbers of rows that are measured besides those of a full input, where columns are a power of two."""

VOCABULARIES = (32000, 50256, 128256, 151936, 201088, 256000)
"""Columns of language models' logits; GPT-2's 50257 is among them with its unaligned rows."""

CLOSE = 1.05
"""A proposal that is slower than the fastest of its strategy by less than this factor may be the faster one."""

HOPELESS = 2.5
"""Triton's and XLA's compilers are slow: a proposal that is estimated at this many times the least is not measured."""

BATCH = 16
"""Shapes that are compiled together, by all cores, before they are measured."""


class Shape(NamedTuple):
    """A shape to measure."""

    operation: str
    dtype: str
    rows: int
    cols: int


def shapes(quick: bool = False) -> list[Shape]:
    """The grid, the shapes that matter most first, so that a table that is broken off is of use.

    These are full inputs, softmax and its gradient ahead, and among them the lengths of vocabularies.  `quick` gives a
    few shapes that show whether all works.
    """
    if quick:
        return [Shape("softmax", dtype, 1024, cols) for dtype in ("bfloat16", "float32") for cols in (256, 4096, 65536)]
    powers, between = [64 << i for i in range(13)], [*(96 << i for i in range(12)), *VOCABULARIES]
    long = [1 << i for i in (19, 20, 21, 22, 23, 24, 26, 28)]
    # An operation that writes one number per row has little to choose.
    measured = list(dict.fromkeys(stand_in(Problem(name, 1, 1)) for name in OPERATIONS))
    measured.sort(key=lambda name: OPERATIONS[name].per_row)
    full, unaligned, few = [], [], []
    for operation in measured:
        per_row, plain = OPERATIONS[operation].per_row, OPERATIONS[operation].inputs == 1
        lengths = [*(() if per_row else VOCABULARIES), *(powers[::-1]), *(() if per_row else between[:12]), *long]
        for cols in lengths:
            for dtype in ("bfloat16", "float32"):
                rows = max(FULL_BYTES // (cols * ITEMSIZE[dtype]), 1)
                full.append(Shape(operation, dtype, rows, cols))
                if cols <= SHORT and plain and not per_row:
                    unaligned.append(Shape(operation, dtype, rows, cols + 1))
                if cols not in between:
                    few += [Shape(operation, dtype, some, cols) for some in FEW_ROWS if 4 * some <= rows]
    return [*full, *unaligned, *few]


def task(shape: Shape) -> Task:
    """The task of a shape, all of its tensors contiguous."""
    operation, sizes = OPERATIONS[shape.operation], (shape.rows, shape.cols)
    whole, per_row = contiguous_spec(sizes, shape.dtype), row_spec(sizes, 1, shape.dtype)
    written = operation.written(operation.always)
    kinds = {t.name: t.kind for t in operation.operands} | {t.name: t.kind for t in written}
    tensors = {name: whole if kind == "element" else per_row for name, kind in kinds.items()}
    return task_of(operation, operation.always, sizes, 1, tensors)


def proposals(shape: Shape, device: Device, backend: str = "cuda") -> list[Request]:
    """The proposals of a backend's strategies for a shape that are to be measured."""
    wanted = task(shape)
    problem = Problem.of(wanted)
    found: list[Plan] = []
    for its_backend, strategy, propose in (*strategies.TABLE, *strategies.FOR_JAX):
        options = propose(problem, device) if its_backend == backend else ""
        if isinstance(options, str) or (strategy == "cluster" and backend == "pallas" and find_spec("absl") is None):
            continue
        found += [priced(option, problem, device) for option in options]
    least = min((plan.estimate_us for plan in found), default=0.0)
    return [Request(wanted, plan) for plan in found if backend == "cuda" or plan.estimate_us <= HOPELESS * least]


def unavailable(backend: str) -> str | None:
    """Why a backend cannot be measured here, in one sentence; None where it can."""
    if backend != "pallas":
        return registry.unavailable(backend)
    from ..jax import bridge

    return bridge.unavailable("cuda")


def _compile(request: Request, arch: str) -> None:
    """Compile a request's kernels into the cache on disk, in a process of its own."""
    if request.plan.backend == "cuda":
        from ..kernels.cuda.compile import cubin
        from ..kernels.cuda.source import source

        cubin(source(request), arch)
        return
    import torch

    sizes = (request.layout.rows, request.layout.cols)
    x = torch.empty(sizes, dtype=getattr(torch, request.dtypes["x"]), device="cuda")
    y = x if request.task.writes_elements else x[:, 0].contiguous()
    try:
        registry.load(request.plan.backend).prepare(request)(x, y, _more(request, x))
    except Exception:  # the process that measures meets the same and says so
        return


def _more(request: Request, x: Any) -> dict[str, Any]:
    """The operands besides x: those of the measured operations are read element by element."""
    return {name: x for name in request.operation.element_operands if name != "x"}


class Compiler:
    """Processes that compile the kernels of `cuda` and `triton` before they are measured.

    Args:
        arch: Name of the machine code, as in `sm_90`.
    """

    def __init__(self, arch: str) -> None:
        self._arch = arch
        self._workers = min(len(os.sched_getaffinity(0)), 16)
        self._pool = ProcessPoolExecutor(self._workers, multiprocessing.get_context("spawn"))
        self._done: set[Any] = set()

    def compile(self, requests: Sequence[Request]) -> None:
        """Compile what is not in the cache on disk yet.

        Raises:
            RuntimeError: a kernel of `cuda` does not compile.
        """
        from ..kernels.cuda.source import source

        todo = []
        for request in requests:
            if request.plan.backend == "pallas":
                # XLA keeps its kernels in the process that compiles them.
                continue
            name: Any = (request.operation.name, request.dtypes["x"], request.layout.cols, request.plan.blocks)
            name = source(request) if request.plan.backend == "cuda" else name
            if name not in self._done:
                self._done.add(name)
                todo.append(request)
        for _ in self._pool.map(_compile, todo, [self._arch] * len(todo), chunksize=4):
            pass

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(cancel_futures=True)


class Tuner:
    """Times proposals on one device, in memory that is allocated once.

    Args:
        device: A torch device.
        largest: Elements of the largest input.

    Attributes:
        refused: Reasons of proposals that their compiler or the driver refused, by backend, strategy and variant.
    """

    def __init__(self, device: Any, largest: int) -> None:
        import torch

        self._torch = torch
        clock = CudaClock(device)
        self._clocks = {"cuda": clock, "triton": clock}
        self._device = device
        self._x = torch.randn(largest, device=device)
        self._y = torch.empty_like(self._x)
        self.refused: dict[tuple[str, str, str], str] = {}

    def cell(self, shape: Shape, options: Sequence[Request]) -> tuple[Key, Cell]:
        """The proposals of a shape that are at most KEPT times as slow as the fastest of their backend."""
        x, y = self._tensors(shape)
        timings: list[Timing] = []
        backends = tuple(dict.fromkeys(option.plan.backend for option in options))
        for backend in backends:
            calls = self._calls([option for option in options if option.plan.backend == backend], x, y)
            if not calls:
                raise RuntimeError(f"{backend} refused every proposal for {shape}: {self.refused}")
            timings += self._timings(backend, calls)
        timings.sort(key=lambda timing: timing.us)
        return key_of(Problem.of(task(shape))), Cell(shape.rows, shape.cols, tuple(timings), backends)

    def _calls(self, options: list[Request], x: Any, y: Any) -> list[tuple[list[Plan], Callable[[], Any]]]:
        """Plans with the call that runs them; plans of the same blocks share a call."""
        same: dict[Any, list[Request]] = {}
        for option in options:
            plan = option.plan
            same.setdefault((plan.strategy, plan.blocks, plan.threads), []).append(option)
        found = []
        for requests in same.values():
            plans = [request.plan for request in requests]
            try:
                found.append((plans, self._call(requests[0], x, y)))
            except Exception as error:
                if plans[0].backend == "cuda":
                    raise
                # Triton and XLA refuse some blocks for their shared memory or registers.
                name = plans[0].backend, plans[0].strategy, str(plans[0].variant)
                self.refused[name] = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return found

    def _timings(self, backend: str, calls: list[tuple[list[Plan], Callable[[], Any]]]) -> list[Timing]:
        """Microseconds of the variants of a backend, as far as they are kept."""
        clock = self._clock(backend)
        # One round shows which calls are worth more.
        rough = clock.on_end([call for _, call in calls], 1)
        rest = [pair for pair, us in zip(calls, rough, strict=True) if us <= KEPT * min(rough)]
        fine = clock.on_end([call for _, call in rest], 9)
        # Calls that may be the fastest of their strategy run often enough to show it.
        fastest: dict[str, float] = {}
        for (plans, _), us in zip(rest, fine, strict=True):
            fastest[plans[0].strategy] = min(us, fastest.get(plans[0].strategy, us))
        close = [us <= CLOSE * fastest[plans[0].strategy] for (plans, _), us in zip(rest, fine, strict=True)]
        final = iter(clock.on_end([call for (_, call), is_close in zip(rest, close, strict=True) if is_close], 31))
        found = []
        for (plans, _), us, is_close in zip(rest, fine, close, strict=True):
            best = next(final) if is_close else us
            found += [Timing(backend, plan.strategy, plan.variant, best) for plan in plans]
        return found

    def _clock(self, backend: str) -> CudaClock:
        if backend not in self._clocks:
            from .arrays import OursInJax

            self._clocks[backend] = CudaClock(self._device, OursInJax.flushes)
        return self._clocks[backend]

    def _tensors(self, shape: Shape) -> tuple[Any, Any]:
        dtype = getattr(self._torch, shape.dtype)
        count = shape.rows * shape.cols
        x, y = (t.view(dtype)[:count].view(shape.rows, shape.cols) for t in (self._x, self._y))
        if dtype != self._x.dtype:
            # Bits of float32 numbers would be large and small in turns.
            x.copy_(self._torch.randn_like(x))
        return x, y[:, 0] if OPERATIONS[shape.operation].per_row else y

    def _call(self, option: Request, x: Any, y: Any) -> Callable[[], Any]:
        more = _more(option, x)
        if option.plan.backend == "pallas":
            call = _in_jax(option, [x, *more.values()])
        else:
            run = registry.load(option.plan.backend).prepare(option)

            def call() -> None:
                run(x, y, more)

        call()
        return call


def _in_jax(option: Request, tensors: list[Any]) -> Callable[[], Any]:
    """The call that runs a plan of Pallas on torch tensors."""
    from ..jax import bridge, ops
    from ..kernels import pallas

    name = option.operation.name

    def run(*arrays: Any) -> Any:
        return ops.stacked(pallas.run(name, arrays, option.plan, False, outputs=ops.outputs(name)))

    on_tensors = bridge.on_tensors(run)
    return lambda: on_tensors(*tensors)


class Progress(NamedTuple):
    """A table in the making, and the reasons of proposals that were refused (`Tuner.refused`)."""

    table: Table
    refused: dict[tuple[str, str, str], str]


def tune(
    device: Any, machine: Device, todo: list[Shape], begun: Table, backends: Sequence[str] = ("cuda",),
    minutes: float | None = None,
) -> Iterator[Progress]:  # fmt: skip
    """The table after every shape.

    Args:
        device: A torch device with CUDA.
        machine: The same, as the planner sees it.
        todo: The shapes, in the order in which they are measured.
        begun: A table of this device, empty or from an interrupted run: what it has of a backend is not measured again.
        backends: Backends to measure.
        minutes: Minutes after which no other shape is begun.

    Raises:
        RuntimeError: a kernel of `cuda` does not compile or cannot be launched.
    """
    start = perf_counter()
    left = left_of(begun, todo, backends)
    if not left:
        return
    table, compiler = begun, Compiler(machine.arch)
    tuner = Tuner(device, max(shape.rows * shape.cols for shape, _ in left))
    try:
        for i in range(0, len(left), BATCH):
            batch = {
                shape: [option for name in names for option in proposals(shape, machine, name)]
                for shape, names in left[i : i + BATCH]
            }
            if _over(start, minutes):
                return
            compiler.compile([option for options in batch.values() for option in options])
            for shape, options in batch.items():
                if not options:
                    continue
                if _over(start, minutes):
                    return
                table = table.with_cell(*tuner.cell(shape, options))
                yield Progress(table, tuner.refused)
    finally:
        compiler.close()


def _over(start: float, minutes: float | None) -> bool:
    return minutes is not None and perf_counter() - start > 60 * minutes


def left_of(table: Table, todo: list[Shape], backends: Sequence[str]) -> list[tuple[Shape, list[str]]]:
    """The shapes that a table does not have of all backends, with the backends that are missing."""
    return [(shape, names) for shape in todo if (names := _unmeasured(table, shape, backends))]


def _unmeasured(table: Table, shape: Shape, backends: Sequence[str]) -> list[str]:
    """The backends that a table does not have for a shape."""
    cells = table.cells.get(key_of(Problem.of(task(shape))), [])
    done = {name for cell in cells if (cell.rows, cell.cols) == (shape.rows, shape.cols) for name in cell.backends}
    return [name for name in backends if name not in done]


def begin(device: Device, source: str, begun: Table | None) -> Table:
    """An empty table of a device, or one that is continued, with this run among its sources."""
    if begun is None:
        return Table(device.name, source, device.bandwidth, {})
    return begun if begun.source.endswith(source) else replace(begun, source=f"{begun.source}; {source}")
