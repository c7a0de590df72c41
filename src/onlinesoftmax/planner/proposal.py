"""A proposal: one strategy's blocks for one problem, before the planner estimates its time."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any, TypeVar

from ..core.device import Device
from ..core.problem import Problem
from .quality import quality
from .variant import ONLY, Variant


@dataclass(frozen=True)
class Blocks:
    """How rows map to programs; a program of a CUDA kernel is a block of threads.

    Attributes:
        programs: Programs of the largest launch.
        block: Columns that one program holds at a time.
        rows_per_program: Rows that one program holds at a time.
        depth: Triton: columns of a block that share a lane and one rescaling of its state.  CUDA `row`: rows that a
            group of threads loads together.  CUDA `grid`: tiles that a block streams together; in the kernels that load
            through a ring, 16-byte chunks of a tile that each thread has.
        warps: Warps of a program.
        stages: Tiles in flight in a program that loads ahead; 0 where programs do not.
        splits: Programs that share a row.
        vector: Number of elements in 16 bytes if unaligned rows are split into head, body and tail; else 1.
        lanes: Threads that share a row; 0 for kernels in other languages than CUDA, as for all that follow.
        resident: Number of blocks that a multiprocessor should hold; it limits the registers of each thread.
        shared: 16-byte chunks that a thread has in shared memory: of one row, or of the rows that are loaded ahead.
        terms: True where a thread holds the terms of a softmax's sum instead of its elements, and so computes each
            exponential once.
        kernel: Name of the file of the kernel, for a strategy that has several; empty for the file that has the
            strategy's name.
    """

    programs: int
    block: int
    rows_per_program: int = 1
    depth: int = 1
    warps: int = 0
    stages: int = 0
    splits: int = 1
    vector: int = 1
    # Threads of a CUDA kernel.
    lanes: int = 0
    resident: int = 1
    shared: int = 0
    terms: bool = False
    kernel: str = ""


@dataclass(frozen=True, kw_only=True)
class Proposal(Blocks):
    """One strategy's blocks for one problem.

    Attributes:
        backend, strategy: Names of the backend that runs it, and of the mapping of rows to programs.
        reason: Why these blocks, in one sentence.
        variant: Name of the proposal among those of its strategy: a measured table refers to the proposal by it
            (planner/measured.py).
        reads: Times the input is read.
        launches: Kernel launches.
        quality: Part of copy bandwidth that the blocks reach when the device is full.
        by_estimate: True where the time follows from the bytes for every shape, so that tables have no times of it.
        again: Where `reads` is more than 1: the part of the input that is read more than once; the rest stays on chip.
    """

    backend: str
    strategy: str
    reason: str = ""
    variant: Variant = ONLY
    # Memory traffic, from which the time is estimated.
    reads: int = 1
    launches: int = 1
    quality: float = 1.0
    again: float = 1.0
    by_estimate: bool = False

    @property
    def blocks(self) -> tuple[Any, ...]:
        """The values of Blocks; plans of one strategy with equal ones run the same kernels."""
        return tuple(getattr(self, field.name) for field in fields(Blocks))

    def as_dict(self) -> dict[str, Any]:
        """Every attribute by name, for JSON."""
        return vars(self) | {"variant": str(self.variant)}


Record = TypeVar("Record", bound=Proposal)


def made(record: type[Record], **values: Any) -> Record:
    """The record with these attributes, as `record(**values)` makes it.

    A plan makes some sixty proposals, and `__init__` of a frozen record takes four times as long.
    """
    every, required = _attributes(record)  # type: ignore[arg-type]  # a class has another __hash__
    if not required <= values.keys() <= every.keys():
        return record(**values)
    found = object.__new__(record)
    vars(found).update(every | values)
    return found


@cache
def _attributes(record: type[Proposal]) -> tuple[dict[str, Any], frozenset[str]]:
    """(defaults, required): every attribute of a record, in order, with its default; those that have none."""
    defaults = {field.name: field.default for field in fields(record)}
    return defaults, frozenset(name for name, default in defaults.items() if default is MISSING)


KERNELS = {"cuda": "CUDA", "triton": "Triton", "pallas": "Pallas"}
"""Names of the backends with kernels for NVIDIA GPUs, as sentences write them."""


def no_gpu(backend: str, device: Device) -> str | None:
    """Why a device cannot run the kernels of a backend, in one sentence; None where it can."""
    if backend not in KERNELS:
        return None
    backend = KERNELS[backend]
    if device.kind != "cuda":
        return f"{backend} kernels need an NVIDIA GPU, and the device is {device.name}"
    if device.compute_capability < (8, 0):
        return f"{backend} kernels need compute capability 8.0, and {device.name} has {device.arch}"
    return None


def propose(problem: Problem, backend: str, strategy: str, reason: str, peeled: bool, **values: Any) -> Proposal:
    """A proposal of a strategy.

    Args:
        problem: The problem.
        backend, strategy: The strategy.
        reason: Why these blocks, without the handling of unaligned rows.
        peeled: True where unaligned rows are split into head, body and tail.
        **values: Further attributes; `case` is that of `quality`.
    """
    if "quality" not in values:
        values["quality"] = quality(backend, strategy, values.pop("case", ""))
    reason += "; unaligned rows: head and tail are handled separately" if peeled else ""
    return made(
        Proposal, backend=backend, strategy=strategy, reason=reason, vector=problem.vector if peeled else 1, **values
    )  # fmt: skip


def words_of(problem: Problem) -> int:
    """32-bit registers that hold one column of every input."""
    return (2 if problem.itemsize == 8 else 1) * problem.inputs


def reads(problem: Problem) -> int:
    """Number of times that a row is read if it is not held on chip: once to reduce it, once to write elements."""
    return 2 if problem.writes_elements and problem.reduces else 1


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def clamp(value: int, low: int, high: int) -> int:
    """The value, or the nearest bound."""
    return max(low, min(value, high))
