"""The source of sample.cuh, and how many blocks share a row."""

from __future__ import annotations

import math
import struct
from typing import Literal, NamedTuple

from ...core.device import Device
from ...core.options import LARGEST_FLOAT32
from ...core.task import ITEMSIZE
from ...kernels import cuda
from ...kernels.cuda.arguments import OwnKernel
from ...kernels.cuda.source import declarations, typed
from ..masses import FRACTION_BITS, MASS_BITS, POWER_OF_TWO
from ..philox import ROUNDS

_COMMON = ("row/warp_shuffle", "row/list_sort", "channel/barrier", "channel/cluster_messages", "channel/cluster_words")

_OWN = (
    "scores", "masses", "noise", "exchange", "tiles", "lists", "candidates", "choose", "parameters", "spread",
    "rivals", "by_mass", "search", "sample",
)  # fmt: skip

FILES = (*((name, cuda.__name__) for name in _COMMON), *((name, str(__package__)) for name in _OWN))
"""Files of the kernel, in the order of inclusion."""

TOKENS = 8
"""Tokens that a thread reads at once; 4 where they are float32 and shared memory holds the slice."""

MOST_TOP = 1024
"""Most tokens that a list may have to hold.  A larger top_k takes more passes over the row, and more top_logprobs take
PyTorch's operations."""

_THREADS = 512, 256
"""Threads of a block; fewer where the lists of more would not fit in shared memory."""

_THREADS_WITH_SHORT_LISTS = (256,)

RESIDENT_THREADS = 1024
"""Threads of a multiprocessor that the registers suffice for: with two blocks, one reads while the other one waits."""

_SPREAD = 1024
"""Bins in which scores are counted."""


class Lists(NamedTuple):
    """Sort keys that the lists of a block have room for.

    Attributes:
        most: Most tokens that a row may want to be listed.
        few: A list that grows longer is cut.
        above: Keys above the bins.
        rivals: Keys of tokens that may win.
    """

    most: int
    few: int
    above: int
    rivals: int


LONG, SHORT = Lists(MOST_TOP, 2048, 512, 1024), Lists(128, 512, 128, 256)
"""Short lists leave room for more blocks, of which some read while others choose: for many rows with one top_k."""

OVERHEAD = 8192
"""Tokens that a block reads in the time of its other work, about."""

POINTERS = (
    "x", "temperature", "top_k", "top_p", "min_p", "seed", "offset", "token", "logprob", "lse", "kept", "valid",
    "top_tokens", "top_logprobs", "kept_key", "kept_sum",
)  # fmt: skip
"""Fields of the kernel's parameter, in the order of the struct; then come NUMBERS."""

NUMBERS = (
    "stride", "cols", "slice", "first", "raw", "top", "each", "narrow", "temperature_bits", "top_k_number",
    "top_p_bits", "min_p_bits", "seed_number", "offset_number",
)  # fmt: skip
"""The numbers from `temperature_bits` on are used where no tensor is given; `narrow` has flags of NARROW."""

NARROW = {"top_k": 1, "top_p": 2, "min_p": 4}
"""Flags of filters that are int32 and float32, in the place of int64 and float64."""


def bits_of(x: float, form: Literal["<f", "<d"]) -> int:
    """The bits of a number in float32 or float64."""
    return int.from_bytes(struct.pack(form, x), "little")


NEUTRAL = (1, 0, 0, 0, bits_of(1.0, "<d"), 0, 0, 0)
"""The numbers from `each` on where all operands are tensors with one value for each row, or absent filters."""


