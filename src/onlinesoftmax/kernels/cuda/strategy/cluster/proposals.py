"""Proposals of strategy `cluster`."""

from __future__ import annotations

import itertools

from .....core.device import Device
from .....core.problem import Problem
from .....planner.proposal import Proposal
from .....planner.variant import Variant
from ..blocks import (
    MOST_BLOCKS,
    choices_of_terms,
    elements_per_block,
    most_chunks,
    propose,
    rank,
    resident_blocks,
    row_chunks,
    slice_chunks,
    within_score_registers,
)


def cluster(problem: Problem, device: Device) -> list[Proposal] | str:
    """Rows in the registers of several blocks that reach each other's shared memory."""
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
    found.sort(key=lambda c: rank(c, problem, 3))
    most = 16 * elements_per_block(problem, device)
    return (
        within_score_registers(found, problem)
        or f"a row of {problem.cols} columns does not fit 16 blocks: {most} {problem.dtype} elements do"
    )
