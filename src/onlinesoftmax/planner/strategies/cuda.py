"""Proposals of the CUDA strategies: for a problem, all blocks that are worth measuring, likeliest first.

A row is divided into chunks of 16 bytes, and each thread holds the same number of chunks, so no row is padded to a
power of two.  The choices that remain are the number of threads that share a row, and the numbers of rows and blocks
in flight.  `onlinesoftmax tune` measures them; without its table, the first proposal is taken.
"""

from __future__ import annotations

import itertools
from dataclasses import fields
from typing import Any

from ...core.device import Device
from ...core.problem import Problem
from ..proposal import Blocks, Proposal, Threads, Traffic, no_gpu, reads, unaligned
from ..quality import quality
from ..variant import Variant

HELD_REGISTERS = 64
"""Most registers of a thread for its chunks of a row."""

SCORE_REGISTERS = 32
"""Preferred limit when a thread holds scores; above it the compiler starts computing before all loads are issued."""

OTHER_REGISTERS = 32
"""Registers of a thread for everything but its chunks of a row."""

MOST_BLOCKS = (1 << 31) - 1
"""Most blocks of one launch."""


def _chunks(problem: Problem) -> int:
    """Most whole chunks that a row can have; an unaligned row also has a head and a tail."""
    return max(1, problem.cols // problem.vector)


def peels(problem: Problem) -> bool:
    """True where unaligned rows are split into head, body and tail: narrower loads are never as fast here."""
    return (
        problem.contiguous and problem.access.peelable and problem.aligned_bytes < 16 and problem.cols >= problem.vector
    )


def _words(problem: Problem, terms: bool = False) -> int:
    """Registers for a chunk: for everything that is loaded for it, or for the terms or scores that are made of it."""
    loaded = 4 * problem.inputs + -(-problem.vector * (problem.extra.bias_bytes + problem.extra.masked) // 4)
    made = problem.vector * (2 if problem.itemsize == 8 else 1)
    return max(loaded, made) if terms or _makes_scores(problem) else loaded


def _makes_scores(problem: Problem) -> bool:
    """True where a thread holds scores instead of logits."""
    return problem.extra.fused and problem.inputs == 1


def _light(found: list[Proposal], problem: Problem) -> list[Proposal]:
    """The proposals within SCORE_REGISTERS; all of them where none is, or where no scores are made."""
    if not _makes_scores(problem):
        return found
    return [c for c in found if _held(c, problem) * _words(problem, c.threads.terms) <= SCORE_REGISTERS] or found


def _most(problem: Problem, threads: int, device: Device, terms: bool = False) -> int:
    """Most chunks that each thread may hold where a multiprocessor has so many threads."""
    free = device.registers // threads - _other(problem, device)
    return max(0, min(HELD_REGISTERS, free)) // _words(problem, terms)


def _terms(problem: Problem) -> tuple[bool, ...]:
    """Choices of keeping terms: always where they take no more registers than the elements; else either may win."""
    if not problem.declaration.may_keep_terms or not problem.writes_elements:
        return (False,)
    return (True,) if _words(problem, True) == _words(problem, False) else (True, False)


def _other(problem: Problem, device: Device) -> int:
    """Registers of a thread for everything but its chunks; arithmetic in float64 takes more, and so does a target."""
    # The sums of a float32 gradient have 64 bits; on Hopper the compiler needs no more registers for them.
    sums_wide = problem.inputs > 1 and problem.itemsize == 4 and device.compute_capability >= (10, 0)
    target = 0
    if problem.declaration.has_target:
        # The target's column, score and factors; with score options, the numbers of its slope too.
        target = 16 if problem.extra.fused else 8
    return OTHER_REGISTERS + target + (56 if problem.itemsize == 8 or sums_wide else 0)


def _resident(problem: Problem, threads: int, chunks: int, terms: bool, device: Device) -> int:
    """Blocks that a multiprocessor can hold with the registers that each thread needs."""
    blocks = device.registers // (threads * (_other(problem, device) + chunks * _words(problem, terms)))
    return max(1, min(blocks, device.threads // threads, 32))


_THREADS = {field.name for field in fields(Threads)}


def _proposal(problem: Problem, strategy: str, reason: str, variant: Variant, **blocks: Any) -> Proposal:
    """A proposal; `blocks` are attributes of Blocks and Threads by name, and `reads` where it is not 1."""
    peeled = peels(problem)
    traffic = Traffic(blocks.pop("reads", 1), quality=quality("cuda", strategy))
    threads = Threads(**{name: blocks.pop(name) for name in _THREADS & blocks.keys()})
    kept = Blocks(**blocks, vector=problem.vector if peeled else 1)
    return Proposal("cuda", strategy, reason + unaligned(peeled), kept, threads, traffic, variant)


def row(problem: Problem, device: Device) -> list[Proposal] | str:
    """Whole rows in the registers of a group of threads."""
    if refusal := no_gpu("CUDA", device):
        return refusal
    chunks, found = _chunks(problem), []
    blocks = list(itertools.product((128, 256, 512, 1024), (1, 2), _terms(problem)))
    most_of = {(threads, terms): _most(problem, threads, device, terms) for threads, _, terms in blocks}
    for lanes, (threads, depth, terms) in itertools.product((1 << i for i in range(2, 11)), blocks):
        held, most = -(-chunks // lanes), most_of[threads, terms]
        if held > most or (lanes > 4 and held * lanes >= 2 * max(chunks, 4)):
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
            _proposal(
                problem, "row", reason, programs=-(-problem.rows // rows), block=held * lanes * problem.vector,
                rows_per_program=rows, depth=depth, warps=threads // 32, lanes=lanes, terms=terms,
                resident=_resident(problem, threads, held * depth, terms, device),
                variant=Variant(threads=threads, lanes=lanes, depth=depth, terms=terms),
            )
        )  # fmt: skip
    found = [proposal for proposal in found if proposal.programs <= MOST_BLOCKS]
    # One block alone would not load while it computes, so two are resident.  Two chunks a thread are two loads in
    # flight; kept terms save an exponential; small blocks wait less for each other.
    found.sort(
        key=lambda c: (c.threads.resident < 2, abs(_held(c, problem) - 2), not c.threads.terms, c.blocks.depth, c.warps)
    )
    return _light(found, problem) or (
        f"a row of {problem.cols} columns does not fit the registers of one block: "
        f"{_in_block(problem, device)} {problem.dtype} elements do"
    )


def _in_block(problem: Problem, device: Device) -> int:
    """Most elements that the registers of one block hold."""
    return max(threads * _most(problem, threads, device) for threads in (512, 1024)) * problem.vector


def _held(proposal: Proposal, problem: Problem) -> int:
    """Chunks of a row that a thread holds in registers."""
    return proposal.block // (proposal.threads.lanes * problem.vector)


def cluster(problem: Problem, device: Device) -> list[Proposal] | str:
    """Rows in the registers of several blocks that reach each other's shared memory."""
    if refusal := no_gpu("CUDA", device):
        return refusal
    if device.compute_capability < (9, 0):
        return f"clusters of blocks need compute capability 9.0, and {device.name} has {device.arch}"
    if 2 * problem.rows > MOST_BLOCKS:
        return f"{problem.rows} rows are more clusters than one launch takes"
    chunks = _chunks(problem)
    found: list[Proposal] = []
    for threads, blocks, terms in itertools.product((128, 256, 512, 1024), (2, 4, 8, 16), _terms(problem)):
        # Slices start on 128 bytes, a cache line, so that no two blocks load the same one.
        length = -(-chunks // blocks // 8) * 8
        held = -(-length // threads)
        if (length < 64 and blocks > 2) or (threads == 1024 and found) or problem.rows * blocks > MOST_BLOCKS:
            continue
        if held > _most(problem, threads, device, terms) or (held * threads >= 2 * length and threads > 128):
            continue
        resident = _resident(problem, threads, held, terms, device)
        reason = f"{blocks} blocks hold a row of {problem.cols} columns in registers, so it is read once"
        found.append(
            _proposal(
                problem, "cluster", reason, programs=problem.rows * blocks, block=held * threads * problem.vector,
                warps=threads // 32, lanes=threads, splits=blocks, terms=terms, resident=resident,
                variant=Variant(threads=threads, blocks=blocks, terms=terms),
            )
        )  # fmt: skip
    # Variants are ranked as in `row`, but three chunks a thread are best, because a block also waits for the states of
    # the other blocks.
    found.sort(
        key=lambda c: (c.threads.resident < 2, abs(_held(c, problem) - 3), not c.threads.terms, c.splits, c.warps)
    )
    most = 16 * _in_block(problem, device)
    return (
        _light(found, problem)
        or f"a row of {problem.cols} columns does not fit 16 blocks: {most} {problem.dtype} elements do"
    )


def grid(problem: Problem, device: Device) -> list[Proposal] | str:
    """Rows in the registers and shared memory of a team of blocks: all of the device, or a part of it for each row."""
    if refusal := no_gpu("CUDA", device):
        return refusal
    found = [
        proposal
        for threads, held in itertools.product((128, 256, 512), (4, 8, 16))
        if held <= _most(problem, threads, device)
        for proposal in _teams(problem, device, threads, held, _resident(problem, threads, held, False, device), False)
    ]
    if not problem.extra.fused:
        # Shared memory holds logits; a bias or a mask would be read again beside them.
        for threads, resident, held in (
            (1024, 1, 2), (1024, 1, 4), (512, 2, 4), (512, 1, 8), (512, 1, 16), (256, 4, 4), (256, 2, 8),
        ):  # fmt: skip
            most = min(max(1, held * 4 // _words(problem)), _most(problem, threads * resident, device))
            found += _teams(problem, device, threads, most, resident, True)
    found.sort(key=lambda c: (c.reads, c.threads.shared > 0, -c.block * c.programs))
    return list(dict.fromkeys([*_pipelines(problem, device), *found]))


def slice_chunks(chunks: int, team: int) -> int:
    """Chunks of a block's slice of a row; slices start on 128 bytes."""
    return -(-chunks // (8 * team)) * 8


def slice_tiles(chunks: int, team: int, threads: int) -> int:
    """Tiles of a block's slice of a row."""
    return max(1, -(-slice_chunks(chunks, team) // threads))


def pipelined(proposal: Proposal) -> bool:
    """True for the plans of `grid` that load and reduce the next rows while one row is written."""
    return proposal.strategy == "grid" and proposal.blocks.stages > 0


SPECIAL_WARPS = 2
"""Warps of a pipelined block that hold no part of a row: one loads, one exchanges states."""

PIPELINES = ((320, 112, (5, 3, 9), (2, 1, 3)), (448, 80, (3, 2, 6), (2, 1, 3)))
"""Blocks of the pipelined kernel: threads that hold a row, their registers for chunks of it, and the chunks of a tile
that each thread has, where a chunk takes 4 registers and where it takes more.

With the special warps, each quarter of a multiprocessor has four or three warps of a block, so a thread can have 128 or
168 registers.
"""

PIPELINED_ROWS = 3
"""Fewest rows of each team for the pipelined kernel: one is written, one waits for its state, and one is reduced."""


def _not_pipelined(problem: Problem, device: Device) -> str:
    """Why the pipelined kernel of `grid` cannot run a problem; empty where it can."""
    if device.compute_capability < (9, 0):
        return "bulk copies need compute capability 9.0"
    if not problem.contiguous or (problem.aligned_bytes < 16 and not peels(problem)):
        return "bulk copies need rows whose aligned columns are adjacent"
    if not problem.access.alike:
        return "bulk copies need inputs of one dtype, each with adjacent columns"
    if problem.out_dtype == "float64" != problem.dtype:
        return "the exponentials in float64 do not fit the places of narrower elements"
    if problem.extra.nbytes:
        return "a bias or a mask would be read twice"
    if not (problem.reduces and problem.writes_elements):
        return "it is for operations that reduce rows and write elements"
    return ""


def _pipelines(problem: Problem, device: Device) -> list[Proposal]:
    """Teams of blocks that load and reduce the next rows while one row is written."""
    if _not_pipelined(problem, device):
        return []
    chunks, blocks = _chunks(problem), device.multiprocessors
    terms = problem.itemsize >= 4 and _terms(problem)[-1]
    words = _words(problem, terms)
    found = []
    for lanes, registers, *depths in PIPELINES:
        for depth in depths[words > 4]:
            held = (registers + OTHER_REGISTERS - _other(problem, device)) // words // depth * depth
            # The ring shares the memory with the maxima that kept terms are relative to.
            maxima = held // depth * lanes * problem.itemsize if terms else 0
            # The states of all warps and the barriers; states in float64 take twice the bytes.
            fixed = 4096 if problem.itemsize == 8 else 2048
            stages = (device.shared_memory - fixed - maxima) // (lanes * depth * 16 * problem.inputs)
            smallest = -(-chunks // (lanes * held)) if held else blocks + 1
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
                _proposal(
                    problem, "grid", reason, programs=teams * team, block=tiles * depth * lanes * problem.vector,
                    depth=depth, warps=lanes // 32 + SPECIAL_WARPS, lanes=lanes, splits=team, stages=stages,
                    shared=stages * depth, terms=terms,
                    variant=Variant(threads=lanes, chunks=held, depth=depth, stages=stages, team="teams"),
                )
            )  # fmt: skip
    return found


def _teams(
    problem: Problem, device: Device, threads: int, held: int, resident: int, with_shared: bool
) -> list[Proposal]:
    """Teams of blocks with `held` chunks a thread in registers: the most that fit, or one."""
    chunks, blocks = _chunks(problem), resident * device.multiprocessors
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
        if problem.rows >= PIPELINED_ROWS * (blocks // team) and (why_not := _not_pipelined(problem, device)):
            reason += f"; not pipelined: {why_not}"
        found.append(
            _proposal(
                problem, "grid", reason, programs=min(problem.rows, blocks // team) * team,
                block=min(held, tiles) * threads * problem.vector, warps=threads // 32, lanes=threads, splits=team,
                shared=shared, resident=resident, depth=min(held, 4), terms=_terms(problem)[-1],
                variant=Variant(threads=threads, chunks=held, shared=with_shared, team=word),
                reads=reads(problem) if streamed else 1,
            )
        )  # fmt: skip
    return found


def looped(problem: Problem, device: Device) -> list[Proposal] | str:
    """One block streams one row."""
    if refusal := no_gpu("CUDA", device):
        return refusal
    if problem.rows > MOST_BLOCKS:
        return f"{problem.rows} rows are more blocks than one launch takes"
    found = []
    for threads, held in ((512, 4), (1024, 2), (512, 2), (256, 4), (1024, 4), (256, 8), (128, 4)):
        held = min(held, _most(problem, threads, device))
        if not held:
            continue
        resident = _resident(problem, threads, held, False, device)
        reason = (
            f"one block streams each row of {problem.cols} columns{', twice' if reads(problem) == 2 else ''}; "
            f"{problem.rows} rows share the device"
        )
        found.append(
            _proposal(
                problem, "looped", reason, programs=problem.rows, block=held * threads * problem.vector,
                warps=threads // 32, lanes=threads, resident=resident, reads=reads(problem),
                variant=Variant(threads=threads, chunks=held),
            )
        )  # fmt: skip
    return list(dict.fromkeys(found))
