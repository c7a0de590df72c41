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

_SHARED, _OWN = ("row/warp_shuffle", "channel/cluster_words"), ("scores", "noise", "held_row", "sample")

FILES = (*((name, cuda.__name__) for name in _SHARED), *((name, str(__package__)) for name in _OWN))
"""Files of the kernel, in the order of inclusion."""

THREADS = 512

MOST_TOP = 512
"""Most of the largest log-probabilities that a call returns."""

MOST_BLOCKS = 8
"""Most blocks of a cluster."""

SHARED_BYTES = 160_000
"""Most bytes of a slice.  With what the kernel declares, a block of sm_90 could use 227 KB."""

DECLARED_BYTES = 32_768
"""More than the bytes of shared memory that the kernel declares beside its slice."""

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
        filters: True where a filter is given.
        aligned: True where every row begins on 16 bytes.
    """

    dtype: str
    cluster: int
    filters: bool
    aligned: bool


def slice_of(cols: int, cluster: int) -> int:
    """Tokens of a slice: a multiple of 8, which is whole chunks, and whole blocks of the noise."""
    return -(-cols // (8 * cluster)) * 8


def cluster_of(rows: int, cols: int, itemsize: int, device: Device) -> int | None:
    """Blocks of a row, so that they hold it and few rows use all multiprocessors; None if no cluster holds it.

    Args:
        rows, cols: Of the logits.
        itemsize: Bytes of a logit.
        device: Where the kernel is to run.
    """
    most = min(SHARED_BYTES, device.shared_memory - DECLARED_BYTES)
    clusters = device.compute_capability >= (9, 0)
    for cluster in (1, 2, 4, MOST_BLOCKS) if clusters else (1,):
        fits = slice_of(cols, cluster) * itemsize <= most and rows * cluster < 1 << 31
        if fits and (not clusters or cluster == MOST_BLOCKS or rows * cluster >= device.multiprocessors):
            return cluster
    return None


@cache
def source(shape: Shape) -> str:
    """The source of a kernel."""
    return program(prologue(shape), *FILES)


def prologue(shape: Shape) -> str:
    """Types and constants of a kernel."""
    numbers = {
        "THREADS": THREADS, "CLUSTER": shape.cluster, "VECTOR": 16 // ITEMSIZE[shape.dtype], "MOST_TOP": MOST_TOP,
        "MASS_BITS": MASS_BITS, "ROUNDS": ROUNDS, "FILTERS": shape.filters, "ALIGNED": shape.aligned,
    }  # fmt: skip
    floats = {f"POWER_{i}": float(c) for i, c in enumerate(POWER_OF_TWO)} | {"LARGEST_FLOAT32": LARGEST_FLOAT32}
    doubles = {"LOG2_E": math.log2(math.e), "LOG_2": math.log(2.0)}
    constants = [("float", name, f"{value!r}f") for name, value in floats.items()]
    constants += [("double", name, repr(value)) for name, value in doubles.items()]
    return declarations({"X": shape.dtype}, [*typed(numbers), *constants])
