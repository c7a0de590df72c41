"""The launch of unfiltered.cuh: a token of each row without a filter."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from ...core.plan_log import Kind, note_plan
from ...kernels.cuda import driver
from ...kernels.cuda.launch import argument_pool
from ...torch.device import from_torch
from ...torch.fast_path import MOST_ENTRIES
from ...torch.prepare import allocator
from ..results import Sampled
from .source import bits_of, slice_of
from .unfiltered import KERNEL, POINTERS, Shape, shape_of
from .which_kernel import refusal

Tensor = torch.Tensor


def is_aligned(scores: Tensor) -> bool:
    """True where every row of (rows, tokens) begins on 16 bytes."""
    return not (scores.data_ptr() | scores.stride(0) * scores.element_size()) % 16


Run = Callable[[Tensor, Tensor | float, Tensor | int, Tensor | int, tuple[Any, Any, Any]], Sampled]


def bind(scores: Tensor, rows: tuple[int, ...], raw: bool) -> Run | None:
    """The function run(x, temperature, seed, offset, filters) that samples a token of each row; None if it does not.

    x has its rows where `scores` has them.  The others are numbers, or contiguous tensors with one a row: float32
    or int64.

    Args:
        scores: Scores (rows, tokens) on a GPU: logits to which score options have been applied.
        rows: Shape of the results.
        raw: As for `sample` in run.py.
    """
    count, cols = scores.shape
    index, dtype = scores.get_device(), str(scores.dtype).removeprefix("torch.")
    device = from_torch("cuda", index)
    if refusal(dtype, count, device) or scores.stride(1) != 1:
        return None
    shape = shape_of(count, cols, dtype, is_aligned(scores), raw, device)
    if count * shape.cluster >= 1 << 31:
        return None
    return _bound(shape, rows, count, scores.stride(0), cols, index)


@lru_cache(MOST_ENTRIES)
def _bound(shape: Shape, rows: tuple[int, ...], count: int, stride: int, cols: int, index: int) -> Run:
    """`bind` of rows of these properties."""
    plan = f"unfiltered.cuh, {shape.cluster} x {shape.threads} threads for a row"
    note_plan(Kind("sample", (count, cols), shape.dtype, f"cuda:{index}"), plan, "no filter is given")
    steps = tuple(math.prod(rows[i + 1 :]) for i in range(len(rows)))
    stream_of, current_device = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
    numbers = stride, cols, slice_of(cols, shape.cluster), 0, 0, 0
    pool = argument_pool(KERNEL.launch(shape, numbers, count, shape.dynamic_bytes))
    new = allocator(torch.device("cuda", index))
    take, give_back = pool.take, pool.give_back

    def run(
        x: Tensor, temperature: Tensor | float, seed: Tensor | int, offset: Tensor | int, filters: tuple[Any, Any, Any]
    ) -> Sampled:  # fmt: skip
        if current_device() != index:
            # The default stream is that of the current device.
            with torch.cuda.device(index):
                return run(x, temperature, seed, offset, filters)
        token, kept, valid = new(rows, steps, _WHOLE), new(rows, steps, _WHOLE), new(rows, steps, _FLAG)
        logprob, lse = new(rows, steps, _REAL), new(rows, steps, _REAL)
        call = take(index)
        fields = call.fields
        fields[0] = x.data_ptr()
        if isinstance(temperature, Tensor):
            fields[1] = temperature.data_ptr()
        else:
            fields[1], fields[_NUMBER] = 0, bits_of(temperature, "<f")
        for i, value in (2, seed), (3, offset):
            if isinstance(value, Tensor):
                fields[i] = value.data_ptr()
            else:
                fields[i], fields[_NUMBER - 1 + i] = 0, value
        fields[4], fields[5], fields[6] = token.data_ptr(), logprob.data_ptr(), lse.data_ptr()
        fields[7], fields[8] = kept.data_ptr(), valid.data_ptr()
        call.config.stream = stream_of(index)
        driver.launch(call, index, "launching unfiltered_kernel")
        give_back(call)
        return Sampled(token, logprob, lse, kept, valid, None, None, None)

    return run


_NUMBER = len(POINTERS) + 3
_WHOLE, _REAL, _FLAG = torch.int64, torch.float32, torch.bool
