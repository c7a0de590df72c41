"""The launch of route.cuh."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from ...core.arrays import dtype_name
from ...core.plan_log import Kind, note_plan
from ...kernels.cuda.launch import launcher
from ...torch.device import from_torch
from ...torch.fast_path import MOST_ENTRIES
from ...torch.gradients import adjacent
from ...torch.prepare import on_device
from ..results import Losses, Routed, with_losses
from ..rules import Call, Rule
from .source import flags_of, launch_of, parts_of, refusal_of, shape_of, width_at

Tensor = torch.Tensor

Run = Callable[[Tensor, Tensor | None, Tensor | None, Tensor | None], Routed]


def route(call: Call) -> Routed | None:
    """The results of a call on a GPU; None if no kernel takes it."""
    run, bias = run_of(call), call.bias
    if bias is not None and bias.data_ptr() % 16:
        bias = bias.clone()  # as many numbers are loaded at once as logits
    return None if run is None else run(adjacent(call.x), bias, call.mask, call.indices)


def run_of(call: Call) -> Run | None:
    """The function run(x, bias, mask, indices) for the calls that are like one; None if no kernel takes them.

    Its logits are aligned as those of the call are, and adjacent in memory; its bias begins on 16 bytes.
    """
    x = adjacent(call.x)
    index, dtype = x.get_device(), dtype_name(x.dtype)
    if refusal_of(call.rule, dtype, len(x), call.prob_sums, from_torch("cuda", index)):
        return None
    return _run_of(call.rule, dtype, width_of(x), flags_of(call), len(x), x.stride(0), call.sequences, index)


def width_of(x: Tensor) -> int:
    """Logits that one instruction loads: each row begins on as many bytes."""
    return width_at(dtype_name(x.dtype), x.shape[1] | x.stride(0) | x.data_ptr() // x.element_size())


@lru_cache(MOST_ENTRIES)
def _run_of(
    rule: Rule, dtype: str, width: int, flags: frozenset[str], count: int, stride: int, sequences: int, index: int
) -> Run | None:  # fmt: skip
    """The function that routes rows of these properties; None if no kernel takes them."""
    tokens, experts, k, device = count // sequences, rule.experts, rule.k, from_torch("cuda", index)
    shape = shape_of(rule, dtype, width, flags, tokens, sequences, device)
    if shape is None:
        return None
    plan = f"route.cuh, {shape.team} of {shape.threads} threads for a token"
    note_plan(Kind("route", (count, rule.experts), dtype, f"cuda:{index}"), plan, f"k is {rule.k}")
    parts = parts_of(shape, tokens, sequences, device)
    sums, losses = ("COUNTS" in shape.flags, "PROB_SUMS" in shape.flags), "LOSSES" in shape.flags
    slopes = -(-experts // 4) * 4 + 1
    launch = launcher(launch_of(shape, rule, stride, tokens, sequences, parts))

    def run(x: Tensor, bias: Tensor | None, mask: Tensor | None, indices: Tensor | None) -> Routed:
        new = x.new_empty
        weights, chosen = new((count, k), dtype=torch.float32), new((count, k), dtype=torch.int32)
        lse = new(count, dtype=torch.float32)
        counts = new((sequences, experts), dtype=torch.int32) if sums[0] else None
        prob_sums = new((sequences, experts), dtype=torch.float32) if sums[1] else None
        # Two tensors, as autograd takes views of one for changes of it.
        of_losses = [new(size, dtype=torch.float32) for size in ((), (), slopes)] if losses else (None, None, None)
        tensors = x, bias, mask, indices, weights, chosen, lse, counts, prob_sums, *of_losses
        launch(index, [0 if t is None else t.data_ptr() for t in tensors])
        found = Routed(weights, chosen, counts, prob_sums, lse)
        return with_losses(found, Losses(*of_losses)) if losses else found

    return on_device(run, torch.device("cuda", index))
