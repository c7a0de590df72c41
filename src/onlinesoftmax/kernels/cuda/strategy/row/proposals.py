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


def row(problem: Problem, device: Device) -> list[Proposal] | str:
    """Whole rows in the registers of a group of threads."""
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
    found.sort(key=lambda c: rank(c, problem, 2))
    return within_score_registers(found, problem) or (
        f"a row of {problem.cols} columns does not fit the registers of one block: "
        f"{elements_per_block(problem, device)} {problem.dtype} elements do"
    )
