"""Proposals of the Triton strategies: for a problem, all blocks that are worth measuring, likeliest first.

The sides of a Triton tile are powers of two.  The first proposal follows from the registers that a program needs and
the bytes that it keeps in flight; `onlinesoftmax tune` measures which proposal is the fastest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

from ...core.device import Device
from ...core.problem import Problem
from .. import proposal
from ..proposal import Proposal, clamp, power_of_two, reads, words_of
from ..variant import Variant

ROW_WORDS_PER_THREAD = 64
"""32-bit words of a row that one thread keeps in registers, at most, beside its other values."""

MULTIPROCESSOR_WORDS = 32768
"""32-bit words of a tile that fill the registers of a multiprocessor, which has 65536 for all values."""

STAGES = 3
"""Rows in flight in a persistent program: one is reduced, one is loaded, and one waits."""

LANE_ELEMENTS = 8
"""Neighbouring elements of a thread in a streamed tile: one 16-byte load of 16-bit elements."""

MERGE_FAN = 4096
"""States that one program of `split` merges: 32 for each of its 128 threads."""


def _nearest(found: Iterable[tuple[int, ...]], first: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Choices of numbers without repetition, those nearest to the first ahead, numbers compared by their logarithms."""

    def distance(choice: tuple[int, ...]) -> float:
        return sum(abs(math.log2((a or 1) / (b or 1))) for a, b in zip(choice, first, strict=True))

    return sorted(dict.fromkeys([first, *found]), key=distance)


