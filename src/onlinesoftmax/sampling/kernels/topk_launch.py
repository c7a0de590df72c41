"""The launch of topk.cuh: the largest scores of each row with their log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch

from ...core.plan_log import Kind, note_plan
from ...kernels.cuda import driver
from ...kernels.cuda.launch import argument_pool
from ...torch.device import from_torch
from ...torch.fast_path import MOST_ENTRIES
from ...torch.prepare import allocator
from ..results import TopLogprobs
from . import topk
from .source import slice_of
from .unfiltered_launch import is_aligned
from .which_kernel import refusal

Tensor = torch.Tensor

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
    if k > topk.MOST or cols >= 1 << 31 or refusal(dtype, count, device) or rows.stride(1) != 1:
        return None
    kernel = topk.shape_of(count, cols, k, dtype, is_aligned(rows), with_target, device)
    if kernel is None or count * kernel.cluster >= 1 << 31:
        return None
    return _bound(kernel, shape, count, (rows.stride(0), cols, slice_of(cols, kernel.cluster), k), dim, index)


@lru_cache(MOST_ENTRIES)
def _bound(
    shape: topk.Shape, rows: tuple[int, ...], count: int, numbers: tuple[int, ...], dim: int, index: int
) -> Run:  # fmt: skip
    """`bind` of rows with these numbers, in the order of NUMBERS."""
    kind = Kind("topk_logprobs", (count, numbers[1]), shape.dtype, f"cuda:{index}")
    note_plan(kind, f"topk.cuh, {shape.cluster} x {shape.threads} threads for a row", f"k is {numbers[-1]}")
    listed = (*rows, numbers[-1])
    steps, list_steps = (tuple(math.prod(each[i + 1 :]) for i in range(len(each))) for each in (rows, listed))
    stream_of, current_device = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
    last = dim == len(rows)

    pool = argument_pool(topk.KERNEL.launch(shape, numbers, count, shape.dynamic_bytes))
    new = allocator(torch.device("cuda", index))
    take, give_back, real, whole = pool.take, pool.give_back, torch.float32, torch.int64

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
        driver.launch(call, index, "launching topk_kernel")
        give_back(call)
        if not last:
            values, indices, logprobs = values.movedim(-1, dim), indices.movedim(-1, dim), logprobs.movedim(-1, dim)
        return TopLogprobs(values, indices, logprobs, own, rank, lse)

    return run
