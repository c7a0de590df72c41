"""Proposals of strategy `row`."""

from __future__ import annotations

import itertools

from .....core.device import Device
from .....core.problem import Problem
from .....core.task import MOST_PROCESSES
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
    within_score_registers,
)
from .packed_proposals import not_packed, packed


def row(problem: Problem, device: Device) -> list[Proposal] | str:
    """Whole rows in the registers of a group of threads."""
    chunks, found, why_not = row_chunks(problem), [], not_packed(problem)
    blocks = list(itertools.product((128, 256, 512, 1024), (1, 2), choices_of_terms(problem)))
    most_of = {(threads, terms): most_chunks(problem, threads, device, terms) for threads, _, terms in blocks}
    # In a sharded row, each lane receives the state of one process, so there is a lane for each.
    fewest = MOST_PROCESSES if problem.sharded else 4
    fits = [
        (lanes, -(-chunks // lanes)) for lanes in (1 << i for i in range(2, 11))
        if lanes == fewest or (lanes > fewest and -(-chunks // lanes) * lanes < 2 * max(chunks, fewest))
    ]  # fmt: skip
    for (lanes, held), (threads, depth, terms) in itertools.product(fits, blocks):
        most = most_of[threads, terms]
        if held > most or threads < lanes or (threads > 256 and lanes < threads):
            continue
        if depth > 1 and (held * depth > min(4, most) or lanes > 128):
            continue
        rows = threads // lanes * depth
        reason = f"a row of {problem.cols} columns fits the registers of {lanes} threads, so it is read once"
        if rows > 1:
            reason += f"; {rows} rows share a block"
        if why_not:
            reason += f"; they are not moved as one stretch: {why_not}"
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
    found.sort(key=lambda c: rank(c, problem, 2))
    return [*packed(problem, device), *_one_chunk(problem, device), *within_score_registers(found, problem)] or (
        f"a row of {problem.cols} columns does not fit the registers of one block: "
        f"{elements_per_block(problem, device)} {problem.dtype} elements do"
    )


def _one_chunk(problem: Problem, device: Device) -> list[Proposal]:
    """Aligned rows of 16 bytes: a thread has two.

    A softmax of 4194304 x 8 bfloat16 takes 0.7 of the time with four threads for a row, on an H100.
    """
    if problem.cols != problem.vector or problem.aligned_bytes < 16 or not problem.contiguous or problem.sharded:
        return []
    threads, depth, (terms, *_) = 128, 2, choices_of_terms(problem)
    if most_chunks(problem, threads, device, terms) < depth:
        return []
    rows = threads * depth
    programs = -(-problem.rows // rows)
    proposal = propose(
        problem, "row", f"a thread has {depth} rows of 16 bytes; {rows} rows share a block", programs=programs,
        block=problem.cols, rows_per_program=rows, depth=depth, warps=threads // 32, lanes=1, terms=terms,
        resident=resident_blocks(problem, threads, depth, terms, device), by_estimate=True,
    )  # fmt: skip
    return [proposal] if programs <= MOST_BLOCKS else []
