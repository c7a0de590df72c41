"""The launch of unfiltered.cuh: a token of each row without a filter."""

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
from .source import bits_of, slice_of
from .unfiltered import KERNEL, Shape, shape_of
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
    index, dtype = scores.get_device(), dtype_name(scores.dtype)
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
    numbers = stride, cols, slice_of(cols, shape.cluster), 0, 0, 0
    launch = launcher(KERNEL.launch(shape, numbers, count, shape.dynamic_bytes))
    device = torch.device("cuda", index)
    new = partial(allocator(device), rows, contiguous_strides(rows))
    current_device = torch._C._cuda_getDevice

    def run(x: Tensor, temperature: Any, seed: Any, offset: Any, filters: tuple[Any, Any, Any]) -> Sampled:
        if current_device() != index:
            with torch.cuda.device(index):
                return run(x, temperature, seed, offset, filters)
        token, kept, valid, logprob, lse = new(_WHOLE), new(_WHOLE), new(_FLAG), new(_REAL), new(_REAL)
        operands, (_, *numbers) = fields_of(_OPERANDS, (temperature, seed, offset))
        results = [t.data_ptr() for t in (token, logprob, lse, kept, valid)]
        launch(index, [x.data_ptr(), *operands, *results], numbers)
        return Sampled(token, logprob, lse, kept, valid, None, None, None)

    return run


_WHOLE, _REAL, _FLAG = torch.int64, torch.float32, torch.bool

NARROW_DTYPES = torch.int32, torch.float32
"""The dtypes of filters of 32 bits that kernels read, besides int64 and float64."""

_bits_of = lru_cache(256)(bits_of)

WORD_OF: dict[str, Callable[[Any], int]] = {
    "temperature": lambda t: _bits_of(t, "<f"),
    "top_k": lambda k: k or 0,
    "top_p": lambda p: _bits_of(1.0 if p is None else p, "<d"),
    "min_p": lambda p: _bits_of(p or 0.0, "<d"),
    "seed": int,
    "offset": int,
}
"""The 64-bit word that a kernel gets of an operand that is a number, or None for a filter that is not given."""

_OPERANDS = [(WORD_OF[name], 0) for name in ("temperature", "seed", "offset")]

_NUMBERS = {int, float, type(None)}


def fields_of(
    operands: Sequence[tuple[Callable[[Any], int], int]], values: tuple[Any, ...]
) -> tuple[list[int], list[int]]:  # fmt: skip
    """The addresses of operands, 0 for a number; and the flags of those that are narrow, then their words as numbers.

    Args:
        operands: A function of WORD_OF for each operand, and its flag if the kernel reads it in NARROW_DTYPES too.
        values: The operands.
    """
    addresses, numbers = [], [0]
    for value, (word_of, flag) in zip(values, operands, strict=True):
        # isinstance with Tensor takes ten times as long.
        if type(value) in _NUMBERS:
            addresses.append(0)
            numbers.append(word_of(value))
        else:
            addresses.append(value.data_ptr())
            numbers.append(0)
            if flag and value.dtype in NARROW_DTYPES:
                numbers[0] |= flag
    return addresses, numbers
