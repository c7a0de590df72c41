"""What the Pallas strategies propose: tiles whose sides are powers of two, masked where rows end before."""

from __future__ import annotations

from ..device import Device
from ..problem import Problem
from .candidate import Candidate, clamp, no_gpu, power_of_two, reads, reduces, words_of

REGISTER_ELEMENTS = 32
"""Elements of a row that a thread of `row` holds; more of them than 64 would leave the registers."""

TILE = 4096
"""Columns of a tile that is streamed."""


def _warps(elements: int) -> int:
    """Warps for so many elements: 16 or 32 a thread, which were the fastest on an H200."""
    return clamp(elements // (512 if elements <= 2048 else 1024), 1, 32)


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
        "pallas", "row", reason, -(-problem.rows // rows), block, rows, warps=_warps(rows * block * words),
        quality=0.9,
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
        "pallas", "looped", reason, problem.rows, block, warps=_warps(block * words_of(problem)),
        reads=reads(problem), quality=0.75,
    )  # fmt: skip


def split(problem: Problem, device: Device) -> Candidate | str:
    """Several programs a row, whose states XLA merges between two launches."""
    if refusal := no_gpu("Pallas", device):
        return refusal
    block = min(TILE, power_of_two(problem.cols))
    tiles = -(-problem.cols // block)
    splits = clamp(-(-4 * device.multiprocessors // max(problem.rows, 1)), 1, tiles)
    launches = (2 if reduces(problem) else 0) + (not problem.per_row)
    return Candidate(
        "pallas", "split", f"{splits} programs share a row of {problem.cols} columns, and a launch between merges "
        "their states", problem.rows * max(splits, tiles), block, warps=_warps(block * words_of(problem)),
        splits=splits, launches=launches, reads=reads(problem), quality=0.75,
    )  # fmt: skip
