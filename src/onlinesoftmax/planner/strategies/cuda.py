"""Proposals of the CUDA strategies `row`, `cluster` and `looped`: for a problem, all blocks that are worth measuring,
likeliest first.  cuda_grid.py has those of `grid`.

A row is divided into chunks of 16 bytes, and each thread holds the same number of chunks, so no row is padded to a
power of two.  The choices that remain are the number of threads that share a row, the numbers of rows and blocks in
flight, and whether a thread keeps the terms of a row's sum or its elements.  `onlinesoftmax tune` measures them; where
no table of times is given, the first proposal is taken.
"""

from __future__ import annotations

import itertools

from ...core.device import Device
from ...core.problem import Problem
from ...core.task import MOST_PROCESSES
from ..proposal import Proposal, no_gpu, reads
from ..variant import Variant
from .cuda_blocks import (
    NO_REGISTERS,
    choices_of_terms,
    chunk_words,
    makes_scores,
    most_chunks,
    propose,
    resident_blocks,
    row_chunks,
    slice_chunks,
)

SCORE_REGISTERS = 32
"""Most registers for a thread's chunks where it holds scores, if any proposal keeps to them.

With more, the compiler starts computing before all loads are issued.
"""

MOST_BLOCKS = (1 << 31) - 1
"""Most blocks of one launch."""


def _within_score_registers(found: list[Proposal], problem: Problem) -> list[Proposal]:
    """The proposals within SCORE_REGISTERS; all of them where none is, or where no scores are made."""
    if not makes_scores(problem):
        return found
    light = [c for c in found if _chunks_per_thread(c, problem) * chunk_words(problem, c.terms) <= SCORE_REGISTERS]
    return light or found


def row(problem: Problem, device: Device) -> list[Proposal] | str:
    """Whole rows in the registers of a group of threads."""
    if refusal := no_gpu("CUDA", device):
        return refusal
    chunks, found = row_chunks(problem), []
    blocks = list(itertools.product((128, 256, 512, 1024), (1, 2), choices_of_terms(problem)))
    most_of = {(threads, terms): most_chunks(problem, threads, device, terms) for threads, _, terms in blocks}
    for lanes, (threads, depth, terms) in itertools.product((1 << i for i in range(2, 11)), blocks):
        held, most = -(-chunks // lanes), most_of[threads, terms]
        # In a sharded row, each lane receives the state of one process, so there is a lane for each.
        fewest = MOST_PROCESSES if problem.sharded else 4
        if held > most or lanes < fewest or (lanes > fewest and held * lanes >= 2 * max(chunks, fewest)):
            continue
        if threads < lanes or (threads > 256 and lanes < threads):
            continue
        if depth > 1 and (held * depth > min(4, most) or lanes > 128):
            continue
        rows = threads // lanes * depth
        reason = f"a row of {problem.cols} columns fits the registers of {lanes} threads, so it is read once"
        if rows > 1:
            reason += f"; {rows} rows share a block"
        found.append(
            propose(
                problem, "row", reason, programs=-(-problem.rows // rows), block=held * lanes * problem.vector,
                rows_per_program=rows, depth=depth, warps=threads // 32, lanes=lanes, terms=terms,
                resident=resident_blocks(problem, threads, held * depth, terms, device),
                variant=Variant(threads=threads, lanes=lanes, depth=depth, terms=terms),
            )
        )  # fmt: skip
    found = [proposal for proposal in found if proposal.programs <= MOST_BLOCKS]
    # One block alone would not load while it computes, so two resident ones are preferred.  Two chunks a thread are two
    # loads in flight; kept terms save an exponential; the threads of small blocks wait less for each other.
    found.sort(key=lambda c: _rank(c, problem, 2))
    return _within_score_registers(found, problem) or (
        f"a row of {problem.cols} columns does not fit the registers of one block: "
        f"{_elements_per_block(problem, device)} {problem.dtype} elements do"
    )


def _elements_per_block(problem: Problem, device: Device) -> int:
    """Most elements that the registers of one block hold."""
    return max(threads * most_chunks(problem, threads, device) for threads in (512, 1024)) * problem.vector


def _chunks_per_thread(proposal: Proposal, problem: Problem) -> int:
    """Chunks of a row that a thread holds in registers."""
    return proposal.block // (proposal.lanes * problem.vector)


def _rank(proposal: Proposal, problem: Problem, chunks: int) -> tuple[int, ...]:
    """Sort key: the likeliest proposal has the smallest.  `chunks` is the best number of chunks of a thread."""
    away = abs(_chunks_per_thread(proposal, problem) - chunks)
    return proposal.resident < 2, away, not proposal.terms, proposal.splits, proposal.depth, proposal.warps


def cluster(problem: Problem, device: Device) -> list[Proposal] | str:
    """Rows in the registers of several blocks that reach each other's shared memory."""
    if refusal := no_gpu("CUDA", device):
        return refusal
    if device.compute_capability < (9, 0):
        return f"clusters of blocks need compute capability 9.0, and {device.name} has {device.arch}"
    if 2 * problem.rows > MOST_BLOCKS:
        return f"{problem.rows} rows are more clusters than one launch takes"
    chunks = row_chunks(problem)
    found: list[Proposal] = []
    for threads, blocks, terms in itertools.product((128, 256, 512, 1024), (2, 4, 8, 16), choices_of_terms(problem)):
        length = slice_chunks(chunks, blocks)
        held = -(-length // threads)
        if (length < 64 and blocks > 2) or (threads == 1024 and found) or problem.rows * blocks > MOST_BLOCKS:
            continue
        if held > most_chunks(problem, threads, device, terms) or (held * threads >= 2 * length and threads > 128):
            continue
        resident = resident_blocks(problem, threads, held, terms, device)
        reason = f"{blocks} blocks hold a row of {problem.cols} columns in registers, so it is read once"
        found.append(
            propose(
                problem, "cluster", reason, programs=problem.rows * blocks, block=held * threads * problem.vector,
                warps=threads // 32, lanes=threads, splits=blocks, terms=terms, resident=resident,
                variant=Variant(threads=threads, blocks=blocks, terms=terms),
            )
        )  # fmt: skip
    # Variants are ranked as in `row`, but three chunks a thread are best, because a block also waits for the states of
    # the other blocks.
    found.sort(key=lambda c: _rank(c, problem, 3))
    most = 16 * _elements_per_block(problem, device)
    return (
        _within_score_registers(found, problem)
        or f"a row of {problem.cols} columns does not fit 16 blocks: {most} {problem.dtype} elements do"
    )


def looped(problem: Problem, device: Device) -> list[Proposal] | str:
    """One block streams one row."""
    if refusal := no_gpu("CUDA", device):
        return refusal
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
