"""Proposals of the Pallas strategies: for a problem, all blocks that are worth measuring, likeliest first.

The sides of a tile that goes through Triton are powers of two, masked where rows end before; blocks of `cluster`,
which go through Mosaic, hold slices of any whole number of 16 bytes.
"""

from __future__ import annotations

import itertools

from ...core.accumulators import Argmax
from ...core.device import Device
from ...core.problem import Problem
from ..proposal import Proposal, clamp, power_of_two, propose, reads, words_of
from ..quality import padded_from, quality
from ..variant import Variant

REGISTER_ELEMENTS = 32
"""Elements of a row that a thread of `row` holds, as a rule."""

SHORT = 512
"""Columns of rows that share a program of `row`, at most: 16 for each thread of a warp."""

WARP_ELEMENTS, WARP_REGISTERS = 96, 192
"""Elements of a row and 32-bit registers of all inputs that a thread holds at most, of 255 registers that it has."""

TILE_BYTES = 16 << 10
"""Bytes of a tile that is streamed, of one input, as a rule: four 16-byte loads for each of 256 threads."""

THREAD_BYTES = 64
"""Bytes of a tile that a thread holds: four 16-byte loads in flight."""

CLUSTER_THREADS = 128
"""Threads of a block of `cluster`: a warpgroup."""

ROW_BYTES = 24 << 10
"""Most bytes of an input that one block of `cluster` holds where several could: seven blocks share a multiprocessor."""

SLICE_BYTES = 50 << 10
"""Bytes of all inputs that one of several blocks holds, if it can be: four such blocks share a multiprocessor."""

OTHER_BYTES = 7 << 10
"""Shared memory of a block beside its slices: states, barriers, and the scratch memory of reductions."""

MOST_SHARE = 1.5
"""Most bandwidth of a multiprocessor, in times of its part of the device's.

Measured on an H100 and an H200: 16 blocks take 4 us more for a row of 1 MB than for one of 128 kB, and 10 us for 2 MB.
"""

EXCHANGE_BYTES = 1 << 10
"""Bytes that one block could load while its cluster exchanges states, which takes an eighth of a microsecond: its share
of the bandwidth of a device of 4000 GB/s with four blocks on each of 132 multiprocessors."""

MOST_SPLITS = 2048
"""Programs that share a row of `split`: each of them merges the states of all."""

LARGEST = (1 << 31) - MOST_SPLITS * TILE_BYTES
"""The largest number that the 32-bit indices of a kernel may stand for, with room for the last tile to end beyond:
rows, columns, and all elements of unaligned rows."""


def _refusal(problem: Problem) -> str | None:
    """Why no kernel of ours can run a problem; None where one may."""
    if max(problem.rows, problem.cols) > LARGEST:
        return f"{problem.rows} x {problem.cols}: a kernel's indices end at {LARGEST}"
    if any(one.kind is Argmax for one in problem.declaration.summed(problem.outputs)):
        return "Pallas has no argmax of a row"
    return None


def _plain(problem: Problem) -> bool:
    """True where logits are taken as they are, and have 32 bits at most."""
    return problem.itemsize < 8 and not problem.fused


def _is_compute_bound(problem: Problem) -> bool:
    """True where instructions, not memory, limit the speed: exponentials of 16-bit elements."""
    return problem.itemsize == 2 and problem.inputs == 1


def _body(problem: Problem) -> tuple[int, int]:
    """(elements of 16 bytes, columns in whole 16 bytes) where Triton splits unaligned rows, else (1, all columns)."""
    long = problem.peels_narrow and problem.cols >= SHORT
    vector = problem.vector if long and problem.rows * problem.cols <= LARGEST else 1
    return vector, problem.cols // vector * vector


def _two_powers(cols: int) -> int:
    """The least sum of at most two powers of two that holds the columns: each is the side of one tile."""
    whole, large = power_of_two(cols), power_of_two(cols + 1) // 2
    return whole if whole == large else min(whole, large + power_of_two(cols - large))


