"""Proposals of the kernels of sparsemax.  triton.py has the kernels, and is imported for a launch only."""

from __future__ import annotations

from onlinesoftmax.core.device import Device
from onlinesoftmax.core.problem import Problem
from onlinesoftmax.planner.proposal import Proposal, clamp, no_gpu, power_of_two, propose, words_of

MOST_WORDS = 16384
"""32-bit words of a tile: as many as 16 warps hold beside the values of the bisection."""


def row(problem: Problem, device: Device) -> list[Proposal] | str:
    """Whole rows in the registers of a program."""
    if refusal := no_gpu("Triton", device):
        return refusal
    block, most = power_of_two(problem.cols), MOST_WORDS // words_of(problem)
    if block > most:
        return f"a row of {problem.cols} columns does not fit the registers of one program: {most} do"
    rows = max(1, 1024 // block)
    return [
        propose(
            problem, "triton", "row", "a row fits the registers of one program, which finds its tau by bisection",
            False, programs=-(-problem.rows // rows), block=block, rows_per_program=rows,
            warps=clamp(rows * block // 1024, 1, 16),
        )
    ]  # fmt: skip


STRATEGIES = (("triton", "row", row),)
