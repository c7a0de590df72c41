"""The source of topk.cuh: the largest scores of each row with their log-probabilities."""

from __future__ import annotations

from typing import NamedTuple

from ...core.device import Device
from ...kernels.cuda.arguments import OwnKernel
from .prefetch import STAGES, TOKENS, prefetch_bytes
from .source import constants_of, most_blocks, slice_of

FILES = (
    "row/warp_shuffle", "row/list_sort", "channel/barrier", "channel/cluster_messages", "channel/cluster_words",
    "scores", "exchange", "lists", "prefetch", "topk",
)  # fmt: skip
"""Files of the kernel, in the order of inclusion."""

POINTERS = ("x", "target", "values", "indices", "logprobs", "lse", "target_logprob", "target_rank")
"""Fields of the kernel's parameter, in the order of the struct; then come NUMBERS."""

NUMBERS = ("stride", "cols", "slice", "wanted")

MOST = 1024
"""Most tokens of a list."""

SHORT_LIST = 128
"""Most tokens of a short list, which takes less shared memory."""

AT_ONCE = 4
"""Keys that each thread adds to a list before it is cut."""

SPARE = 32
"""Keys that a cut list may have beyond nine eighths of the wanted number."""

RESIDENT_THREADS = 1024
"""Threads that a multiprocessor's registers have to suffice for."""

STATIC_BYTES = 20_480
"""Upper bound of the shared memory that the kernel declares."""


class Shape(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        dtype: Dtype of the logits: "float32", "float16" or "bfloat16".
        cluster: Blocks of a row.
        threads: Threads of a block.
        aligned: True where every row begins on 16 bytes.
        target: True where a target is given.
        most: Most tokens of a list: SHORT_LIST or MOST.
    """

    dtype: str
    cluster: int
    threads: int
    aligned: bool
    target: bool
    most: int

    @property
    def capacity(self) -> int:
        """Keys of a list: those that a cut keeps and AT_ONCE of each thread, or the cut lists of a cluster."""
        return max(self.most + self.most // 8 + SPARE + self.threads * AT_ONCE, self.most * self.cluster)

    @property
    def dynamic_bytes(self) -> int:
        """Bytes of the logits that are under way, and of the list."""
        return prefetch_bytes(self.threads, self.dtype) + 8 * self.capacity


def shape_of(rows: int, cols: int, k: int, dtype: str, aligned: bool, target: bool, device: Device) -> Shape | None:
    """The kernel of a call; None if the device has too little shared memory.

    Args:
        rows, cols: Of the logits.
        k: Number of tokens of a list.
        dtype, aligned, target: As in Shape.
        device: Where the kernel is to run.
    """
    cluster, most = 1, min(most_blocks(device, rows), 8)
    while cluster < most and rows <= device.cluster_places(2 * cluster) and cols > 4096 * cluster:
        cluster *= 2
    # With 256 threads, a multiprocessor has twice as many rows, of which one is read while another one is sorted: 67
    # microseconds for 81 at 512 x 128256 bfloat16 and k = 20 on an H100.  A long list is cut faster by more threads.
    threads = 256 if k <= SHORT_LIST and rows * cluster > 2 * device.multiprocessors else 512
    while threads > 128 and slice_of(cols, cluster) <= TOKENS * threads // 2:
        threads //= 2
    for fewer in (threads, max(threads // 2, 128)):
        shape = Shape(dtype, cluster, fewer, aligned, target, SHORT_LIST if k <= SHORT_LIST else MOST)
        if shape.dynamic_bytes + STATIC_BYTES <= device.shared_memory:
            return shape
    return None


def prologue(shape: Shape) -> str:
    """Types and constants of a kernel."""
    # Clusters are for few rows, which have a multiprocessor for each block.
    resident = RESIDENT_THREADS // shape.threads if shape.cluster == 1 else 1
    numbers = {
        "THREADS": shape.threads, "CLUSTER": shape.cluster, "RESIDENT": resident,
        "STAGES": STAGES, "ALIGNED": shape.aligned, "TARGET": shape.target, "CAPACITY": shape.capacity,
        "FEW": shape.capacity * 2 // 3, "AT_ONCE": AT_ONCE, "SPARE": SPARE,
    }  # fmt: skip
    return constants_of(shape.dtype, numbers)


KERNEL = OwnKernel("topk_kernel", FILES, POINTERS, prologue, package=__package__)
