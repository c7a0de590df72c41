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
    OTHER_REGISTERS,
    choices_of_terms,
    chunk_words,
    most_chunks,
    other_registers,
    peels_unaligned,
    propose,
    resident_blocks,
    row_chunks,
)


def grid(problem: Problem, device: Device) -> list[Proposal] | str:
    """Rows in the registers and shared memory of a team of blocks: all of the device, or a part of it for each row."""
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
    if not problem.extra.fused:
        # Shared memory holds logits; a bias or a mask would be read again beside them.
        for threads, resident, held in (
            (1024, 1, 2), (1024, 1, 4), (512, 2, 4), (512, 1, 8), (512, 1, 16), (256, 4, 4), (256, 2, 8),
        ):  # fmt: skip
            most = min(max(1, held * 4 // chunk_words(problem)), most_chunks(problem, threads * resident, device))
            found += _teams(problem, device, threads, most, resident, True)
    found.sort(key=lambda c: (c.reads, c.threads.shared > 0, -c.block * c.programs))
    return list(dict.fromkeys([*_pipelines(problem, device), *_streams(problem, device), *found]))


def slice_chunks(chunks: int, team: int) -> int:
    """Chunks of a block's slice of a row; slices start on 128 bytes."""
    return -(-chunks // (8 * team)) * 8


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
        depths: Chunks of a tile that each thread has, likeliest first, where a chunk takes 4 registers.
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

With the special warps, a quarter of a multiprocessor has three, four or five warps of a block, so a thread can have
168, 128 or 96 registers.  The last block spills some where rows are aligned, but is the fastest for some other rows.
"""

STREAM_REGISTERS = 20
"""Registers that a thread of the kernel that streams tiles needs more than one of the pipelined kernel."""

PIPELINED_ROWS = 3
"""Fewest rows of each team for the pipelined kernel: one is written, one waits for its state, and one is reduced."""


def _no_ring(problem: Problem, device: Device) -> str:
    """Why the kernels of `grid` that load through a ring cannot run a problem; empty where they can."""
    if device.compute_capability < (9, 0):
        return "bulk copies need compute capability 9.0"
    if not problem.contiguous or (problem.aligned_bytes < 16 and not peels_unaligned(problem)):
        return "bulk copies need rows whose aligned columns are adjacent"
    if not problem.access.alike:
        return "bulk copies need inputs of one dtype, each with adjacent columns"
    if problem.out_dtype == "float64" != problem.dtype:
        return "float64 terms do not fit the registers of narrower elements"
    if problem.extra.bias_bytes or problem.extra.masked:
        return "a bias or a mask would be read twice"
    if not (problem.reduces and problem.writes_elements):
        return "it is for operations that reduce rows and write elements"
    return ""


def _pipelines(problem: Problem, device: Device) -> list[Proposal]:
    """Teams of blocks that load and reduce the next rows while one row is written."""
    if _no_ring(problem, device):
        return []
    chunks, blocks = row_chunks(problem), device.multiprocessors
    terms = problem.itemsize >= 4 and choices_of_terms(problem)[-1]
    found = []
    for lanes, depth, held, stages in _rings(problem, device, terms):
        smallest = -(-chunks // (lanes * held))
        # One block for a row is what `row` and `cluster` are for.
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

    `more` is the number of registers that a thread needs beside its chunks and those that every kernel needs.
    """
    words = chunk_words(problem, terms)
    if problem.dtype == "float16" and problem.inputs > 1:
        # It is widened in two steps, and the compiler then spills a few registers of the last chunk.
        more += words
    for lanes, registers, depths, depths_of_wide in RING_BLOCKS:
        for depth in depths_of_wide if words > 4 else depths:
            held = (registers - more + OTHER_REGISTERS - other_registers(problem, device)) // words // depth * depth
            # The ring shares the memory with the maxima that kept terms are relative to.
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
    """Teams of blocks with `held` chunks a thread in registers: the most that fit, or one."""
    chunks, blocks = row_chunks(problem), resident * device.multiprocessors
    room = (device.shared_memory // resident - 2048) // (threads * 16 * problem.inputs) if with_shared else 0
    smallest = min(blocks, -(-chunks // (threads * (held + room))))
    # "teams": as many teams of equal size as fit, but no more than needed for the same number of rounds.
    # "all": one team of all blocks that have a tile.
    rounds = max(1, -(-problem.rows // max(1, blocks // smallest)))
    teams = {"teams": blocks // max(1, -(-problem.rows // rounds)), "all": min(blocks, -(-chunks // threads))}
    found = []
    for word, team in teams.items():
        # A block reads the state of every other block of its team; for thousands this takes longer than a row.
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
