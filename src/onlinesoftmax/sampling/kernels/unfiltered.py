"""The source of unfiltered.cuh: a token of each row without a filter."""

from __future__ import annotations

from typing import NamedTuple

from ...core.device import Device
from ...kernels.cuda.arguments import OwnKernel
from .prefetch import STAGES, TOKENS, prefetch_bytes
from .source import MASS_CONSTANTS, constants_of, most_blocks, slice_of

FILES = (
    "row/warp_shuffle", "channel/barrier", "channel/cluster_messages", "scores", "masses", "noise", "prefetch", "parts",
    "race", "unfiltered",
)  # fmt: skip
"""Files of the kernel, in the order of inclusion."""

POINTERS = ("x", "temperature", "seed", "offset", "token", "logprob", "lse", "kept", "valid")
"""Fields of the kernel's parameter, in the order of the struct; then come NUMBERS."""

NUMBERS = ("stride", "cols", "slice", "temperature_bits", "seed_number", "offset_number")

MOST_THREADS = 512
"""Most threads of a block."""

THREADS_OF_MANY_ROWS = 128
"""Most threads of a block where each multiprocessor has more than two rows.

Small blocks begin and end their rows at different times.  On an H200, 512 x 128256 float32 took 0.88 of the time with
them, 2048 x 32000 0.77 and 4096 x 8192 0.60; but 264 x 128256 1.02.
"""

RESIDENT_THREADS = 1024
"""Threads that a multiprocessor's registers have to suffice for; half as many for unaligned rows, which are loaded
through registers."""


class Shape(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        dtype: Dtype of the logits: "float32", "float16" or "bfloat16".
        cluster: Blocks of a row.
        threads: Threads of a block.
        aligned: True where every row begins on 16 bytes.
        raw: True for log-probabilities of the logits without temperature.
    """

    dtype: str
    cluster: int
    threads: int
    aligned: bool
    raw: bool

    @property
    def dynamic_bytes(self) -> int:
        """Bytes of the logits that are under way."""
        return prefetch_bytes(self.threads, self.dtype)


def shape_of(rows: int, cols: int, dtype: str, aligned: bool, raw: bool, device: Device) -> Shape:
    """The kernel of a call: more blocks of a row, while there are no more blocks than multiprocessors.

    A block takes some microseconds, however few tokens it has: with 4 blocks of a row, two on each multiprocessor,
    64 x 128256 float32 takes 8 microseconds more than with 2 on an H100.
    """
    cluster, most = 1, most_blocks(device, rows)
    while cluster < most and 2 * rows * cluster <= device.multiprocessors and cols > 4096 * cluster:
        cluster *= 2
    threads = MOST_THREADS if rows <= 2 * device.multiprocessors else THREADS_OF_MANY_ROWS
    while threads > 64 and slice_of(cols, cluster) <= TOKENS * threads // 2:
        threads //= 2
    return Shape(dtype, cluster, threads, aligned, raw)


def prologue(shape: Shape) -> str:
    """Types and constants of a kernel."""
    resident = RESIDENT_THREADS // (1 if shape.aligned else 2) // shape.threads
    numbers = {
        "THREADS": shape.threads, "RESIDENT": max(resident, 1), "CLUSTER": shape.cluster, "STAGES": STAGES,
        "ALIGNED": shape.aligned, "RAW": shape.raw,
    }  # fmt: skip
    return constants_of(shape.dtype, numbers) + MASS_CONSTANTS


KERNEL = OwnKernel("unfiltered_kernel", FILES, POINTERS, prologue, package=__package__)
