"""What the Pallas strategies propose: tiles whose sides are powers of two, masked where rows end before."""

from __future__ import annotations

from ...core.device import Device
from ...core.problem import Problem
from ..proposal import Blocks, Proposal, Traffic, clamp, no_gpu, power_of_two, reads, unaligned, words_of

REGISTER_ELEMENTS = 32
"""Elements of a row that a thread of `row` holds, as a rule."""

SHORT = 512
"""Columns of rows that share a program of `row`, at most, and the elements of all of them there, as a rule."""

PADDED = {8: 0, 4: 96, 2: SHORT}
"""Columns from which on a short row is best padded to a power of two, by the bytes of an element of all inputs.

Below it is padded less, to a sum of two, each of which has a reduction of its own.  Where memory is waited for, columns
that are not there cost little; where instructions are, as much as others.
"""

WARP_ELEMENTS, WARP_BYTES = 3072, 24 << 10
"""What one warp holds of a row, and of all inputs: more of it leaves the registers."""

TILE_BYTES = 16 << 10
"""Bytes of a tile that is streamed, of one input, at most."""

THREAD_BYTES = 64
"""Bytes of it that a thread holds."""

CLUSTER_THREADS = 128
"""Threads of a block of `cluster`: a warpgroup."""

ROW_BYTES = 24 << 10
"""Most bytes of an input that one block of `cluster` holds, where several could."""

SLICE_BYTES = 50 << 10
"""Bytes of all inputs that one of several blocks holds, if it can be: four such blocks share a multiprocessor."""

OTHER_BYTES = 7 << 10
"""Shared memory of a block beside its slices: states, barriers, and what reductions take."""

MOST_SPLITS = 2048
"""Programs that share a row of `split`: each of them merges the states of all."""

LARGEST = (1 << 31) - MOST_SPLITS * TILE_BYTES // 2
"""What the 32-bit indices of a kernel count, with what it rounds up to: rows, columns, all elements of ragged rows."""


