"""Proposals of strategy `grid`: teams of blocks that are resident together hold rows.

There are three kernels: one that holds one row at a time (grid.cuh); one that loads and reduces the next rows while it
writes one (pipeline.cuh); and one for rows that do not fit on chip (stream.cuh).  The last two load through a ring.
"""

from __future__ import annotations

from .....core.device import Device
from .....core.problem import Problem
from .....planner.proposal import Proposal, reads
from .....planner.variant import Variant
from ..blocks import (
    LINE_CHUNKS,
    NO_REGISTERS,
    choices_of_terms,
    chunk_words,
    most_chunks,
    propose,
    resident_blocks,
    row_chunks,
    slice_tiles,
    state_bytes,
)
from .ring_proposals import PIPELINED_ROWS, no_ring, pipelines, streams


def grid(problem: Problem, device: Device) -> list[Proposal] | str:
    """Rows in the registers and shared memory of a team of blocks: all blocks of the device, or a part for each row."""
    found = []
    for threads in (128, 256, 512):
        most = most_chunks(problem, threads, device)
        for held in (held for held in (4, 8, 16) if held <= most):
            resident = resident_blocks(problem, threads, held, False, device)
            found += _teams(problem, device, threads, held, resident, False)
    if not problem.fused:
        # Shared memory holds logits, from which scores would be made a second time, with a bias or a mask read again.
        for threads, resident, held in (
            (1024, 1, 2), (1024, 1, 4), (512, 2, 4), (512, 1, 8), (512, 1, 16), (256, 4, 4), (256, 2, 8),
        ):  # fmt: skip
            most = min(max(1, held * 4 // chunk_words(problem)), most_chunks(problem, threads * resident, device))
            if most:
                found += _teams(problem, device, threads, most, resident, True)
    # Likeliest first: rows that are read once, without shared memory, with the most columns on chip at a time.
    found.sort(key=lambda c: (c.reads, c.shared > 0, -c.block * c.programs))
    return list(dict.fromkeys([*pipelines(problem, device), *streams(problem, device), *found])) or NO_REGISTERS


def _teams(
    problem: Problem, device: Device, threads: int, held: int, resident: int, with_shared: bool
) -> list[Proposal]:
    """Teams of blocks with `held` chunks a thread in registers: as many teams as fit, or one."""
    chunks, blocks = row_chunks(problem), resident * device.multiprocessors
    room = 0
    if with_shared:
        states = threads // 8 * state_bytes(problem) + 16 * problem.declaration.has_target
        room = (device.shared_memory // resident - max(2048, states)) // (threads * 16 * problem.inputs)
    smallest = min(blocks, -(-chunks // (threads * (held + room))))
    # "teams": as many teams of equal size as fit, but no more than needed for the same number of rounds.
    # "all": a team of all blocks, or of as many as there are tiles; in the second case several teams may fit.
    rounds = max(1, -(-problem.rows // max(1, blocks // smallest)))
    of_equal_size = blocks // max(1, -(-problem.rows // rounds))
    teams = {"teams": min(of_equal_size, -(-chunks // LINE_CHUNKS)), "all": min(blocks, -(-chunks // threads))}
    found = []
    for word, team in teams.items():
        # A block reads the state of every other block of its team.  For thousands of them this takes longer than a row.
        if team > 2 * max(threads, device.multiprocessors):
            continue
        if word == "teams" and (problem.rows == 1 or team == teams["all"]):
            continue
        tiles = slice_tiles(chunks, team, threads)
        shared = min(room, max(0, tiles - held))
        streamed = max(0, tiles - held - shared)
        if with_shared and not shared:
            continue
        blocks_hold = f"{team} blocks, resident together, hold" if team > 1 else "one block holds"
        reason = f"{blocks_hold} a row of {problem.cols} columns" + (
            f" but for {streamed} of {tiles} tiles, which are read again" if streamed else ", so it is read once"
        )
        if problem.rows >= PIPELINED_ROWS * (blocks // team) and (why_not := no_ring(problem, device)):
            reason += f"; not pipelined: {why_not}"
        found.append(
            propose(
                problem, "grid", reason, programs=min(problem.rows, blocks // team) * team,
                block=min(held, tiles) * threads * problem.vector, warps=threads // 32, lanes=threads, splits=team,
                shared=shared, resident=resident, depth=min(held, 4), terms=choices_of_terms(problem)[-1],
                variant=Variant(threads=threads, chunks=held, shared=with_shared, team=word),
                reads=reads(problem) if streamed else 1, again=streamed / tiles,
            )
        )  # fmt: skip
    return found
