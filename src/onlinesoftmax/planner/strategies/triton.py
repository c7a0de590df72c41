"""What the Triton strategies propose.

Every number here was chosen by a sweep on an H200 and is explained where it stands.
"""

from __future__ import annotations

from ...core.device import Device
from ...core.problem import Problem
from ..proposal import Blocks, Proposal, Traffic, clamp, no_gpu, power_of_two, reads, unaligned, words_of

REGISTER_ELEMENTS = 64
"""32-bit elements of a row that one thread keeps in registers beside what it works with."""

MERGE_FAN = 4096
"""States that one program of `split` merges: 32 a thread."""


def triton_row(problem: Problem, device: Device) -> Proposal | str:
    """Whole rows in registers."""
    if refusal := no_gpu("Triton", device):
        return refusal
    peeled = problem.peels
    block = power_of_two(problem.cols // problem.vector * problem.vector if peeled else problem.cols)
    words = words_of(problem)
    most = 1024 * REGISTER_ELEMENTS // words
    if block > most:
        return (
            f"a row of {problem.cols} columns, padded to {block}, does not fit the registers of one program: "
            f"{most} {problem.dtype} elements do"
        )
    rows, warps = _tile_of_rows(problem, block, peeled)
    programs, stages, quality = -(-problem.rows // rows), 0, 0.97
    full = rows * block * words >= 32768
    if full:
        warps, stages, quality = _whole_multiprocessor(problem, device, block, peeled)
        programs = device.multiprocessors if stages else programs
    reason = f"a row of {problem.cols} columns fits the registers of one program, so it is read once"
    if rows > 1:
        reason += f"; {rows} rows share a program"
    if stages:
        reason += f"; {stages} rows are in flight on each multiprocessor"
    elif full:
        reason += ", but it fills the registers of a multiprocessor, so that no other row loads meanwhile"
    return Proposal(
        "triton", "row", reason + unaligned(peeled),
        Blocks(programs, block, rows, warps=warps, stages=stages, vector=problem.vector if peeled else 1),
        traffic=Traffic(quality=quality),
    )  # fmt: skip


def _tile_of_rows(problem: Problem, block: int, peeled: bool) -> tuple[int, int]:
    """(rows, warps) of a program of `row` that leaves its multiprocessor room for others."""
    # A smaller tile would spend its time in being scheduled; where nothing but a number is written, more so.
    light = not problem.writes_elements and problem.itemsize == 2
    tile = 2048 if light else 1024
    # 16-bit elements: 16 a thread, two 16-byte loads in flight and registers for full occupancy.
    # Exact float32, and long cut rows, want fewer and busier threads: 32 elements each, or 64.
    long = block * problem.itemsize > 512
    busy = (long if peeled else problem.itemsize > 2 and block < 4096) or not problem.writes_elements
    if not peeled and block > problem.cols and 64 < block <= 256 and problem.writes_elements:
        # Lanes past the row's end load nothing, so a tile needs more of them, or more tiles a multiprocessor.
        busy, tile = True, 2048 if block == 128 else 512 if problem.itemsize > 2 else 1024
    rows = max(1, tile // block)
    elements = rows * block * words_of(problem)
    if elements == 16384 and (peeled or problem.itemsize == 2):
        # Fewer, busier threads: more blocks stay resident.
        return rows, 8
    if (problem.extra.bias_bytes or problem.extra.masked) and problem.itemsize == 4 and elements in (4096, 16384):
        # What is loaded beside the row waits in registers: of more threads, or of fewer that have more.
        return rows, 16 if elements == 4096 else 8
    return rows, clamp(elements // (2048 if light else 1024 if busy else 512), 1, 16)


def _whole_multiprocessor(problem: Problem, device: Device, block: int, peeled: bool) -> tuple[int, int, float]:
    """(warps, stages, quality) of a program of `row` whose row fills the registers of a multiprocessor."""
    two_byte, gradient = problem.itemsize == 2, problem.inputs > 1
    elements = block * words_of(problem)
    # Of a gradient, 16 warps leave each thread the registers for both tensors; 8, those for a bias.
    warps = 16 if (peeled and elements == 32768) or gradient else 32
    warps = 8 if problem.extra.bias_bytes and problem.itemsize == 4 else warps
    quality = 0.5 if elements > 32768 else 0.65 if not problem.writes_elements else 0.88
    quality = 0.95 if gradient and two_byte else quality
    quality = min(quality, 0.7) if peeled and two_byte else quality
    # Nothing else loads while it reduces: let it prefetch its own next rows, where three of them fit shared memory.
    fits = 3 * block * (problem.itemsize * problem.inputs + problem.extra.bias_bytes) <= device.shared_memory
    stages = 3 if fits and not peeled and problem.contiguous and problem.rows > device.multiprocessors else 0
    return warps, stages, quality


def triton_looped(problem: Problem, device: Device) -> Proposal | str:
    """One program streams one row."""
    if refusal := no_gpu("Triton", device):
        return refusal
    peeled, wide = problem.peels, problem.itemsize > 2
    # 8 elements of a lane side by side are one 16-byte load of 16-bit data.
    depth, lanes, warps = 4, 4096, 16
    if problem.inputs > 1:
        # A gradient's sums need no rescaling to share.  With twice the bytes of a row to come back to, one
        # program a multiprocessor keeps the most of them in L2.
        depth, lanes, warps = (2, 8192, 16) if wide else (1 if problem.cols <= 32768 else 2, 8192, 32)
    elif peeled:
        lanes, warps = 2048, 16 if wide else 8
    elif problem.cols > 65536 and problem.writes_elements:
        lanes, warps = 8192, 32
    if problem.extra.masked:
        # Triton moves a mask of several rows of lanes through shared memory, and takes five times as long.
        depth, lanes, warps = 1, 8192, 32 if wide else 16
    lanes = clamp(power_of_two(problem.cols) // depth, 32, lanes // 2 if problem.itemsize == 8 else lanes)
    warps = clamp(lanes // 128, 1, warps)
    return Proposal(
        "triton", "looped",
        f"one program streams each row of {problem.cols} columns{', twice' if reads(problem) == 2 else ''}; "
        f"{problem.rows} rows share the device" + unaligned(peeled),
        Blocks(problem.rows, depth * lanes, depth=depth, warps=warps, vector=problem.vector if peeled else 1),
        traffic=Traffic(reads(problem), quality=0.93 if problem.writes_elements else 0.69),
    )  # fmt: skip


def triton_split(problem: Problem, device: Device) -> Proposal | str:
    """Many programs share a row."""
    if refusal := no_gpu("Triton", device):
        return refusal
    lanes, warps = 1024, 4
    # Small rows make small tiles, so that there is one for every multiprocessor.
    depth = 4 if problem.itemsize == 8 or problem.cols < 16 * lanes * device.multiprocessors else 8
    depth //= problem.inputs
    if problem.extra.masked:
        # As in `looped`.
        depth, lanes, warps = 1, 4096 // (problem.itemsize // 4 or 1), 8
    tile = depth * lanes
    # 32 programs a multiprocessor: enough to even out their ends, few enough to merge in one launch.
    wanted = max(1, 32 * device.multiprocessors // max(problem.rows, 1))
    tiles = max(1, -(-problem.cols // tile))
    splits = -(-tiles // -(-tiles // wanted))
    merges, count = 1, -(-splits // MERGE_FAN)
    while count > 1:
        merges, count = merges + 1, -(-count // MERGE_FAN)
    return Proposal(
        "triton", "split",
        f"{splits} programs share each row; their states merge in {merges} launch{'es' if merges > 1 else ''}"
        + unaligned(problem.peels)
        if splits > 1
        else "a row is no more than one program's slice, so that splitting it only adds launches",
        Blocks(
            problem.rows * splits, tile, depth=depth, warps=warps, splits=splits,
            vector=problem.vector if problem.peels else 1,
        ),
        traffic=Traffic(reads(problem), (1 + merges) * problem.reduces + problem.writes_elements, 0.92),
    )  # fmt: skip


def triton_column(problem: Problem, device: Device) -> Proposal | str:
    """Adjacent rows as they lie."""
    if refusal := no_gpu("Triton", device):
        return refusal
    if problem.contiguous:
        return "the elements of a row are neighbours: there are no rows side by side to read together"
    if problem.access.adjacent < 8:
        return f"{problem.access.adjacent} rows lie side by side: fewer than 8 do not fill a 32-byte sector"
    words = words_of(problem)
    block, neighbours = power_of_two(problem.cols), power_of_two(problem.access.adjacent)
    # 32 neighbours are whole sectors of any dtype; more where the columns alone are no work.
    rows = clamp(max(32, 4096 // words // block), 8, neighbours)
    whole = rows * block * words <= 32768
    if not whole:
        block = max(1, (32768 if problem.itemsize == 2 else 8192) // words // rows)
    return Proposal(
        "triton", "column",
        f"the softmax dimension is strided and {problem.access.adjacent} rows lie side by side: a program reads {rows} "
        f"of them as they lie" + ("" if whole else f", {block} columns at a time"),
        Blocks(
            problem.rows // problem.access.adjacent * -(-problem.access.adjacent // rows), block, rows,
            warps=clamp(rows * block * problem.itemsize // 4096, 1, 16),
        ),
        traffic=Traffic(1 if whole else reads(problem), quality=0.7),
    )  # fmt: skip
