"""The source of sample.cuh, and how many blocks share a row."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

from ...core.device import Device
from ...core.options import LARGEST_FLOAT32
from ...core.task import ITEMSIZE
from ...kernels import cuda
from ...kernels.cuda.source import declarations, program, typed
from ..masses import MASS_BITS, POWER_OF_TWO
from ..philox import ROUNDS

NAME = "sample_kernel"

_SHARED = ("row/warp_shuffle", "channel/cluster_words")

_OWN = ("scores", "noise", "exchange", "lists", "candidates", "choose", "spread", "by_mass", "search", "sample")

FILES = (*((name, cuda.__name__) for name in _SHARED), *((name, str(__package__)) for name in _OWN))
"""Files of the kernel, in the order of inclusion."""

THREADS = 512

TOKENS = 8
"""Tokens that a thread reads at once."""

MOST_TOP = 1024
"""Most tokens that a list may have to hold: more than top_k takes passes over the row, and more of the largest
log-probabilities take PyTorch's operations."""

MOST_BLOCKS = 8
"""Most blocks of a cluster."""

RESIDENT = 2
"""Blocks of a multiprocessor, so that one reads while another one waits."""

_FEW, _SPREAD, _MOST_ABOVE = 4096, 2048, 512
_CAPACITY = _FEW + THREADS * TOKENS

DYNAMIC_BYTES = 8 * (_CAPACITY + _MOST_ABOVE) + 4 * _SPREAD
"""Shared memory for the lists of sort keys, and for counts of scores."""

DECLARED_BYTES = 20_480
"""More than the bytes of shared memory that the kernel declares beside."""

OVERHEAD = 8192
"""Tokens that a block reads in the time of its other work, about."""

POINTERS = (
    "x", "temperature", "top_k", "top_p", "min_p", "seed", "offset", "token", "logprob", "lse", "kept", "valid",
    "top_tokens", "top_logprobs",
)  # fmt: skip
"""Fields of the kernel's parameter, in the order of the struct; then come NUMBERS."""

NUMBERS = ("stride", "cols", "slice", "first", "raw", "top")


class Shape(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        dtype: Dtype of the logits: "float32", "float16" or "bfloat16".
        cluster: Blocks of a row.
        aligned: True where every row begins on 16 bytes.
    """

    dtype: str
    cluster: int
    aligned: bool


def slice_of(cols: int, cluster: int) -> int:
    """Tokens of a block: a multiple of 8, which is whole chunks of 16 bytes, and whole groups of four for the noise."""
    return -(-cols // (8 * cluster)) * 8


def cluster_of(rows: int, cols: int, device: Device) -> int | None:
    """Blocks of a row, so that all multiprocessors are busy most of the time; None if the device has too little memory.

    Args:
        rows, cols: Of the logits.
        device: Where the kernel is to run.
    """
    if device.shared_memory < DYNAMIC_BYTES + DECLARED_BYTES:
        return None
    best, least = None, math.inf
    for cluster in (1, 2, 4, MOST_BLOCKS) if device.compute_capability >= (9, 0) else (1,):
        # An H100 has places for 264 blocks, but only 62 clusters of 4 and 30 of 8: each lies in a part of the device.
        places = int(RESIDENT * device.multiprocessors * (1 if cluster <= 2 else 0.9)) // cluster
        # The clusters take turns.  Each has work that does not depend on its tokens.
        cost = -(-rows // max(places, 1)) * (slice_of(cols, cluster) + OVERHEAD)
        if cost < least and rows * cluster < 1 << 31:
            best, least = cluster, cost
    return best


@cache
def source(shape: Shape) -> str:
    """The source of a kernel."""
    return program(prologue(shape), *FILES)


def prologue(shape: Shape) -> str:
    """Types and constants of a kernel."""
    numbers = {
        "THREADS": THREADS, "CLUSTER": shape.cluster, "RESIDENT": RESIDENT, "ALIGNED": shape.aligned,
        "MOST_CANDIDATES": MOST_TOP, "FEW": _FEW, "CAPACITY": _CAPACITY, "SPREAD": _SPREAD, "MOST_ABOVE": _MOST_ABOVE,
    }  # fmt: skip
    return constants_of(shape.dtype, numbers)


def constants_of(dtype: str, numbers: dict[str, bool | int]) -> str:
    """C++ text of the type of the logits, X, and of the constants of a kernel.

    Args:
        dtype: Dtype of the logits.
        numbers: Constants of this kernel; those that all kernels of sampling have are added.
    """
    common = {"VECTOR": 16 // ITEMSIZE[dtype], "MASS_BITS": MASS_BITS, "ROUNDS": ROUNDS}
    floats = {f"POWER_{i}": float(c) for i, c in enumerate(POWER_OF_TWO)} | {"LARGEST_FLOAT32": LARGEST_FLOAT32}
    doubles = {"LOG2_E": math.log2(math.e), "LOG_2": math.log(2.0)}
    constants = [("float", name, f"{value!r}f") for name, value in floats.items()]
    constants += [("double", name, repr(value)) for name, value in doubles.items()]
    return declarations({"X": dtype}, [*typed(common | numbers), *constants])