def _warps(elements: int) -> int:
    """Warps for so many elements: 32 a thread, which were the fastest on an H200."""
    return clamp(elements // (32 * REGISTER_ELEMENTS), 1, 32)


def _plain(problem: Problem) -> bool:
    """Whether logits are taken as they are, and not of 64 bits."""
    return problem.itemsize < 8 and not problem.extra.fused


def _bound(problem: Problem) -> bool:
    """Whether instructions are waited for, not memory: exponentials of 16 bits."""
    return problem.itemsize == 2 and problem.inputs == 1


def _body(problem: Problem) -> tuple[int, int]:
    """(elements of 16 bytes, columns in them) if rows begin anywhere, so that Triton cuts them there, else (1, all)."""
    long = problem.peels and problem.cols >= SHORT
    vector = problem.vector if long and problem.rows * problem.cols <= LARGEST else 1
    return vector, problem.cols // vector * vector


def _padded(cols: int) -> int:
    """The least sum of at most two powers of two that holds the columns: those are the sides of Triton's tiles."""
    whole, large = power_of_two(cols), power_of_two(cols + 1) // 2
    return whole if whole == large else min(whole, large + power_of_two(cols - large))


def _short(problem: Problem) -> tuple[int, int]:
    """(columns, rows) of a program for short rows, as they were the fastest on an H200."""
    cols = problem.cols
    whole = _plain(problem) and cols > PADDED[problem.itemsize * problem.inputs]
    block = power_of_two(cols) if whole else _padded(cols)
    # Where they are moved one by one, a thread holds less.
    elements = SHORT if cols % problem.vector else max(SHORT, 32 * THREAD_BYTES // problem.itemsize)
    if block == power_of_two(block):
        rows = max(2, elements // block)
    else:
        # The smaller part of a row may be one column: 32 rows of it for 32 threads.
        rows = power_of_two(-(-elements * 17 // (16 * block)))
    return block, min(rows, power_of_two(max(problem.rows, 1)))


def row(problem: Problem, device: Device) -> Proposal | str:
    """Whole rows in registers."""
    if refusal := no_gpu("Pallas", device):
        return refusal
    (vector, body), words = _body(problem), words_of(problem)
    block, rows = _short(problem) if problem.cols <= SHORT else (_padded(body), 1)
    most = 1024 * REGISTER_ELEMENTS // words
    if block > most:
        return (
            f"a row of {problem.cols} columns, padded to {block}, does not fit the registers of one program: "
            f"{most} {problem.dtype} elements do"
        )
    reason = f"a row of {problem.cols} columns fits the registers of one program, so it is read once"
    reason += f"; {rows} rows share a program" if rows > 1 else unaligned(vector > 1)
    # Every warp more adds the instructions of a reduction.
    bound = _bound(problem)
    if _plain(problem) and block <= WARP_ELEMENTS and block * problem.itemsize * problem.inputs <= WARP_BYTES:
        # It waits for no other.
        warps, quality = 1, 0.95
    else:
        warps = power_of_two(_warps(rows * block if bound else power_of_two(rows * block)) + 1) // 2
        quality = (0.83 if bound else 0.88) if vector > 1 else (0.89 if bound else 0.94)
    return Proposal(
        "pallas", "row", reason, Blocks(-(-problem.rows // rows), block, rows, warps=warps, vector=vector),
        traffic=Traffic(quality=quality),
    )  # fmt: skip


def _tile(problem: Problem, columns: int) -> tuple[int, int]:
    """(columns, warps) of a tile that is streamed, as they were the fastest on an H200."""
    block = min(TILE_BYTES // problem.itemsize, power_of_two(columns))
    return block, clamp(block * problem.itemsize // (32 * THREAD_BYTES), 1, 32)


def looped(problem: Problem, device: Device) -> Proposal | str:
    """One program streams one row."""
    if refusal := no_gpu("Pallas", device):
        return refusal
    vector, body = _body(problem)
    block, warps = _tile(problem, body)
    reason = (
        f"one program streams each row of {problem.cols} columns{', twice' if reads(problem) == 2 else ''}; "
        f"{problem.rows} programs share the device{unaligned(vector > 1)}"
    )
    return Proposal(
        "pallas", "looped", reason, Blocks(problem.rows, block, warps=warps, vector=vector),
        traffic=Traffic(reads(problem), quality=0.72),
    )  # fmt: skip


def _quality_of_slices(held: int, size: int, inputs: int, most: int) -> float:
    """Measured on an H200, by the bytes that a block holds, of most.

    Blocks that hold little spend their time meeting, or beginning; one that is alone on its multiprocessor, waiting.
    """
    if held > most // 2:
        return 0.7 if inputs > 1 else 0.38
    if held > 64 << 10:
        return 0.8
    if size > 1:
        return min(0.95, 0.4 + 0.036 * held / 1024)
    return 0.95 if held >= 4 << 10 else 0.78


def cluster(problem: Problem, device: Device) -> Proposal | str:
    """Rows in the shared memory of several blocks that read each other's states."""
    if refusal := no_gpu("Pallas", device):
        return refusal
    if device.compute_capability < (9, 0):
        return f"clusters of blocks need compute capability 9.0, and {device.name} has {device.arch}"
    if not _plain(problem):
        return "Mosaic kernels take logits as they are, of 16 and 32 bits"
    vector, ragged = problem.vector, problem.cols % problem.vector != 0
    elements = problem.rows * problem.cols
    if ragged and (elements % vector or elements > LARGEST):
        beside = f"are {elements} in all" if elements > LARGEST else f"neither are all {problem.rows} of them"
        return f"rows of {problem.cols} {problem.dtype} elements are not whole 16 bytes, and {beside}"
    tile = CLUSTER_THREADS * vector
    span = (problem.cols + 2 * vector - 2) // vector * vector if ragged else problem.cols
    for size in (1, 2, 4, 8, 16):
        length = -(-span // (size * vector)) * vector
        held = length * problem.inputs * problem.itemsize
        wanted = ROW_BYTES * problem.inputs if size == 1 else SLICE_BYTES
        if held <= wanted + (32 * problem.inputs if ragged else 0):
            break
    if length < tile:
        return f"a row of {problem.cols} columns is shorter than a tile of {tile}"
    most = device.shared_memory - OTHER_BYTES
    if held > most:
        return f"a row of {problem.cols} columns takes more than the shared memory of 16 blocks, {most} bytes each"
    reason = f"{size} blocks hold" if size > 1 else "one block holds"
    reason += f" a row of {problem.cols} columns in shared memory, so it is read once{unaligned(ragged)}"
    quality = _quality_of_slices(held, size, problem.inputs, most)
    if ragged and size == 1 and _bound(problem):
        # Its last tile takes as long as others, however little it adds to them.
        quality = min(quality, problem.cols / (-(-length // tile) * tile))
    return Proposal(
        "pallas", "cluster", reason,
        Blocks(
            problem.rows * size, length, warps=CLUSTER_THREADS // 32, splits=size, vector=vector if ragged else 1
        ),
        traffic=Traffic(quality=quality),
    )  # fmt: skip


def split(problem: Problem, device: Device) -> Proposal | str:
    """Several programs a row, whose states a second launch merges."""
    if refusal := no_gpu("Pallas", device):
        return refusal
    vector, body = _body(problem)
    block, warps = _tile(problem, body)
    tiles = -(-body // block)
    splits = clamp(-(-16 * device.multiprocessors // max(problem.rows, 1)), 1, min(tiles, MOST_SPLITS))
    launches = int(problem.reduces) + 1
    return Proposal(
        "pallas", "split", f"{splits} programs share a row of {problem.cols} columns, and a second launch merges "
        f"their states{unaligned(vector > 1)}",
        Blocks(problem.rows * splits, block, warps=warps, splits=splits, vector=vector),
        traffic=Traffic(reads(problem), launches, 0.72),
    )  # fmt: skip