def row(problem: Problem, device: Device) -> list[Proposal] | str:
    """Whole rows in the registers of a program."""
    block = power_of_two(problem.cols // problem.vector * problem.vector if problem.peels_narrow else problem.cols)
    words = words_of(problem)
    most = 1024 * ROW_WORDS_PER_THREAD // words
    if block > most:
        return (
            f"a row of {problem.cols} columns, padded to {block}, does not fit the registers of one program: "
            f"{most} {problem.dtype} elements do"
        )
    if block * words >= MULTIPROCESSOR_WORDS:
        return _whole_multiprocessor(problem, device, block)
    # A program that writes one number per row has only loads to wait for, so it takes twice the elements.
    light = not problem.writes_elements and problem.itemsize == 2
    # 16 elements of 16 bits a thread are two 16-byte loads in flight.  Short rows of wider elements, long unaligned
    # rows, and rows that give one number wait for reductions across threads, so fewer threads take 32 elements each.
    fewer_threads = block * problem.itemsize > 512 if problem.peels_narrow else problem.itemsize > 2 and block <= 2048
    first = (64 if light else 32 if fewer_threads or not problem.writes_elements else 16, 2048 if light else 1024)
    if block * words >= MULTIPROCESSOR_WORDS // 2 and (problem.peels_narrow or problem.itemsize == 2):
        # Two programs of 8 warps fit the registers, each thread with 64 elements.
        first = (64, first[1])
    choices = _nearest(itertools.product((16, 32, 64), (512, 1024, 2048)), first)
    return [_row(problem, block, elements, tile) for elements, tile in choices]


def _row(problem: Problem, block: int, elements: int, tile: int) -> Proposal:
    """Rows of `block` columns in tiles of at least `tile` elements, `elements` of them for each thread."""
    rows = max(1, tile // block)
    reason = f"a row of {problem.cols} columns fits the registers of one program, so it is read once"
    if rows > 1:
        reason += f"; {rows} rows share a program"
    warps = clamp(rows * block * words_of(problem) // (32 * elements), 1, 16)
    return _propose(
        problem, "row", reason, programs=-(-problem.rows // rows), block=block, rows_per_program=rows, warps=warps,
        variant=Variant(elements=elements, tile=tile),
    )  # fmt: skip


def _whole_multiprocessor(problem: Problem, device: Device, block: int) -> list[Proposal]:
    """Rows that fill the registers of a multiprocessor: no other row loads meanwhile, but its own next ones may."""
    words = block * words_of(problem)
    in_flight = STAGES * block * (problem.itemsize * problem.inputs + problem.bias_bytes)
    # Loads ahead go through shared memory, which takes no unaligned or strided rows.
    ahead = in_flight <= device.shared_memory and not problem.peels_narrow and problem.contiguous
    ahead = ahead and problem.rows > device.multiprocessors
    # With 1024 threads a thread has 64 registers in all; a gradient's two tensors, and a head and a tail, need more.
    first = (words // (512 if problem.inputs > 1 or problem.peels_narrow else 1024), STAGES if ahead else 0)
    choices = _nearest(itertools.product((32, 64, 128), (STAGES, 0) if ahead else (0,)), first)
    reason = f"a row of {problem.cols} columns fits the registers of one program, so it is read once"
    found = []
    for elements, stages in choices:
        if stages:
            more = f"; {stages} rows are in flight on each multiprocessor"
        else:
            more = ", but it fills the registers of a multiprocessor, so no other row loads meanwhile"
        found.append(
            _propose(
                problem, "row", reason + more, programs=device.multiprocessors if stages else problem.rows, block=block,
                stages=stages, warps=clamp(words // (32 * elements), 8, 32), case=_alone(problem, words, stages),
                variant=Variant(elements=elements, stages=stages),
            )
        )  # fmt: skip
    return found


def _alone(problem: Problem, words: int, stages: int) -> str:
    """The case of `quality` for a program that is alone on its multiprocessor."""
    if not problem.writes_elements:
        return "alone, row results"
    if stages:
        return ""
    if problem.peels_narrow and problem.itemsize == 2:
        return "alone, unaligned"
    if problem.inputs > 1 and problem.itemsize == 2:
        return "alone, gradient"
    return "spilled" if words > MULTIPROCESSOR_WORDS else "alone"


def looped(problem: Problem, device: Device) -> list[Proposal] | str:
    """One program streams one row."""
    # Columns of a lane share one rescaling of its sum.  A gradient holds two tensors, so half of them.
    # Triton moves a mask of several columns of a lane through shared memory, which takes five times as long.
    depth = 1 if problem.masked else 4 // problem.inputs
    # Large programs leave few rows in flight, so that L2 still holds a row when it is read again.  An unaligned row has
    # a head and a tail to wait for, so there more and smaller programs take turns.
    again = problem.writes_elements and (problem.cols > 65536 or problem.inputs > 1)
    lanes = 2048 if problem.peels_narrow and problem.inputs == 1 else 8192 if again or problem.masked else 4096
    # Neighbouring elements of a thread: one 16-byte load of 16-bit elements.  With 1024 threads a thread has 64
    # registers, too few for two tensors of 32 bits; unaligned rows wait for loads, so more threads issue them.
    wide = problem.itemsize > 2
    elements = 16 if wide and problem.inputs > 1 else 4 if wide and problem.peels_narrow else LANE_ELEMENTS
    # From compute capability 10 on, larger tiles of unaligned rows of 32 bits spill registers.
    small = wide and problem.peels_narrow and device.compute_capability >= (10, 0)
    sizes = (2048,) if small else (2048, 4096, 8192)
    choices = _nearest(itertools.product((depth,), sizes, (4, 8, 16)), (depth, lanes, elements))[:6]
    widest = power_of_two(problem.cols) // depth
    reason = (
        f"one program streams each row of {problem.cols} columns{', twice' if reads(problem) == 2 else ''}; "
        f"{problem.rows} rows share the device"
    )
    found = []
    for _, wanted, elements in choices:
        width = clamp(widest, 32, wanted // 2 if problem.itemsize == 8 else wanted)
        warps = clamp(width // (32 * elements), 1, 32)
        found.append(
            _streamed(
                problem, "looped", reason, programs=problem.rows, block=depth * width, depth=depth, warps=warps,
                variant=Variant(depth=depth, tile=depth * wanted, elements=elements),
            )
        )  # fmt: skip
    return found


def _streamed(problem: Problem, strategy: str, reason: str, **values: Any) -> Proposal:
    """A proposal of tiles that are streamed."""
    case = "" if problem.writes_elements else "row results"
    return _propose(problem, strategy, reason, reads=reads(problem), case=case, **values)


def _propose(problem: Problem, strategy: str, reason: str, **values: Any) -> Proposal:
    """A proposal of a Triton strategy."""
    return proposal.propose(problem, "triton", strategy, reason, problem.peels_narrow, **values)


def split(problem: Problem, device: Device) -> list[Proposal] | str:
    """Many programs share a row."""
    # Small rows make small tiles, so that there is one for every multiprocessor.
    small = problem.itemsize == 8 or problem.cols < 16384 * device.multiprocessors
    first = ((4 if small else 8) // problem.inputs, 1024)
    if problem.masked:
        # A mask of several columns of a lane is slow (see `looped`).
        first = (1, 4096 // (problem.itemsize // 4 or 1))
    deep = (first[0],) if problem.masked else (2, 4, 8)
    choices = _nearest(itertools.product(deep, (first[1], 2 * first[1])), first)
    return [_split(problem, device, depth, lanes) for depth, lanes in choices]


def _split(problem: Problem, device: Device, depth: int, lanes: int) -> Proposal:
    """Slices of a row in tiles of `depth` columns for each of `lanes` lanes."""
    # 32 programs a multiprocessor: enough to even out their ends, few enough to merge in one launch.
    wanted = max(1, 32 * device.multiprocessors // max(problem.rows, 1))
    tiles = max(1, -(-problem.cols // (depth * lanes)))
    splits = -(-tiles // -(-tiles // wanted))
    merges, count = 1, -(-splits // MERGE_FAN)
    while count > 1:
        merges, count = merges + 1, -(-count // MERGE_FAN)
    reason = f"{splits} programs share each row; their states merge in {merges} launch{'es' if merges > 1 else ''}"
    if splits == 1:
        reason = "one program holds a whole row, so that splitting it would only add a launch"
    return _streamed(
        problem, "split", reason, programs=problem.rows * splits, block=depth * lanes, depth=depth,
        warps=lanes // (32 * LANE_ELEMENTS), splits=splits, variant=Variant(depth=depth, tile=depth * lanes),
        launches=(1 + merges) * problem.reduces + problem.writes_elements,
    )  # fmt: skip


def column(problem: Problem, device: Device) -> list[Proposal] | str:
    """Adjacent rows as they lie."""
    if problem.contiguous:
        return "the elements of a row are neighbours: there are no rows side by side to read together"
    if problem.interleaved < 8:
        return f"{problem.interleaved} rows lie side by side: fewer than 8 do not fill a 32-byte sector"
    words = words_of(problem)
    block, neighbours = power_of_two(problem.cols), power_of_two(problem.interleaved)
    # 32 neighbours are whole sectors of any dtype; more where the columns alone are no work.
    rows = clamp(max(32, 4096 // words // block), 8, neighbours)
    whole = rows * block * words <= MULTIPROCESSOR_WORDS
    # A register holds two elements of 16 bits until they are used, so their tiles can be larger.
    sizes = (MULTIPROCESSOR_WORDS // 4, MULTIPROCESSOR_WORDS)
    tiles = sizes[1:] if whole else sorted(sizes, reverse=problem.itemsize == 2)
    found = []
    for tile in tiles:
        columns = block if whole else max(1, tile // words // rows)
        programs = problem.rows // problem.interleaved * -(-problem.interleaved // rows)
        reason = (
            f"the softmax dimension is strided and {problem.interleaved} rows lie side by side: a program reads {rows} "
            "of them as they lie" + ("" if whole else f", {columns} columns at a time")
        )
        found.append(
            _propose(
                problem, "column", reason, programs=programs, block=columns, rows_per_program=rows,
                warps=clamp(rows * columns * problem.itemsize // 4096, 1, 16), reads=1 if whole else reads(problem),
                variant=Variant(tile=tile),
            )
        )  # fmt: skip
    return found
