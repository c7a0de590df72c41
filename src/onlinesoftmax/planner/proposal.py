"""A candidate: one strategy's blocks for one problem, before they have a price."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.device import Device
from ..core.operations import OPERATIONS
from ..core.problem import Problem


@dataclass(frozen=True)
class Candidate:
    """One strategy's blocks for one problem.

    Attributes:
        backend, strategy: Who runs it, and how rows map to the machine.
        reason: Why these blocks, in one sentence.
        programs: Programs of the largest launch.
        block: Columns that one program holds at a time.
        rows_per_program: Rows that one program holds at a time.
        depth: Columns of a block that share a lane and one rescaling of its state.  CUDA: rows that a group of
            threads loads at once (`row`), or tiles that are streamed at once (`grid`).
        warps: Warps of a program.
        stages: Tiles in flight in a persistent program; 0 when each program has one tile.
        splits: Programs that share a row.
        launches: Kernel launches.
        reads: Times the input is read.
        vector: Elements of 16 bytes where rows that begin anywhere are cut to boundaries of that; else 1.
        lanes: Threads that share a row; of CUDA kernels, which are written for threads.
        resident: Programs that a multiprocessor should hold, for which their registers are rationed; CUDA.
        shared: 16-byte chunks of a row that a thread keeps in shared memory; CUDA.
        terms: Whether a thread keeps the terms of a softmax's sum rather than its elements; CUDA.
        variant: Which of its strategy's proposals it is, in words that do not depend on the length of a row: what
            tuning.Table remembers.
        quality: Part of copy bandwidth that these blocks reach when the device is full, measured on an H200.
    """

    backend: str
    strategy: str
    reason: str
    programs: int
    block: int
    rows_per_program: int = 1
    depth: int = 1
    warps: int = 0
    stages: int = 0
    splits: int = 1
    launches: int = 1
    reads: int = 1
    vector: int = 1
    lanes: int = 0
    resident: int = 1
    shared: int = 0
    terms: bool = False
    variant: str = ""
    quality: float = 1.0


def no_gpu(backend: str, device: Device) -> str | None:
    if device.kind != "cuda":
        return f"{backend} kernels need an NVIDIA GPU, and the device is {device.name}"
    if device.compute_capability < (8, 0):
        return f"{backend} kernels need compute capability 8.0, and {device.name} has {device.arch}"
    return None


def cut(peeled: bool) -> str:
    return "; rows begin anywhere and are cut to 16-byte boundaries" if peeled else ""


def words_of(problem: Problem) -> int:
    """32-bit registers for what is held of a column."""
    return (2 if problem.itemsize == 8 else 1) * problem.inputs


def reduces(problem: Problem) -> bool:
    return OPERATIONS[problem.operation].reduces


def reads(problem: Problem) -> int:
    """Times a row is read that is not held: to reduce it, and to write."""
    return 1 if problem.per_row or not reduces(problem) else 2


def power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))
