"""The source and the launch of topk.cuh: the largest scores of each row with their log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch._C._dynamo.guards import _empty_strided_cuda  # type: ignore[attr-defined]  # its stub lacks it

from ...core.device import Device
from ...core.plan_log import Kind, note_plan
from ...kernels import cuda
from ...kernels.cuda import driver
from ...kernels.cuda.launch import loaded
from ...kernels.cuda.source import program
from ...torch.device import from_torch
from ...torch.fast_path import MOST_ENTRIES
from ..results import TopLogprobs
from .choice import refusal
from .source import constants_of, slice_of
from .stream import STAGES, TOKENS, stream_bytes
from .unfiltered import is_aligned

Tensor = torch.Tensor

NAME = "topk_kernel"

_SHARED = ("row/warp_shuffle", "channel/barrier", "channel/cluster_messages", "channel/cluster_words")

_OWN = ("scores", "exchange", "lists", "stream", "topk")

FILES = (*((name, cuda.__name__) for name in _SHARED), *((name, str(__package__)) for name in _OWN))
"""Files of the kernel, in the order of inclusion."""

POINTERS = ("x", "target", "values", "indices", "logprobs", "lse", "target_logprob", "target_rank")
"""Fields of the kernel's parameter, in the order of the struct; then come NUMBERS."""

NUMBERS = ("stride", "cols", "slice", "wanted")

MOST = 1024
"""Most tokens of a list."""

FEW = 128
"""Most tokens of the lists of kernels that take less shared memory."""

AT_ONCE = 4
"""Keys that each thread adds to a list before it is cut."""

SPARE = 32
"""Keys that a cut list may have beyond nine eighths of the wanted number."""

RESIDENT_THREADS = 1024
"""Threads of a multiprocessor that registers and shared memory have to suffice for."""

STATIC_BYTES = 20_480
"""More than the bytes of shared memory that the kernel declares."""


class Shape(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        dtype: Dtype of the logits: "float32", "float16" or "bfloat16".
        cluster: Blocks of a row.
        threads: Threads of a block.
        aligned: True where every row begins on 16 bytes.
        target: True where a target is given.
        most: Most tokens of a list: FEW or MOST.
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
        return stream_bytes(self.threads, self.dtype) + 8 * self.capacity


def shape_of(rows: int, cols: int, k: int, dtype: str, aligned: bool, target: bool, device: Device) -> Shape | None:
    """The kernel of a call; None if the device has too little shared memory.

    Args:
        rows, cols: Of the logits.
        k: Number of tokens of a list.
        dtype, aligned, target: As in Shape.
        device: Where the kernel is to run.
    """
    cluster, most_blocks = 1, 8 if device.compute_capability >= (9, 0) else 1
    while cluster < most_blocks and 2 * rows * cluster <= device.multiprocessors and cols > 4096 * cluster:
        cluster *= 2
    # With 256 threads, a multiprocessor has twice as many rows, of which one is read while another one is sorted: 67
    # microseconds for 81 at 512 x 128256 bfloat16 and k = 20 on an H100.  A long list is cut faster by more threads.
    threads = 256 if k <= FEW and rows * cluster > 2 * device.multiprocessors else 512
    while threads > 128 and slice_of(cols, cluster) <= TOKENS * threads // 2:
        threads //= 2
    shape = Shape(dtype, cluster, threads, aligned, target, FEW if k <= FEW else MOST)
    return shape if shape.dynamic_bytes + STATIC_BYTES <= device.shared_memory else None


@cache
def source(shape: Shape) -> str:
    """The source of a kernel."""
    return program(prologue(shape), *FILES)


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


Run = Callable[[Tensor, Tensor | None], TopLogprobs]


def bind(rows: Tensor, shape: tuple[int, ...], k: int, dim: int, with_target: bool) -> Run | None:
    """The function run(x, target) that returns the results; None if the kernel does not take the rows.

    x has its rows where `rows` has them; the target is contiguous and int64, or None.

    Args:
        rows: Scores (rows, tokens) on a GPU.
        shape: Shape of the rows.
        k: Number of tokens to list.
        dim: Where the dimension of the tokens lies among those of the rows.
        with_target: True where a target is given.
    """
    (count, cols), index, dtype = rows.shape, rows.get_device(), str(rows.dtype).removeprefix("torch.")
    device = from_torch("cuda", index)
    if k > MOST or cols >= 1 << 31 or refusal(dtype, count, rows.stride(1) == 1, device):
        return None
    kernel = shape_of(count, cols, k, dtype, is_aligned(rows), with_target, device)
    if kernel is None or count * kernel.cluster >= 1 << 31:
        return None
    return _bound(kernel, shape, count, (rows.stride(0), cols, slice_of(cols, kernel.cluster), k), dim, index)


@lru_cache(MOST_ENTRIES)
def _bound(
    shape: Shape, rows: tuple[int, ...], count: int, numbers: tuple[int, ...], dim: int, index: int
) -> Run:  # fmt: skip
    """`bind` of rows with these numbers, in the order of NUMBERS."""
    kind = Kind("topk_logprobs", (count, numbers[1]), shape.dtype, f"cuda:{index}")
    note_plan(kind, f"topk.cuh, {shape.cluster} x {shape.threads} threads for a row", f"k is {numbers[-1]}")
    listed = (*rows, numbers[-1])
    steps, list_steps = (tuple(math.prod(each[i + 1 :]) for i in range(len(each))) for each in (rows, listed))
    stream_of, current_device = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
    launch, dynamic, last = driver.library().cuLaunchKernelEx, shape.dynamic_bytes, dim == len(rows)

    def new_call(index: int) -> driver.Arguments:
        config = driver.launch_config(count * shape.cluster, 1, shape.threads, dynamic, shape.cluster, False)
        kernel = loaded(source(shape), NAME, index, dynamic, shape.cluster)
        call = driver.Arguments(bytes(8 * (len(POINTERS) + len(NUMBERS))), config, kernel)
        call.fields[len(POINTERS) :] = list(numbers)
        return call

    pool = driver.ArgumentPool(new_call)
    # This allocation takes half the host time of torch.empty.
    take, give_back, new, real, whole = pool.take, pool.give_back, _empty_strided_cuda, torch.float32, torch.int64

    def run(x: Tensor, target: Tensor | None) -> TopLogprobs:
        if current_device() != index:
            # The default stream is that of the current device.
            with torch.cuda.device(index):
                return run(x, target)
        values, logprobs = new(listed, list_steps, real), new(listed, list_steps, real)
        indices, lse, own, rank = new(listed, list_steps, whole), new(rows, steps, real), None, None
        call = take(index)
        fields = call.fields
        fields[0], fields[2], fields[3] = x.data_ptr(), values.data_ptr(), indices.data_ptr()
        fields[4], fields[5] = logprobs.data_ptr(), lse.data_ptr()
        if target is not None:
            own, rank = new(rows, steps, real), new(rows, steps, whole)
            fields[1], fields[6], fields[7] = target.data_ptr(), own.data_ptr(), rank.data_ptr()
        call.config.stream = stream_of(index)
        status = launch(*call.addresses)
        if status:
            driver.check(driver.retry_with_context(status, call.addresses, index), "launching topk_kernel")
        give_back(call)
        if not last:
            values, indices, logprobs = values.movedim(-1, dim), indices.movedim(-1, dim), logprobs.movedim(-1, dim)
        return TopLogprobs(values, indices, logprobs, own, rank, lse)

    return run
