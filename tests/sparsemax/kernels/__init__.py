"""Proposals of the kernels of sparsemax.  The kernels stand in cuda.py and triton.py, imported for a launch only."""

from __future__ import annotations

from onlinesoftmax.core.device import Device
from onlinesoftmax.core.problem import Problem
from onlinesoftmax.kernels.cuda.strategy import blocks
from onlinesoftmax.kernels.cuda.strategy.blocks import row_chunks
from onlinesoftmax.planner.proposal import Proposal, clamp, power_of_two, propose, words_of

MOST_WORDS = 16384
"""32-bit words of a tile: as many as 16 warps hold beside the values of the bisection."""


MOST_CHUNKS = 16
"""16-byte chunks that a lane of the CUDA kernel holds."""


def row_of_warp(problem: Problem, device: Device) -> list[Proposal] | str:
    """Whole rows in the registers of a warp."""
    if problem.declaration.backward:
        return "the CUDA kernel of sparsemax computes no gradient"
    held = -(-row_chunks(problem) // 32)
    if held > MOST_CHUNKS:
        return f"a row of {problem.cols} columns does not fit the registers of a warp"
    return [
        blocks.propose(
            problem, "row", "a row fits the registers of a warp, which finds its tau by bisection",
            programs=-(-problem.rows // 4), block=held * 32 * problem.vector, rows_per_program=4, warps=4, lanes=32,
        )
    ]  # fmt: skip


def row(problem: Problem, device: Device) -> list[Proposal] | str:
    """Whole rows in the registers of a program."""
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


STRATEGIES = (("cuda", "row", row_of_warp), ("triton", "row", row))
