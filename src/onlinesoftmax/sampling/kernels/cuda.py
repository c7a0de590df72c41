"""The launch of sample.cuh: a token of each row from one read of the logits."""

from __future__ import annotations

from functools import cache

import torch

from ...core.plan_log import Kind, note_plan
from ...kernels.cuda import driver
from ...kernels.cuda.launch import argument_pool
from ...torch.device import from_torch
from ...torch.small_kernels import on_device
from ..results import Sampled
from ..rules import Parameters
from . import unfiltered_launch
from .source import KERNEL, MOST_TOP, NUMBERS, POINTERS, Shape, shape_of, slice_of
from .which_kernel import is_unfiltered, refusal

Tensor = torch.Tensor


def sample(scores: Tensor, parameters: Parameters, seed: Tensor, offset: Tensor, raw: bool, top: int) -> Sampled | None:
    """A token of each row of logits (rows, tokens) on a GPU; None if no kernel takes them.

    Args:
        scores: Logits that are the scores: no score option is given.
        parameters, seed, offset, raw, top: As for `sample` in run.py.
    """
    if is_unfiltered(parameters.filters, top):
        run = unfiltered_launch.bind(scores, (len(scores),), raw)
        return None if run is None else run(scores, parameters.temperature, seed, offset)
    rows, cols = scores.shape
    index, dtype = scores.get_device(), str(scores.dtype).removeprefix("torch.")
    device = from_torch("cuda", index)
    if refusal(dtype, rows, scores.stride(1) == 1, device) or top > MOST_TOP:
        return None
    shape = shape_of(rows, cols, dtype, unfiltered_launch.is_aligned(scores), device)
    if shape is None:
        return None
    plan = f"sample.cuh, {shape.cluster} x {shape.threads} threads for a row"
    note_plan(Kind.of("sample", scores), plan, "filters are given, or tokens are listed")

    def new(*more: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, *more, dtype=dtype, device=scores.device)

    whole, real = torch.int64, torch.float32
    out = {
        "token": new(dtype=whole), "logprob": new(dtype=real), "lse": new(dtype=real), "kept": new(dtype=whole),
        "valid": new(dtype=torch.bool), "top_tokens": new(top, dtype=whole), "top_logprobs": new(top, dtype=real),
    }  # fmt: skip
    given = {"x": scores, "seed": seed, "offset": offset, **parameters.tensors(), **out}
    pool = _pool(shape, index)
    call = pool.take(index)
    for i, name in enumerate(POINTERS):
        call.fields[i] = t.data_ptr() if (t := given.get(name)) is not None else 0
    numbers = scores.stride(0), cols, slice_of(cols, shape.cluster), parameters.first, raw, top
    for i, number in enumerate(numbers, len(POINTERS)):
        call.fields[i] = number
    call.config.grid[0] = rows * shape.cluster
    call.config.stream = torch._C._cuda_getCurrentRawStream(index)
    # The default stream is that of the current device.
    on_device(driver.launch, scores.device)(call, index, "launching sample_kernel")
    pool.give_back(call)
    tops = (out["top_tokens"], out["top_logprobs"]) if top else (None, None)
    return Sampled(out["token"], out["logprob"], out["lse"], out["kept"], out["valid"], *tops)


@cache
def _pool(shape: Shape, _: int) -> driver.ArgumentPool:
    """The arguments of launches on the device of a number; each of them fills in its blocks and its numbers."""
    return argument_pool(KERNEL.launch(shape, (0,) * len(NUMBERS), 1, shape.dynamic_bytes))