class Shape(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        dtype: Dtype of the logits: "float32", "float16" or "bfloat16".
        cluster: Blocks of a row.
        threads: Threads of a block.
        resident: Blocks of a multiprocessor that its registers suffice for.
        aligned: True where every row begins on 16 bytes.
        tiles: Room for the longest slice in shared memory, in TOKENS of each thread; 0 without it.
        lists: Room of the lists.
        by_mass: True to include the code for rows without top_k; False where all rows have the same top_k.
    """

    dtype: str
    cluster: int
    threads: int
    resident: int
    aligned: bool
    tiles: int
    lists: Lists = LONG
    by_mass: bool = True

    @property
    def dynamic_bytes(self) -> int:
        """Shared memory for lists and counts, and for the logits."""
        return list_bytes(self.threads, self.lists) + self.tiles * TOKENS * self.threads * ITEMSIZE[self.dtype]


def most_blocks(device: Device, rows: int) -> int:
    """Most blocks of a cluster; 1 where there are no clusters.

    Some of the up to 8 parts of a device have less than 16 multiprocessors.  So clusters of 16 are for devices whose
    parts have 16 on the average, and for rows that need half of them.
    """
    if device.compute_capability[0] == 9 and max(2 * rows, 8) * 16 <= device.multiprocessors:
        return 16
    return 8 if device.compute_capability >= (9, 0) else 1


def slice_of(cols: int, cluster: int) -> int:
    """Tokens of a block: a multiple of 8, which is whole chunks of 16 bytes, and whole groups of four for the noise."""
    return -(-cols // (8 * cluster)) * 8


def _capacity(threads: int, lists: Lists) -> int:
    """Sort keys of a list; candidates.cuh says why."""
    return lists.few + 2 * threads * TOKENS


def _most_sorted(threads: int, lists: Lists) -> int:
    """Keys that a list has room to sort: the sort fills it up to a power of two."""
    return 1 << _capacity(threads, lists).bit_length() - 1


def declared_bytes(cluster: int) -> int:
    """Upper bound of the shared memory that the kernel declares: words for the blocks of a cluster, and others."""
    return 5632 + 2240 * cluster


def list_bytes(threads: int, lists: Lists = LONG) -> int:
    """Shared memory for the lists of sort keys, and for counts of scores."""
    return 8 * (_capacity(threads, lists) + lists.rivals + lists.above) + 4 * _SPREAD


def shape_of(
    rows: int, cols: int, dtype: str, aligned: bool, device: Device, listed: int | None = None
) -> Shape | None:
    """The kernel of a call, so that all multiprocessors are busy most of the time; None without enough shared memory.

    Args:
        rows, cols: Of the logits.
        dtype, aligned: As for `Shape`.
        device: Where the kernel is to run.
        listed: As Parameters.listed.
    """
    most = most_blocks(device, rows)
    # Two rows of each multiprocessor fit with long lists, so short ones would gain nothing.
    short = listed is not None and listed <= SHORT.most and rows > 2 * device.multiprocessors
    lists, sizes = (SHORT, _THREADS_WITH_SHORT_LISTS) if short else (LONG, _THREADS)
    threads = next((n for n in sizes if list_bytes(n, lists) + declared_bytes(most) <= device.shared_memory), None)
    if threads is None:
        return None
    best, resident, least = None, 1, math.inf
    for cluster in (1, 2, 4, 8, 16):
        if cluster > most:
            break
        # The system takes 1 KB of shared memory for each block.
        together = (device.shared_memory + 1024) // (list_bytes(threads, lists) + declared_bytes(cluster) + 1024)
        blocks = min(RESIDENT_THREADS // threads, together)
        # The clusters take turns.  Each has work that does not depend on its tokens.
        cost = -(-rows // device.cluster_places(cluster, blocks)) * (slice_of(cols, cluster) + OVERHEAD)
        if cost < least and rows * cluster < 1 << 31:
            best, resident, least = cluster, blocks, cost
    if best is None:
        return None
    if rows > device.cluster_places(best):
        return Shape(dtype, best, threads, resident, aligned, 0, lists, listed is None)
    # A block alone on a multiprocessor takes more registers, and holds its slice in shared memory if that fits.
    tiles = -(-slice_of(cols, best) // (TOKENS * threads))
    held = Shape(dtype, best, threads, 1, aligned, tiles, lists, listed is None)
    fits = aligned and held.dynamic_bytes + declared_bytes(best) <= device.shared_memory
    return held if fits else held._replace(tiles=0)


def prologue(shape: Shape) -> str:
    """Types and constants of a kernel."""
    lists = shape.lists
    numbers = {
        "THREADS": shape.threads, "CLUSTER": shape.cluster, "RESIDENT": shape.resident, "ALIGNED": shape.aligned,
        "HELD": shape.tiles > 0, "BY_MASS": shape.by_mass, "MOST_CANDIDATES": lists.most, "FEW": lists.few,
        "CAPACITY": _capacity(shape.threads, lists), "MOST_SORTED": _most_sorted(shape.threads, lists),
        "SPREAD": _SPREAD, "MOST_ABOVE": lists.above, "MOST_RIVALS": lists.rivals,
    }  # fmt: skip
    return constants_of(shape.dtype, numbers) + MASS_CONSTANTS


KERNEL = OwnKernel("sample_kernel", FILES, POINTERS, prologue)


def constants_of(dtype: str, numbers: dict[str, bool | int]) -> str:
    """C++ text of the type of the logits, X, and of the constants of a kernel.

    Args:
        dtype: Dtype of the logits.
        numbers: Constants of this kernel; those that all kernels of sampling have are added.
    """
    common = {"VECTOR": 16 // ITEMSIZE[dtype], "ROUNDS": ROUNDS}
    doubles = {"LOG2_E": math.log2(math.e), "LOG_2": math.log(2.0)}
    constants = [("float", "LARGEST_FLOAT32", f"{LARGEST_FLOAT32!r}f")]
    constants += [("double", name, repr(value)) for name, value in doubles.items()]
    return declarations({"X": dtype}, [*typed(common | numbers), *constants])


MASS_CONSTANTS = declarations(
    {},
    [
        *typed({"MASS_BITS": MASS_BITS, "FRACTION_BITS": FRACTION_BITS}),
        *(("float", f"POWER_{i}", f"{c!r}f") for i, c in enumerate(POWER_OF_TWO)),
    ],
)
"""C++ text of the constants of masses.cuh."""
