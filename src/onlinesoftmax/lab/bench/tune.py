"""`onlinesoftmax tune`: time the proposals of strategies over a grid of shapes, and keep the fast ones in a table."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf
from time import perf_counter
from typing import Any

import torch

from ...core.device import Device
from ...core.problem import Problem
from ...core.task import ITEMSIZE
from ...core.workers import WorkerPool
from ...kernels import registry
from ...kernels.request import Request
from ...ops import OPERATIONS
from ...planner.measured import KEPT_RATIO, Cell, Key, Table, Timing, key_of
from ...planner.plan import Plan
from .timing import CudaClock
from .tune_shapes import Shape, can_measure, input_bytes, proposals, task

BACKENDS = ("cuda", "triton", "pallas")
"""Backends whose strategies have more than one proposal."""

CLOSE = 1.05
"""A proposal that is slower than the fastest of its strategy by less than this factor may be the faster one."""

BATCH = 16
"""Shapes that are compiled together, by all cores, before they are measured."""


def _compile(request: Request, arch: str) -> None:
    """Compile a request's kernels into the cache on disk, in a process of its own."""
    if request.plan.backend == "cuda":
        from ...kernels.cuda.compile import cubin
        from ...kernels.cuda.source import source

        cubin(source(request), arch)
        return
    sizes = (request.task.rows, request.task.cols)
    x = torch.empty(sizes, dtype=getattr(torch, request.task.dtypes["x"]), device="cuda")
    first, more = operand_tensors(request, [x] * request.operation.inputs, x)
    try:
        registry.load(request.plan.backend).prepare(request)(x, first, more)
    except Exception:  # the process that measures meets the same and says so
        return


def operand_tensors(request: Request, inputs: Sequence[Any], y: Any) -> tuple[Any, dict[str, Any]]:
    """(the first output, every other operand and output by name).

    Args:
        request: The call without its data.
        inputs: A tensor for each of the operation's `element_operands`, the input first.
        y: The output with a value per element.
    """
    x, elements = inputs[0], iter(inputs[1:])
    found: dict[str, Any] = {}
    for operand in request.operation.operands[1:]:
        if not request.has(operand.name):
            continue
        if operand.kind == "element":
            found[operand.name] = next(elements)
        elif operand.dtype == "integer":
            found[operand.name] = torch.randint(x.shape[1], (x.shape[0], 1), device=x.device)
        else:
            dtype = getattr(torch, request.task.dtypes[operand.name])
            found[operand.name] = torch.ones(x.shape[0], 1, dtype=dtype, device=x.device)
    for output in request.task.written:
        dtype = getattr(torch, request.task.dtypes[output.name])
        found[output.name] = y if output.kind == "element" else torch.empty(x.shape[0], dtype=dtype, device=x.device)
    return found.pop(request.task.outputs[0]), found


