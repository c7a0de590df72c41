"""The launches of `verify`: sample.cuh for the positions of each model, then verify.cuh."""

from __future__ import annotations

import math
from collections.abc import Callable
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
from ..results import Verified
from ..rules import Parameters
from .sample_launch import Launch, launch_of
from .source import slice_of
from .unfiltered_launch import WORD_OF, fields_of, is_aligned
from .verify import KERNEL, MODEL, NUMBERS, Shape, shape_of

Tensor = torch.Tensor

Run = Callable[[Tensor, Tensor, Tensor | None, Any, Any, Any, tuple[Any, Any, Any]], Verified]


def bind(models: list[Tensor], rows: tuple[int, ...], n: int, parameters: Parameters) -> Run | None:
    """The function run(target, drafts, draft, temperature, seed, offset, filters) of `verify`; None if no kernel does.

    Its tensors lie as those here.  The drafts are int64 and contiguous; what follows them is as for the function of
    `bind` in sample_launch.py, with one value for each row of drafts.

    Args:
        models: Logits of the target model on a GPU, (rows * (n + 1), tokens), and those of the draft model, if there
            are any, (rows * n, tokens), in the same dtype.
        rows: Shape of the rows.
        n: Number of drafts of a row.
        parameters: As for `bind` in sample_launch.py.
    """
    # Without drafts, those of the draft model are empty.
    models = models[: 1 + (n > 0)]
    launches = [launch_of(x, parameters, False, 1, each) for x, each in zip(models, (n + 1, n), strict=False)]
    target = models[0]
    index, dtype, cols = target.get_device(), dtype_name(target.dtype), target.shape[1]
    if None in launches:
        return None
    aligned = all(map(is_aligned, models))
    shape = shape_of(math.prod(rows), cols, dtype, aligned, len(models) == 2, from_torch("cuda", index))
    strides = target.stride(0), models[-1].stride(0)
    numbers = *strides, cols, slice_of(cols, shape.cluster), n, *[0] * (len(NUMBERS) - 5)
    return _bound(shape, rows, numbers, tuple(launches), index)


@lru_cache(MOST_ENTRIES)
def _bound(
    shape: Shape, rows: tuple[int, ...], numbers: tuple[int, ...], launches: tuple[Launch, ...], index: int
) -> Run:
    """`bind` of rows with these numbers, in the order of NUMBERS, and the launches of sample.cuh for each model."""
    count, n = math.prod(rows), numbers[4]
    kind = Kind("verify", (count, n + 1, numbers[2]), shape.dtype, f"cuda:{index}")
    note_plan(kind, f"verify.cuh, {shape.cluster} x {shape.threads} threads for a row", "the drafts are on a GPU")
    device, listed = torch.device("cuda", index), (*rows, n + 1)
    allocate = allocator(device)
    new, new_list = (partial(allocate, shape, contiguous_strides(shape)) for shape in (rows, listed))
    launch_verify = launcher(KERNEL.launch(shape, numbers, count))
    whole, real = torch.int64, torch.float32
    # Results of the launches of sample.cuh, in one piece of memory.
    places = [_places(count * (n + 1)), _places(count * n)]
    words = (places[0][1] + places[1][1] * shape.draft,)
    current_device = torch._C._cuda_getDevice

    def run(
        target: Tensor, drafts: Tensor, draft: Tensor | None, temperature: Any, seed: Any, offset: Any,
        filters: tuple[Any, Any, Any],
    ) -> Verified:  # fmt: skip
        if current_device() != index:
            with torch.cuda.device(index):
                return run(target, drafts, draft, temperature, seed, offset, filters)
        accepted, valid, tokens, logprobs = new(whole), new(torch.bool), new_list(whole), new_list(real)
        memory = allocate(words, (1,), whole)
        begin, models = memory.data_ptr(), [0] * 2 * len(MODEL)
        for i, launch in enumerate(launches):
            x: Any = draft if i else target
            offsets, size = places[i]
            results = [begin + place for place in offsets]
            launch(x, temperature, seed, offset, filters, results)
            # The largest token, key, sum and valid.
            at = i * len(MODEL)
            models[at : at + len(MODEL)] = x.data_ptr(), results[5], results[7], results[8], results[4]
            begin += 8 * size
        operands, numbers = fields_of(_OPERANDS, (temperature, filters[2], seed, offset))
        found = [t.data_ptr() for t in (accepted, tokens, logprobs, valid)]
        launch_verify(index, [*models, memory.data_ptr(), drafts.data_ptr(), *operands, *found], numbers)
        return Verified(accepted, tokens, logprobs, valid)

    return run


def _places(count: int) -> tuple[tuple[int, ...], int]:
    """Places of the results of sample.cuh for so many positions, in bytes, in their order; and their words together.

    The sampled token is the first.
    """
    # token, logprob, lse, kept, valid, top_tokens, top_logprobs, kept_key and kept_sum.
    bytes_before = 0, 40, 44, 8, 52, 16, 48, 24, 32
    return tuple([count * i for i in bytes_before]), -(-53 * count // 8)


_OPERANDS = [(WORD_OF[name], name == "min_p") for name in ("temperature", "min_p", "seed", "offset")]
