"""Proposals of strategy `looped`."""

from __future__ import annotations

from .....core.device import Device
from .....core.problem import Problem
from .....planner.proposal import Proposal, reads
from .....planner.variant import Variant
from ..blocks import MOST_BLOCKS, NO_REGISTERS, most_chunks, propose, resident_blocks


def looped(problem: Problem, device: Device) -> list[Proposal] | str:
    """One block streams one row."""
    if problem.rows > MOST_BLOCKS:
        return f"{problem.rows} rows are more blocks than one launch takes"
    found = []
    for threads, held in ((512, 4), (1024, 2), (512, 2), (256, 4), (1024, 4), (256, 8), (128, 4), (256, 3)):
        held = min(held, most_chunks(problem, threads, device))
        if not held:
            continue  # The bias and the mask of one chunk fill more registers than the thread has.
        resident = resident_blocks(problem, threads, held, False, device)
        reason = (
            f"one block streams each row of {problem.cols} columns{', twice' if reads(problem) == 2 else ''}; "
            f"{problem.rows} rows share the device"
        )
        found.append(
            propose(
                problem, "looped", reason, programs=problem.rows, block=held * threads * problem.vector,
                warps=threads // 32, lanes=threads, resident=resident, reads=reads(problem),
                variant=Variant(threads=threads, chunks=held),
            )
        )  # fmt: skip
    return list(dict.fromkeys(found)) or NO_REGISTERS