class Compiler:
    """Processes that compile the kernels of `cuda` and `triton` before they are measured.

    Args:
        arch: Name of the machine code, as in `sm_90`.
    """

    def __init__(self, arch: str) -> None:
        self._arch = arch
        self._workers = min(len(os.sched_getaffinity(0)), 16)
        self._pool = WorkerPool(self._workers)
        self._done: set[Any] = set()

    def compile(self, requests: Sequence[Request]) -> None:
        """Compile what is not in the cache on disk yet.

        Raises:
            RuntimeError: a kernel of `cuda` does not compile.
        """
        from ...kernels.cuda.source import source

        todo = []
        for request in requests:
            if request.plan.backend == "pallas":
                # XLA keeps its kernels in the process that compiles them.
                continue
            name: Any = (request.operation.name, request.task.dtypes["x"], request.task.cols, request.plan.blocks)
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

    Every tensor with a value per element has memory of its own, as in a call: a kernel that read one tensor as two
    operands would find the second one in a cache.

    Args:
        device: A torch device.
        largest: Bytes of the largest input.

    Attributes:
        refused: Reasons of proposals that their compiler or the driver refused, by backend, strategy and variant.
    """

    def __init__(self, device: Any, largest: int) -> None:
        clock = CudaClock(device)
        self._clocks = {"cuda": clock, "triton": clock}
        self._device = device
        self._largest = largest
        self._buffers: list[Any] = []
        self.refused: dict[tuple[str, str, str], str] = {}

    def cell(self, shape: Shape, options: Sequence[Request]) -> tuple[Key, Cell]:
        """The proposals of a shape that are at most KEPT_RATIO times as slow as the fastest of their backend."""
        y, *inputs = self._tensors(shape)
        timings: list[Timing] = []
        backends = tuple(dict.fromkeys(option.plan.backend for option in options))
        for backend in backends:
            calls = self._calls([option for option in options if option.plan.backend == backend], inputs, y)
            if not calls:
                raise RuntimeError(f"{backend} refused every proposal for {shape}: {self.refused}")
            timings += self._timings(backend, calls, not task(shape).writes_elements)
        timings.sort(key=lambda timing: timing.us)
        return key_of(Problem.of(task(shape))), Cell(shape.rows, shape.cols, tuple(timings), backends)

    def _calls(self, options: list[Request], inputs: list[Any], y: Any) -> list[tuple[list[Plan], Callable[[], Any]]]:
        """Plans with the call that runs them; plans of the same blocks share a call."""
        same: dict[Any, list[Request]] = {}
        for option in options:
            plan = option.plan
            same.setdefault((plan.strategy, plan.blocks), []).append(option)
        found = []
        for requests in same.values():
            plans = [request.plan for request in requests]
            try:
                found.append((plans, self._call(requests[0], inputs, y)))
            except Exception as error:
                if plans[0].backend == "cuda":
                    raise
                # Triton and XLA refuse some blocks for their shared memory or registers.
                name = plans[0].backend, plans[0].strategy, str(plans[0].variant)
                self.refused[name] = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return found

    def _timings(self, backend: str, calls: list[tuple[list[Plan], Callable[[], Any]]], clean: bool) -> list[Timing]:
        """Microseconds of the variants of a backend, as far as they are kept; `clean` as `CudaClock.on_end` has it."""
        clock = self._clock(backend)

        def timed(places: Iterable[int], rounds: int) -> dict[int, float]:
            chosen = list(places)
            return dict(zip(chosen, clock.on_end([calls[i][1] for i in chosen], rounds, clean), strict=True))

        strategies = [plans[0].strategy for plans, _ in calls]
        # One round shows which calls are worth more.
        rough = timed(range(len(calls)), 1)
        found = timed((i for i, us in rough.items() if us <= KEPT_RATIO * min(rough.values())), 9)
        # Calls that may be the fastest of their strategy run often enough to show it.
        fastest = {strategies[i]: us for i, us in sorted(found.items(), key=lambda pair: -pair[1])}
        found |= timed((i for i, us in found.items() if us <= CLOSE * fastest[strategies[i]]), 31)
        return [Timing(backend, plan.strategy, plan.variant, us) for i, us in found.items() for plan in calls[i][0]]

    def _clock(self, backend: str) -> CudaClock:
        if backend not in self._clocks:
            from .jax_peers import OursInJax

            self._clocks[backend] = CudaClock(self._device, OursInJax.flushes)
        return self._clocks[backend]

    def _tensors(self, shape: Shape) -> list[Any]:
        """The output with a value per element, then the inputs, each in a buffer of its own."""
        dtype = getattr(torch, shape.dtype)
        count, tensors = shape.rows * shape.cols, 1 + OPERATIONS[shape.operation].inputs
        while len(self._buffers) < tensors:
            self._buffers.append(torch.randn(self._largest // ITEMSIZE["float32"], device=self._device))
        found = [t.view(dtype)[:count].view(shape.rows, shape.cols) for t in self._buffers[:tensors]]
        if dtype != torch.float32:
            # Bits of float32 numbers would be large and small in turns.
            for t in found[1:]:
                t.normal_()
        return found

    def _call(self, option: Request, inputs: list[Any], y: Any) -> Callable[[], Any]:
        if option.plan.backend == "pallas":
            call = _in_jax(option, inputs)
        else:
            first, more = operand_tensors(option, inputs, y)
            run = registry.load(option.plan.backend).prepare(option)

            def call() -> None:
                run(inputs[0], first, more)

        call()
        return call


def _in_jax(option: Request, tensors: list[Any]) -> Callable[[], Any]:
    """The call that runs a plan of Pallas on torch tensors."""
    from ...jax.plans import outputs_of
    from ...kernels import pallas
    from .. import jax_on_torch

    operation = option.operation

    def run(*arrays: Any) -> Any:
        operands = dict(zip(operation.element_operands, arrays, strict=True))
        results = pallas.run(operation.name, operands, option.plan, False, outputs=outputs_of(operation.name))
        return tuple(results.values())

    on_tensors = jax_on_torch.on_tensors(run)
    return lambda: on_tensors(*tensors)


def tune(
    device: Any, machine: Device, left: list[tuple[Shape, list[str]]], begun: Table, minutes: float | None = None
) -> Iterator[tuple[Table, dict[tuple[str, str, str], str]]]:
    """The table after every shape, and the reasons of proposals that were refused (`Tuner.refused`).

    Args:
        device: A torch device with CUDA.
        machine: The same, as the planner sees it.
        left: The shapes, in the order in which they are measured, each with the backends to measure (`left_of`).
        begun: A table of this device, empty or from an earlier run.  New times replace those of the same shape and
            backend; all others stay.
        minutes: Minutes after which no other shape is begun.

    Raises:
        RuntimeError: a kernel of `cuda` does not compile or cannot be launched.
    """
    end = inf if minutes is None else perf_counter() + 60 * minutes
    if not left:
        return
    table, compiler = begun, Compiler(machine.arch)
    tuner = Tuner(device, max(input_bytes(shape) for shape, _ in left))
    try:
        for i in range(0, len(left), BATCH):
            batch = {
                shape: [option for name in names for option in proposals(shape, machine, name)]
                for shape, names in left[i : i + BATCH]
            }
            if perf_counter() >= end:
                return
            compiler.compile([option for options in batch.values() for option in options])
            for shape, options in batch.items():
                if not options:
                    continue
                if perf_counter() >= end:
                    return
                table = table.with_cell(*tuner.cell(shape, options))
                yield table, tuner.refused
    finally:
        compiler.close()


def left_of(table: Table | None, todo: list[Shape], backends: Sequence[str]) -> list[tuple[Shape, list[str]]]:
    """The shapes that a table does not have of all backends, with the backends that are missing; all without one."""
    found = []
    for shape in todo:
        cells = table.cells.get(key_of(Problem.of(task(shape))), []) if table else []
        done = {name for cell in cells if (cell.rows, cell.cols) == (shape.rows, shape.cols) for name in cell.backends}
        if names := [name for name in backends if name not in done and can_measure(name, shape)]:
            found.append((shape, names))
    return found


def begin(device: Device, source: str, begun: Table | None) -> Table:
    """An empty table of a device, or one that is continued, with this run among its sources."""
    if begun is None:
        return Table(device.name, source, device.bandwidth, {})
    return begun if begun.source.endswith(source) else replace(begun, source=f"{begun.source}; {source}")
