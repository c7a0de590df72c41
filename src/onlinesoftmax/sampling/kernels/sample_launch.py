"""The launch of sample.cuh, which samples with filters; calls without one go to unfiltered_launch.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from ...core.arrays import dtype_name
from ...core.plan_log import Kind, note_plan
from ...core.view import contiguous_strides
from ...kernels.cuda.launch import launcher
from ...torch.device import from_torch
from ...torch.fast_path import MOST_ENTRIES
from ...torch.prepare import allocator
from ..results import Sampled
from ..rules import Parameters
from . import unfiltered_launch
from .source import KERNEL, MOST_TOP, NARROW, NEUTRAL, Shape, shape_of, slice_of
from .unfiltered_launch import WORD_OF, Run, fields_of
from .which_kernel import is_unfiltered, refusal

Tensor = torch.Tensor


def bind(scores: Tensor, rows: tuple[int, ...], parameters: Parameters, raw: bool, top: int) -> Run | None:
    """The function run(x, temperature, seed, offset, filters) that samples a token of each row; None if no kernel does.

    x has its rows where `scores` has them.  The others are numbers, or contiguous tensors with one a row, in the dtypes
    of `Parameters`, or the filters in NARROW_DTYPES: these are top_k, top_p and min_p, None for one that is absent.

    Args:
        scores: Scores (rows, tokens) on a GPU: logits to which score options have been applied.
        rows: Shape of the results.
        parameters: Those of a call; only which filters it has, and its `first` and `kept`, count.
        raw, top: As for `sample` in run.py.
    """
    if is_unfiltered(parameters.is_filtered(), top):
        return unfiltered_launch.bind(scores, rows, raw)
    launch = launch_of(scores, parameters, raw, top)
    return None if launch is None else _bound(launch, rows, top, scores.get_device())


Launch = Callable[[Tensor, Any, Any, Any, tuple[Any, Any, Any], Sequence[int]], None]


def launch_of(scores: Tensor, parameters: Parameters, raw: bool, top: int, each: int = 1) -> Launch | None:
    """The function launch(x, temperature, seed, offset, filters, results) that launches sample.cuh; None if none does.

    The GPU is the current one.  The arguments are those of the function of `bind`, and the addresses of the results:
    those of Sampled up to the top tokens, then kept_key and kept_sum; 0 for one of the last four that is not wanted.

    Args:
        scores, parameters, raw, top: As for `bind`.
        each: So many adjacent rows share their parameters, and each has the next offset.
    """
    (count, cols), dtype = scores.shape, dtype_name(scores.dtype)
    device = from_torch("cuda", scores.get_device())
    if refusal(dtype, count, device) or scores.stride(1) != 1 or top > MOST_TOP:
        return None
    aligned, listed = unfiltered_launch.is_aligned(scores), parameters.listed(top)
    shape = shape_of(count, cols, dtype, aligned, device, listed)
    if shape is None:
        return None
    numbers = scores.stride(0), cols, slice_of(cols, shape.cluster), parameters.first, raw, top, each
    return _launch_of(shape, count, numbers, scores.get_device())


@lru_cache(MOST_ENTRIES)
def _launch_of(shape: Shape, count: int, numbers: tuple[int, ...], index: int) -> Launch:
    """`launch_of` rows with these numbers, those of NUMBERS from stride to each."""
    plan = f"sample.cuh, {shape.cluster} x {shape.threads} threads for a row"
    kind = Kind("sample", (count, numbers[1]), shape.dtype, f"cuda:{index}")
    note_plan(kind, plan, "filters are given, tokens are listed, or drafts are verified")
    own = launcher(KERNEL.launch(shape, (*numbers, *NEUTRAL[1:]), count, shape.dynamic_bytes))

    def launch(
        x: Tensor, temperature: Any, seed: Any, offset: Any, filters: tuple[Any, Any, Any], results: Sequence[int]
    ) -> None:
        operands, words = fields_of(_OPERANDS, (temperature, *filters, seed, offset))
        own(index, [x.data_ptr(), *operands, *results], words)

    return launch


@lru_cache(MOST_ENTRIES)
def _bound(launch: Launch, rows: tuple[int, ...], top: int, index: int) -> Run:
    """`bind` of rows that a function launches sample.cuh for."""
    device, listed = torch.device("cuda", index), (*rows, top)
    new, new_list = (partial(allocator(device), shape, contiguous_strides(shape)) for shape in (rows, listed))
    whole, real = torch.int64, torch.float32
    current_device = torch._C._cuda_getDevice

    def run(x: Tensor, temperature: Any, seed: Any, offset: Any, filters: tuple[Any, Any, Any]) -> Sampled:
        if current_device() != index:
            with torch.cuda.device(index):
                return run(x, temperature, seed, offset, filters)
        token, kept, valid, logprob, lse = new(whole), new(whole), new(torch.bool), new(real), new(real)
        tops = (new_list(whole), new_list(real)) if top else (None, None)
        results = *[0 if t is None else t.data_ptr() for t in (token, logprob, lse, kept, valid, *tops)], 0, 0
        launch(x, temperature, seed, offset, filters, results)
        return Sampled(token, logprob, lse, kept, valid, *tops)

    return run


_OPERANDS = [(word_of, NARROW.get(name, 0)) for name, word_of in WORD_OF.items()]
