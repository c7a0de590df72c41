"""What the Pallas strategies propose: tiles whose sides are powers of two, masked where rows end before."""

from __future__ import annotations

from ..device import Device
from ..problem import Problem
from .candidate import Candidate, clamp, cut, no_gpu, power_of_two, reads, reduces, words_of

REGISTER_ELEMENTS = 32
"""Elements of a row that a thread of `row` holds; more of them than 64 would leave the registers."""

TILE = 8192
"""Columns of a tile that is streamed."""

CLUSTER_THREADS = 128
"""Threads of a block of `cluster`: a warpgroup."""

ROW_BYTES = 16 << 10
"""Most bytes of an input that one block of `cluster` holds, where several could."""

SHORT_SLICE_BYTES = ROW_BYTES // 4
"""Bytes of an input that are few for a block."""

SLICE_BYTES = 32 << 10
"""Bytes of all inputs that one of several blocks holds, if it can be: as many blocks then share a multiprocessor."""

OTHER_BYTES = 7 << 10
"""Shared memory of a block beside its slices: states, barriers, and what reductions take."""

LARGEST = (1 << 31) - (1 << 16)
"""What the 32-bit indices of a kernel count, with what it rounds up to: rows, columns, all elements of ragged rows."""

MOST_SPLITS = 1024
"""Programs that share a row of `split`: each of them merges the states of all."""


def _warps(elements: int) -> int:
    """Warps for so many elements: 32 a thread, which were the fastest on an H200."""
    return clamp(elements // 1024, 1, 32)


def row(problem: Problem, device: Device) -> Candidate | str:
    """Whole rows in registers."""
    if refusal := no_gpu("Pallas", device):
        return refusal
    block, words = power_of_two(problem.cols), words_of(problem)
    most = 1024 * REGISTER_ELEMENTS // words
    if block > most:
        return (
            f"a row of {problem.cols} columns, padded to {block}, does not fit the registers of one program: "
            f"{most} {problem.dtype} elements do"
        )
    rows = clamp(1024 // block, 1, power_of_two(max(problem.rows, 1)))
    reason = f"a row of {problem.cols} columns fits the registers of one program, so it is read once"
    if rows > 1:
        reason += f"; {rows} rows share a program"
    return Candidate(
        "pallas", "row", reason, -(-problem.rows // rows), block, rows, warps=_warps(rows * block),
        quality=0.95 if block * problem.itemsize < ROW_BYTES else 0.92,
    )  # fmt: skip


def looped(problem: Problem, device: Device) -> Candidate | str:
    """One program streams one row."""
    if refusal := no_gpu("Pallas", device):
        return refusal
    block = min(TILE, power_of_two(problem.cols))
    reason = (
        f"one program streams each row of {problem.cols} columns{', twice' if reads(problem) == 2 else ''}; "
        f"{problem.rows} programs share the device"
    )
    return Candidate(
        "pallas", "looped", reason, problem.rows, block, warps=_warps(block),
        reads=reads(problem), quality=0.6,
    )  # fmt: skip


def _quality_of_slices(held: int, inputs: int) -> float:
    """Measured on an H200: one block alone on a multiprocessor leaves it idle while it waits.

    Several blocks for so short a row, which begins anywhere, were not measured, and are left to `row`.
    """
    if held < SHORT_SLICE_BYTES * inputs:
        return 0.5
    if held <= 64 << 10:
        return 0.95
    return 0.7 if inputs > 1 else 0.42


def cluster(problem: Problem, device: Device) -> Candidate | str:
    """Rows in the shared memory of several blocks that read each other's states."""
    if refusal := no_gpu("Pallas", device):
        return refusal
    if device.compute_capability < (9, 0):
        return f"clusters of blocks need compute capability 9.0, and {device.name} has {device.arch}"
    if problem.itemsize == 8 or problem.fused:
        return "Mosaic kernels take logits as they are, of 16 and 32 bits"
    vector, ragged = problem.vector, problem.cols * problem.itemsize % 16 != 0
    elements = problem.rows * problem.cols
    if ragged and (elements % vector or elements > LARGEST):
        beside = f"are {elements} in all" if elements > LARGEST else f"neither are all {problem.rows} of them"
        return f"rows of {problem.cols} {problem.dtype} elements are not whole 16 bytes, and {beside}"
    tile = CLUSTER_THREADS * vector
    # A row that begins anywhere takes 16 bytes more, and no slice of it may begin before the array.
    span = problem.cols + (2 * vector - 2 if ragged else 0)
    for size in (2, 4, 8, 16) if ragged else (1, 2, 4, 8, 16):
        length = -(-span // (size * vector)) * vector
        held = length * problem.inputs * problem.itemsize
        if held <= (ROW_BYTES * problem.inputs if size == 1 else SLICE_BYTES):
            break
    if length < tile:
        return f"a row of {problem.cols} columns is shorter than a tile of {tile}"
    most = device.shared_memory - OTHER_BYTES
    if held > most:
        return f"a row of {problem.cols} columns takes more than the shared memory of 16 blocks, {most} bytes each"
    reason = f"{size} blocks hold" if size > 1 else "one block holds"
    reason += f" a row of {problem.cols} columns in shared memory, so it is read once{cut(ragged)}"
    return Candidate(
        "pallas", "cluster", reason,
        problem.rows * size, length, warps=CLUSTER_THREADS // 32, splits=size, vector=vector if ragged else 1,
        quality=_quality_of_slices(held, problem.inputs),
    )  # fmt: skip


def split(problem: Problem, device: Device) -> Candidate | str:
    """Several programs a row, whose states a second launch merges."""
    if refusal := no_gpu("Pallas", device):
        return refusal
    block = min(TILE, power_of_two(problem.cols))
    tiles = -(-problem.cols // block)
    splits = clamp(-(-8 * device.multiprocessors // max(problem.rows, 1)), 1, min(tiles, MOST_SPLITS))
    launches = int(reduces(problem)) + 1
    return Candidate(
        "pallas", "split", f"{splits} programs share a row of {problem.cols} columns, and a second launch merges "
        "their states", problem.rows * splits, block, warps=_warps(block),
        splits=splits, launches=launches, reads=reads(problem), quality=0.6,
    )  # fmt: skip
