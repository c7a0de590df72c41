"""The launch of sample.cuh, which samples with filters; calls without one go to unfiltered_launch.py."""

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
from ..rules import Parameters
from . import unfiltered_launch
from .source import ABSENT, KERNEL, MOST_TOP, NARROW, NUMBERS, POINTERS, Shape, bits_of, shape_of, slice_of
from .unfiltered_launch import Run
from .which_kernel import is_unfiltered, refusal

Tensor = torch.Tensor

NARROW_DTYPES = torch.int32, torch.float32
"""The dtypes of filters of 32 bits that the kernel reads, besides int64 and float64."""


def sample(scores: Tensor, parameters: Parameters, seed: Tensor, offset: Tensor, raw: bool, top: int) -> Sampled | None:
    """A token of each row of logits (rows, tokens) on a GPU; None if no kernel takes them.

    Args:
        scores: The scores: logits to which score options have been applied.
        parameters, seed, offset, raw, top: As for `sample` in run.py.
    """
    run = bind(scores, (len(scores),), parameters, raw, top)
    return None if run is None else run(scores, parameters.temperature, seed, offset, parameters[1:4])


def bind(scores: Tensor, rows: tuple[int, ...], parameters: Parameters, raw: bool, top: int) -> Run | None:
    """The function run(x, temperature, seed, offset, filters) that samples a token of each row; None if no kernel does.

    x has its rows where `scores` has them.  The others are numbers, or contiguous tensors with one a row, in the dtypes
    of `Parameters`, or the filters in NARROW_DTYPES: these are top_k, top_p and min_p, None for one that is absent.

    Args:
        scores: Scores (rows, tokens) on a GPU: logits to which score options have been applied.
        rows: Shape of the results.
        parameters: Those of a call; only which filters it has, and its `first` and `most`, count.
        raw, top: As for `sample` in run.py.
    """
    if is_unfiltered(parameters.filters, top):
        return unfiltered_launch.bind(scores, rows, raw)
    launch = launcher(scores, parameters, raw, top)
    return None if launch is None else _bound(launch, rows, top, scores.get_device())


Launch = Callable[[Tensor, Any, Any, Any, tuple[Any, Any, Any], tuple[int, ...]], None]


def launcher(scores: Tensor, parameters: Parameters, raw: bool, top: int, each: int = 1) -> Launch | None:
    """The function launch(x, temperature, seed, offset, filters, results) that launches sample.cuh; None if none does.

    The GPU is the current one.  The arguments are those of the function of `bind`, and the addresses of the results:
    those of Sampled up to the top tokens, then kept_key and kept_mass; 0 for one of the last four that is not wanted.

    Args:
        scores, parameters, raw, top: As for `bind`.
        each: So many adjacent rows share their parameters, and each has the next offset.
    """
    (count, cols), dtype = scores.shape, str(scores.dtype).removeprefix("torch.")
    device = from_torch("cuda", scores.get_device())
    if refusal(dtype, count, device) or scores.stride(1) != 1 or top > MOST_TOP:
        return None
    aligned, listed = unfiltered_launch.is_aligned(scores), parameters.listed(top)
    shape = shape_of(count, cols, dtype, aligned, device, listed)
    if shape is None:
        return None
    numbers = scores.stride(0), cols, slice_of(cols, shape.cluster), parameters.first, raw, top, each
    return _launcher(shape, count, numbers, scores.get_device())


@lru_cache(MOST_ENTRIES)
def _launcher(shape: Shape, count: int, numbers: tuple[int, ...], index: int) -> Launch:
    """`launcher` of rows with these numbers, those of NUMBERS from stride to each."""
    plan = f"sample.cuh, {shape.cluster} x {shape.threads} threads for a row"
    kind = Kind("sample", (count, numbers[1]), shape.dtype, f"cuda:{index}")
    note_plan(kind, plan, "filters are given, tokens are listed, or drafts are verified")
    stream_of = torch._C._cuda_getCurrentRawStream
    pool = argument_pool(KERNEL.launch(shape, (*numbers, *ABSENT[1:]), count, shape.dynamic_bytes))
    take, give_back = pool.take, pool.give_back

    def launch(
        x: Tensor, temperature: Any, seed: Any, offset: Any, filters: tuple[Any, Any, Any], results: tuple[int, ...]
    ) -> None:
        call = take(index)
        fields = call.fields
        fields[0] = x.data_ptr()
        narrow = 0
        operands = temperature, *filters, seed, offset
        for value, (at, number, word_of, flag) in zip(operands, _OPERANDS, strict=True):
            if isinstance(value, Tensor):
                fields[at] = value.data_ptr()
                narrow |= flag if flag and value.dtype in NARROW_DTYPES else 0
            else:
                fields[at], fields[number] = 0, word_of(value)
        fields[_NARROW] = narrow
        for i, address in enumerate(results, _FIRST_RESULT):
            fields[i] = address
        call.config.stream = stream_of(index)
        driver.launch(call, index, "launching sample_kernel")
        give_back(call)

    return launch


@lru_cache(MOST_ENTRIES)
def _bound(launch: Launch, rows: tuple[int, ...], top: int, index: int) -> Run:
    """`bind` of rows that a function launches sample.cuh for."""
    listed = (*rows, top)
    steps, list_steps = (tuple(math.prod(each[i + 1 :]) for i in range(len(each))) for each in (rows, listed))
    current_device = torch._C._cuda_getDevice
    new = allocator(torch.device("cuda", index))
    whole, real = torch.int64, torch.float32

    def run(x: Tensor, temperature: Any, seed: Any, offset: Any, filters: tuple[Any, Any, Any]) -> Sampled:
        if current_device() != index:
            # The default stream is that of the current device.
            with torch.cuda.device(index):
                return run(x, temperature, seed, offset, filters)
        token, kept, valid = new(rows, steps, whole), new(rows, steps, whole), new(rows, steps, torch.bool)
        logprob, lse = new(rows, steps, real), new(rows, steps, real)
        tops = (new(listed, list_steps, whole), new(listed, list_steps, real)) if top else (None, None)
        results = *[0 if t is None else t.data_ptr() for t in (token, logprob, lse, kept, valid, *tops)], 0, 0
        launch(x, temperature, seed, offset, filters, results)
        return Sampled(token, logprob, lse, kept, valid, *tops)

    return run


_FIRST_RESULT, _NARROW = POINTERS.index("token"), len(POINTERS) + NUMBERS.index("narrow")

WORD_OF: dict[str, Callable[[Any], int]] = {
    "temperature": lambda t: bits_of(t, "<f"),
    "top_k": lambda k: k or 0,
    "top_p": lambda p: bits_of(1.0 if p is None else p, "<d"),
    "min_p": lambda p: bits_of(p or 0.0, "<d"),
    "seed": int,
    "offset": int,
}
"""The 64-bit word that the kernel gets of an operand that is a number, or None for a filter that is not given."""

_OPERANDS = [
    (POINTERS.index(name), _NARROW + 1 + i, word_of, NARROW.get(name, 0))
    for i, (name, word_of) in enumerate(WORD_OF.items())
]
"""The fields of each operand as a tensor and as a number, the word of the number, and its flag in `narrow`.

The operands are in the order of the numbers from temperature_bits on.
"""
