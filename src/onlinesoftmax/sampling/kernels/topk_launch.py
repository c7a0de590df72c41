"""The launch of topk.cuh: the largest scores of each row with their log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch

from ...core.arrays import dtype_name
from ...core.plan_log import Kind, note_plan
from ...core.view import contiguous_strides
from ...kernels.cuda.launch import launcher
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
    (count, cols), index, dtype = rows.shape, rows.get_device(), dtype_name(rows.dtype)
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
    device, listed, last = torch.device("cuda", index), (*rows, numbers[-1]), dim == len(rows)
    new, new_list = (partial(allocator(device), size, contiguous_strides(size)) for size in (rows, listed))
    launch = launcher(topk.KERNEL.launch(shape, numbers, count, shape.dynamic_bytes))
    real, whole = torch.float32, torch.int64
    current_device = torch._C._cuda_getDevice

    def run(x: Tensor, target: Tensor | None) -> TopLogprobs:
        if current_device() != index:
            with torch.cuda.device(index):
                return run(x, target)
        values, indices, logprobs, lse = new_list(real), new_list(whole), new_list(real), new(real)
        own, rank, of_target, of_results = None, None, 0, (0, 0)
        if target is not None:
            own, rank = new(real), new(whole)
            of_target, of_results = target.data_ptr(), (own.data_ptr(), rank.data_ptr())
        listed = values.data_ptr(), indices.data_ptr(), logprobs.data_ptr(), lse.data_ptr()
        launch(index, [x.data_ptr(), of_target, *listed, *of_results])
        if not last:
            values, indices, logprobs = values.movedim(-1, dim), indices.movedim(-1, dim), logprobs.movedim(-1, dim)
        return TopLogprobs(values, indices, logprobs, own, rank, lse)

    return run
