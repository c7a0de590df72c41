"""Proposals of the kernels of strategy `grid` that load through a ring (ring.cuh): pipeline.cuh and stream.cuh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .....core.device import Device
from .....core.problem import Problem
from .....planner.proposal import Proposal, reads
from .....planner.variant import Variant
from ..blocks import (
    OTHER_REGISTERS,
    choices_of_terms,
    chunk_words,
    other_registers,
    peels_unaligned,
    propose,
    row_chunks,
    slice_tiles,
    state_bytes,
)

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


def no_ring(problem: Problem, device: Device) -> str | None:
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


def pipelines(problem: Problem, device: Device) -> list[Proposal]:
    """Teams of blocks that load and reduce the next rows while one row is written."""
    if no_ring(problem, device):
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
    words, of_state, others = chunk_words(problem, terms), state_bytes(problem), other_registers(problem, device)
    if problem.dtype == "float16" and problem.inputs > 1:
        # The compiler widens float16 in two steps, and would spill a few registers of the last chunk.
        more += words
    for lanes, registers, depths, depths_of_wide in RING_BLOCKS:
        for depth in depths_of_wide if words > 4 else depths:
            held = (registers - more + OTHER_REGISTERS - others) // words // depth * depth
            # The ring shares the memory with the maxima that kept terms are relative to, one of each thread and tile.
            maxima = held // depth * lanes * problem.itemsize if terms else 0
            # The states of all warps and the barriers; states in float64 take twice the bytes.
            tile = lanes * depth * 16 * problem.inputs
            states = (2 * (lanes // 32) + 2) * of_state + 24 * (device.shared_memory // tile) + 64
            fixed = max(4096 if problem.itemsize == 8 else 2048, states)
            stages = (device.shared_memory - fixed - maxima) // tile
            if held > 0 and stages > 1:
                yield lanes, depth, held, stages


def streams(problem: Problem, device: Device) -> list[Proposal]:
    """One team of all blocks, which keeps the last tiles of a row on chip and reads the others twice."""
    if no_ring(problem, device):
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
