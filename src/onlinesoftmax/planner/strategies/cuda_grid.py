"""Proposals of the CUDA strategy `grid`: teams of blocks that are resident together hold rows.

There are three kernels: one that holds one row at a time (grid.cuh); one that loads and reduces the next rows while it
writes one (pipeline.cuh); and one for rows that do not fit on chip (stream.cuh).  The last two load through a ring.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from ...core.device import Device
from ...core.problem import Problem
from ..proposal import Proposal, no_gpu, reads
from ..variant import Variant
from .cuda_blocks import (
    LINE_CHUNKS,
    NO_REGISTERS,
    OTHER_REGISTERS,
    choices_of_terms,
    chunk_words,
    most_chunks,
    other_registers,
    peels_unaligned,
    propose,
    resident_blocks,
    row_chunks,
    slice_chunks,
)


def grid(problem: Problem, device: Device) -> list[Proposal] | str:
    """Rows in the registers and shared memory of a team of blocks: all blocks of the device, or a part for each row."""
    if refusal := no_gpu("CUDA", device):
        return refusal
    found = [
        proposal
        for threads, held in itertools.product((128, 256, 512), (4, 8, 16))
        if held <= most_chunks(problem, threads, device)
        for proposal in _teams(
            problem, device, threads, held, resident_blocks(problem, threads, held, False, device), False
        )
    ]
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
    return list(dict.fromkeys([*_pipelines(problem, device), *_streams(problem, device), *found])) or NO_REGISTERS


def slice_tiles(chunks: int, team: int, threads: int) -> int:
    """Tiles of a block's slice of a row."""
    return max(1, -(-slice_chunks(chunks, team) // threads))


PIPELINE, STREAM = "pipeline", "stream"
"""Files of the kernels that load through a ring: pipeline.cuh and stream.cuh."""

SPECIAL_WARPS = 2
"""Warps of a pipelined block that hold no part of a row: one loads, one exchanges states."""


class RingBlock(NamedTuple):
    """A block of a kernel that loads through a ring, without its special warps.

    Attributes:
        threads: Threads that hold rows.
        registers: Registers of each of them for chunks.
        depths: Numbers of chunks that each thread has of a tile, likeliest first, where a chunk takes 4 registers.
        depths_of_wide: The same where a chunk takes more registers.
    """

    threads: int
    registers: int
    depths: tuple[int, ...]
    depths_of_wide: tuple[int, ...]


RING_BLOCKS = (
    RingBlock(320, 112, (5, 3, 9), (2, 1, 3)), RingBlock(448, 80, (3, 2, 6), (2, 1, 3)), RingBlock(512, 64, (4,), (2,)),
)  # fmt: skip
"""Blocks that are proposed, likeliest first.

With the special warps a block has 12, 16 or 18 warps, so each quarter of a multiprocessor has 3, 4 or up to 5 of
them, and a thread can have 168, 128 or 96 registers.  The last block spills some where rows are aligned, but it is the
fastest for some unaligned rows.
"""

STREAM_REGISTERS = 20
"""Registers that a thread of stream.cuh needs in addition to those of a thread of pipeline.cuh."""

PIPELINED_ROWS = 3
"""Fewest rows, for the team that has the most, with which the pipelined kernel is proposed.

One row is written, one waits for its state, and one is reduced.
"""


def _no_ring(problem: Problem, device: Device) -> str | None:
    """Why the kernels of `grid` that load through a ring cannot run a problem; None where they can."""
    if device.compute_capability < (9, 0):
        return "bulk copies need compute capability 9.0"
    if not problem.contiguous or (problem.aligned_bytes < 16 and not peels_unaligned(problem)):
        return "bulk copies need rows whose aligned columns are adjacent"
    if not problem.same_dtype:
        return "bulk copies need inputs of one dtype, each with adjacent columns"
    if problem.out_dtype == "float64" != problem.dtype:
        return "float64 results of narrower elements take too many registers"
    if problem.bias_bytes or problem.masked:
        return "a bias or a mask would be read twice"
    if not (problem.reduces and problem.writes_elements):
        return "it is for operations that reduce rows and write elements"
    return None


def _pipelines(problem: Problem, device: Device) -> list[Proposal]:
    """Teams of blocks that load and reduce the next rows while one row is written."""
    if _no_ring(problem, device):
        return []
    chunks, blocks = row_chunks(problem), device.multiprocessors
    terms = problem.itemsize >= 4 and choices_of_terms(problem)[-1]
    found = []
    for lanes, depth, held, stages in _rings(problem, device, terms):
        smallest = -(-chunks // (lanes * held))
        # One block for a row is what `row` and `cluster` are for.  The ring needs a stage for the next row beside those
        # of the row that waits for registers.
        if not 1 < smallest <= blocks or stages <= held // depth:
            continue
        rounds = -(-problem.rows // (blocks // smallest))
        if rounds < PIPELINED_ROWS:
            continue
        teams = -(-problem.rows // rounds)
        team = blocks // teams
        tiles = slice_tiles(chunks, team, lanes * depth)
        reason = (
            f"{team} blocks, resident together, hold a row of {problem.cols} columns, so it is read once; they "
            "load and reduce the next rows while they write it"
        )
        found.append(
            propose(
                problem, "grid", reason, programs=teams * team, block=tiles * depth * lanes * problem.vector,
                depth=depth, warps=lanes // 32 + SPECIAL_WARPS, lanes=lanes, splits=team, stages=stages,
                shared=stages * depth, terms=terms, kernel=PIPELINE,
                variant=Variant(threads=lanes, chunks=held, depth=depth, stages=stages, team="teams"),
                peeled=problem.unaligned,
            )
        )  # fmt: skip
    return found


def _rings(problem: Problem, device: Device, terms: bool, more: int = 0) -> Iterator[tuple[int, int, int, int]]:
    """Blocks with a ring: threads that hold rows, a thread's chunks in a tile and in registers, stages of the ring.

    `more` is the number of further registers that a thread of the kernel needs for other things than chunks.
    """
    words = chunk_words(problem, terms)
    if problem.dtype == "float16" and problem.inputs > 1:
        # The compiler widens float16 in two steps, and would spill a few registers of the last chunk.
        more += words
    for lanes, registers, depths, depths_of_wide in RING_BLOCKS:
        for depth in depths_of_wide if words > 4 else depths:
            held = (registers - more + OTHER_REGISTERS - other_registers(problem, device)) // words // depth * depth
            # The ring shares the memory with the maxima that kept terms are relative to, one of each thread and tile.
            maxima = held // depth * lanes * problem.itemsize if terms else 0
            # The states of all warps and the barriers; states in float64 take twice the bytes.
            fixed = 4096 if problem.itemsize == 8 else 2048
            stages = (device.shared_memory - fixed - maxima) // (lanes * depth * 16 * problem.inputs)
            if held > 0 and stages > 1:
                yield lanes, depth, held, stages


def _streams(problem: Problem, device: Device) -> list[Proposal]:
    """One team of all blocks, which keeps the last tiles of a row on chip and reads the others twice."""
    if _no_ring(problem, device):
        return []
    chunks, blocks = row_chunks(problem), device.multiprocessors
    found = []
    for lanes, depth, held, stages in _rings(problem, device, False, STREAM_REGISTERS):
        tiles, on_chip = -(-chunks // (lanes * depth)), blocks * (held // depth + stages)
        if tiles <= on_chip:
            continue
        reason = (
            f"{blocks} blocks, resident together, keep {on_chip} of {tiles} tiles of a row on chip; the others are "
            "read again, and written by whichever block is free"
        )
        found.append(
            propose(
                problem, "grid", reason, programs=blocks, block=held * lanes * problem.vector, depth=depth,
                warps=lanes // 32 + SPECIAL_WARPS, lanes=lanes, splits=blocks, stages=stages, shared=stages * depth,
                reads=reads(problem), again=1 - on_chip / tiles, kernel=STREAM,
                variant=Variant(threads=lanes, chunks=held, depth=depth, stages=stages, team="all"),
                peeled=problem.unaligned,
            )
        )  # fmt: skip
    return found


def _teams(
    problem: Problem, device: Device, threads: int, held: int, resident: int, with_shared: bool
) -> list[Proposal]:
    """Teams of blocks with `held` chunks a thread in registers: as many teams as fit, or one."""
    chunks, blocks = row_chunks(problem), resident * device.multiprocessors
    room = (device.shared_memory // resident - 2048) // (threads * 16 * problem.inputs) if with_shared else 0
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
        if problem.rows >= PIPELINED_ROWS * (blocks // team) and (why_not := _no_ring(problem, device)):
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
