"""Blocks of the CUDA strategies: chunks of a row, registers of a thread, and blocks of a multiprocessor.

A row is divided into chunks of 16 bytes, and each thread holds the same number of chunks, so no row is padded to a
power of two.  The choices that remain are the number of threads that share a row, the numbers of rows and blocks in
flight, and whether a thread keeps the terms of a row's sum or its elements.  A strategy proposes all blocks that are
worth measuring, likeliest first.  `onlinesoftmax tune` measures them; without a table of times, the first is taken.
"""

from __future__ import annotations

from typing import Any

from ....core.accumulators import Argmax
from ....core.device import CACHE_LINE, Device
from ....core.problem import Problem
from ....planner import proposal
from ....planner.proposal import Proposal

MOST_BLOCKS = (1 << 31) - 1
"""Most blocks of one launch."""

SCORE_REGISTERS = 32
"""Most registers for a thread's chunks where it holds scores, if any proposal keeps to them.

With more, the compiler starts computing before all loads are issued.
"""

LINE_CHUNKS = CACHE_LINE // 16
"""Chunks of a cache line: the fewest that a block owns of a row which it shares with other blocks."""

HELD_REGISTERS = 64
"""Most registers of a thread for its chunks of a row, in the kernels without a ring (grid/ring_proposals.py)."""

OTHER_REGISTERS = 32
"""Fewest registers of a thread for everything but its chunks; `other_registers` has the number of a problem."""

NO_REGISTERS = "a thread has too few registers for its elements with their bias and mask"
"""Why a strategy has no proposal where the bias has wider elements than the input."""


def row_chunks(problem: Problem) -> int:
    """Most whole chunks that a row can have; an unaligned row also has a head and a tail."""
    return max(1, problem.cols // problem.vector)


def slice_chunks(chunks: int, blocks: int) -> int:
    """Chunks of each block's slice of a row.  Slices start on a cache line, so no two blocks load the same one."""
    return -(-chunks // (LINE_CHUNKS * blocks)) * LINE_CHUNKS


def slice_tiles(chunks: int, team: int, threads: int) -> int:
    """Tiles of a block's slice of a row."""
    return max(1, -(-slice_chunks(chunks, team) // threads))


def peels_unaligned(problem: Problem) -> bool:
    """True where CUDA kernels split unaligned rows into head, body and tail.

    Whole rows would be loaded fewer than 16 bytes at a time.
    """
    return problem.contiguous and problem.can_peel and problem.aligned_bytes < 16 and problem.cols >= problem.vector


def state_bytes(problem: Problem) -> int:
    """Most bytes of a state in shared memory: m, the sums in float64 or pairs of float64, and an argmax.

    A sum that only some calls need is counted beside an argmax alone: the tables were measured without it.
    """
    needed = {name for output in problem.written for name in output.needs}
    kept = [one for one in problem.declaration.accumulators if one.name in needed]
    argmax = any(one.kind is Argmax for one in kept)
    sums = sum(one.kind is not Argmax and (argmax or not one.only_with) for one in kept)
    return 8 + (16 if problem.itemsize == 8 else 8) * sums + 16 * argmax


def chunk_words(problem: Problem, terms: bool = False) -> int:
    """Registers of one chunk, 16 bytes of the input: those of its operands as they are loaded.

    Where terms or scores are computed from them and kept, the larger number of the two.
    """
    loaded = 4 * problem.inputs + -(-problem.vector * (problem.bias_bytes + problem.masked) // 4)
    made = problem.vector * (2 if problem.itemsize == 8 else 1)
    return max(loaded, made) if terms or makes_scores(problem) else loaded


def makes_scores(problem: Problem) -> bool:
    """True where a thread holds scores, logits after the score options, instead of logits."""
    return problem.fused and problem.inputs == 1


def most_chunks(problem: Problem, threads: int, device: Device, terms: bool = False) -> int:
    """Most chunks that each thread may hold where so many threads share the registers of a multiprocessor."""
    free = device.registers // threads - other_registers(problem, device)
    return max(0, min(HELD_REGISTERS, free)) // chunk_words(problem, terms)


def choices_of_terms(problem: Problem) -> tuple[bool, ...]:
    """Values of `terms` to propose: only True if terms take no more registers than elements; otherwise both.

    An operation that keeps no terms has only False.
    """
    if not problem.declaration.may_keep_terms or not problem.writes_elements:
        return (False,)
    return (True,) if chunk_words(problem, True) == chunk_words(problem, False) else (True, False)


def other_registers(problem: Problem, device: Device) -> int:
    """Registers of a thread for everything but its chunks; arithmetic in float64 takes more, and so does a target."""
    # The sums of a float32 gradient have 64 bits.  Before compute capability 10.0 the compiler needs no more registers
    # for them.
    sums_wide = problem.inputs > 1 and problem.itemsize == 4 and device.compute_capability >= (10, 0)
    # The target's column, score and factors; with score options, the numbers of its slope too.
    target = problem.declaration.has_target * (16 if problem.fused else 8)
    return OTHER_REGISTERS + target + (56 if problem.itemsize == 8 or sums_wide else 0)


def resident_blocks(problem: Problem, threads: int, chunks: int, terms: bool, device: Device) -> int:
    """Blocks that a multiprocessor can hold with the registers that each thread needs."""
    blocks = device.registers // (threads * (other_registers(problem, device) + chunks * chunk_words(problem, terms)))
    return max(1, min(blocks, device.threads // threads, 32))


def propose(problem: Problem, strategy: str, reason: str, peeled: bool | None = None, **values: Any) -> Proposal:
    """A proposal of a CUDA strategy, as `proposal.propose` makes it; by default `peels_unaligned` says if it peels."""
    peeled = peels_unaligned(problem) if peeled is None else peeled
    return proposal.propose(problem, "cuda", strategy, reason, peeled, **values)


def within_score_registers(found: list[Proposal], problem: Problem) -> list[Proposal]:
    """The proposals within SCORE_REGISTERS; all of them where none is, or where no scores are made."""
    if not makes_scores(problem):
        return found
    light = [c for c in found if chunks_per_thread(c, problem) * chunk_words(problem, c.terms) <= SCORE_REGISTERS]
    return light or found


def elements_per_block(problem: Problem, device: Device) -> int:
    """Most elements that the registers of one block hold."""
    return max(threads * most_chunks(problem, threads, device) for threads in (512, 1024)) * problem.vector


def chunks_per_thread(proposal: Proposal, problem: Problem) -> int:
    """Chunks of a row that a thread holds in registers."""
    return proposal.block // (proposal.lanes * problem.vector)


def rank(proposal: Proposal, problem: Problem, chunks: int) -> tuple[int, ...]:
    """Sort key: the likeliest proposal has the smallest.  `chunks` is the best number of chunks of a thread."""
    away = abs(chunks_per_thread(proposal, problem) - chunks)
    return proposal.resident < 2, away, not proposal.terms, proposal.splits, proposal.depth, proposal.warps