def row(problem: Problem, device: Device) -> list[Proposal] | str:
    """Whole rows in the registers of a program."""
    if refusal := _refusal(problem):
        return refusal
    (_, body), words, short = _body(problem), words_of(problem), problem.cols <= SHORT
    most = 1024 * REGISTER_ELEMENTS // words
    if _two_powers(body) > most:
        return (
            f"a row of {problem.cols} columns, padded to {_two_powers(body)}, does not fit the registers of one "
            f"program: {most} {problem.dtype} elements do"
        )
    # One tile has one reduction; where instructions limit the speed, columns that are not there cost more than that.
    padded = short and _plain(problem) and problem.cols >= padded_from(problem.itemsize * problem.inputs)
    # Elements that do not lie on 16 bytes are moved one by one, so a thread holds fewer of them.
    tile = SHORT if problem.cols % problem.vector else max(SHORT, 32 * THREAD_BYTES // problem.itemsize)
    tiles = sorted((SHORT, 2 * SHORT, 4 * SHORT), key=lambda n: abs(n - tile)) if short else [0]
    pads = (padded, not padded) if short and power_of_two(body) != _two_powers(body) else (padded,)
    # A warp alone waits for no other.
    one_warp = _plain(problem) and _two_powers(body) <= 32 * WARP_ELEMENTS
    one_warp = one_warp and _two_powers(body) * words <= 32 * WARP_REGISTERS
    held = (WARP_ELEMENTS, REGISTER_ELEMENTS) if one_warp else (REGISTER_ELEMENTS, REGISTER_ELEMENTS // 2)
    return [
        _row(problem, tile, elements, pad)
        for elements, pad, tile in itertools.product(held, pads, tiles)
        if pad == pads[0] or elements == held[0]
    ]


def _row(problem: Problem, tile: int, elements: int, padded: bool) -> Proposal:
    """Rows in tiles of at least `tile` elements, `elements` of them for each thread."""
    vector, body = _body(problem)
    block = power_of_two(body) if padded else _two_powers(body)
    # A tile of one row would not share the instructions of its reduction.
    rows = max(2, tile // block) if tile else 1
    if tile and block != power_of_two(block):
        # The smaller tile may be one column but occupies a warp, so take more rows.
        rows = power_of_two(-(-17 * tile // (16 * block)))
    rows = min(rows, power_of_two(max(problem.rows, 1)))
    # Every warp more adds the instructions of a reduction, so where they limit the speed, its number is rounded down.
    held = rows * block if _is_compute_bound(problem) else power_of_two(rows * block)
    warps = power_of_two(clamp(held // (32 * elements), 1, 32) + 1) // 2
    reason = f"a row of {problem.cols} columns fits the registers of one program, so it is read once"
    reason += f"; {rows} rows share a program" if rows > 1 else ""
    case = "one warp" if warps == 1 and _plain(problem) else "unaligned" if vector > 1 else ""
    return propose(
        problem, "pallas", "row", reason, vector > 1, programs=-(-problem.rows // rows), block=block,
        rows_per_program=rows, warps=warps, case=case, variant=Variant(elements=elements, tile=tile, padded=padded),
    )  # fmt: skip


def _tiles(problem: Problem) -> list[tuple[int, int, Variant]]:
    """(columns, warps, variant) of the tiles that `looped` and `split` may stream."""
    found = []
    for nbytes in (TILE_BYTES, TILE_BYTES // 2, 2 * TILE_BYTES):
        tile = nbytes // problem.itemsize
        block = min(tile, power_of_two(_body(problem)[1]))
        warps = clamp(block * problem.itemsize // (32 * THREAD_BYTES), 1, 32)
        found.append((block, warps, Variant(tile=tile)))
    return found


def looped(problem: Problem, device: Device) -> list[Proposal] | str:
    """One program streams one row."""
    if refusal := _refusal(problem):
        return refusal
    vector, _ = _body(problem)
    reason = (
        f"one program streams each row of {problem.cols} columns{', twice' if reads(problem) == 2 else ''}; "
        f"{problem.rows} programs share the device"
    )
    return [
        propose(
            problem, "pallas", "looped", reason, vector > 1, programs=problem.rows, block=block, warps=warps,
            variant=variant, reads=reads(problem),
        )
        for block, warps, variant in _tiles(problem)
    ]  # fmt: skip


def cluster(problem: Problem, device: Device) -> list[Proposal] | str:
    """Rows in the shared memory of several blocks that read each other's states."""
    if refusal := _refusal(problem) or _not_for_mosaic(problem, device):
        return refusal
    vector, ragged = problem.vector, problem.cols % problem.vector != 0
    tile, most = CLUSTER_THREADS * vector, device.shared_memory - OTHER_BYTES
    span = (problem.cols + 2 * vector - 2) // vector * vector if ragged else problem.cols
    found, first = [], None
    for size in (1, 2, 4, 8, 16):
        length = -(-span // (size * vector)) * vector
        held = length * problem.inputs * problem.itemsize
        if length < tile or held > most:
            continue
        found.append(_cluster(problem, device, size, length))
        wanted = ROW_BYTES * problem.inputs if size == 1 else SLICE_BYTES
        if first is None and (held <= wanted + (32 * problem.inputs if ragged else 0) or size == 16):
            first = size
    if not found:
        if span < tile:
            return f"a row of {problem.cols} columns is shorter than a tile of {tile}"
        return f"a row of {problem.cols} columns takes more than the shared memory of 16 blocks, {most} bytes each"
    # Beside the first, the nearest sizes.
    found.sort(key=lambda c: abs(c.splits.bit_length() - (first or found[-1].splits).bit_length()))
    return found[:3]


def _not_for_mosaic(problem: Problem, device: Device) -> str | None:
    """Why Mosaic kernels cannot run a problem; None where they can."""
    if device.compute_capability < (9, 0):
        return f"clusters of blocks need compute capability 9.0, and {device.name} has {device.arch}"
    if not _plain(problem):
        return "Mosaic kernels take logits as they are, of 16 and 32 bits"
    elements = problem.rows * problem.cols
    if problem.cols % problem.vector and elements > LARGEST:
        return f"rows of {problem.cols} {problem.dtype} elements are not whole 16 bytes, and are {elements} in all"
    if problem.cols % problem.vector and elements % problem.vector:
        return (
            f"rows of {problem.cols} {problem.dtype} elements are not whole 16 bytes, and neither are all "
            f"{problem.rows} of them"
        )
    return None


def _cluster(problem: Problem, device: Device, size: int, length: int) -> Proposal:
    """Rows in slices of `length` columns, one for each of `size` blocks."""
    ragged = problem.cols % problem.vector != 0
    reason = f"{size} blocks hold" if size > 1 else "one block holds"
    reason += f" a row of {problem.cols} columns in shared memory, so it is read once"
    return propose(
        problem, "pallas", "cluster", reason, ragged, programs=problem.rows * size, block=length,
        warps=CLUSTER_THREADS // 32, splits=size, quality=_quality_of_slices(problem, device, size, length),
        variant=Variant(blocks=size),
    )  # fmt: skip


def _quality_of_slices(problem: Problem, device: Device, size: int, length: int) -> float:
    """Part of the bandwidth that is left for slices of this length.

    Blocks lose time while they exchange states and in a partly filled last tile.  A few blocks with a multiprocessor
    each cannot use the bandwidth of the device.
    """
    held = length * problem.inputs * problem.itemsize
    if held > (device.shared_memory - OTHER_BYTES) // 2:
        share = MOST_SHARE * problem.rows * size / device.multiprocessors
        return min(share, quality("pallas", "cluster", "alone, gradient" if problem.inputs > 1 else "alone"))
    part = quality("pallas", "cluster")
    if size > 1:
        return part * held / (held + EXCHANGE_BYTES)
    if problem.cols % problem.vector and _is_compute_bound(problem):
        # The last tile takes as long as the others, however few new columns it has.
        tile = CLUSTER_THREADS * problem.vector
        part = min(part, problem.cols / (-(-length // tile) * tile))
    return part * held / (held + EXCHANGE_BYTES // 4)


def split(problem: Problem, device: Device) -> list[Proposal] | str:
    """Several programs share a row, and a second launch merges their states."""
    if refusal := _refusal(problem):
        return refusal
    vector, body = _body(problem)
    found = []
    for block, warps, variant in _tiles(problem):
        # 16 programs a multiprocessor are its 2048 threads at 128 threads each.
        wanted = -(-16 * device.multiprocessors // max(problem.rows, 1))
        splits = clamp(wanted, 1, min(-(-body // block), MOST_SPLITS))
        reason = f"{splits} programs share a row of {problem.cols} columns, and a second launch merges their states"
        found.append(
            propose(
                problem, "pallas", "split", reason, vector > 1, programs=problem.rows * splits, block=block,
                warps=warps, splits=splits, variant=variant, reads=reads(problem), launches=int(problem.reduces) + 1,
            )
        )  # fmt: skip
    return found
