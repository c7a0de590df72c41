"""The launch of gradient.cuh: the gradient of the logits of a routing."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from ...core.arrays import dtype_name
from ...core.plan_log import Kind, note_plan
from ...kernels.cuda.launch import launcher
from ...sampling.kernels.which_kernel import refusal
from ...torch.device import from_torch
from ...torch.fast_path import MOST_ENTRIES
from ...torch.gradients import adjacent
from ...torch.prepare import on_device
from ..results import Routed
from ..rules import Call, Gradients, LossGradients, Rule
from .gradient import flags_of, launch_of, shape_of
from .route_launch import width_of
from .source import MOST_TOKENS

Tensor = torch.Tensor


def gradient(call: Call, found: Routed, given: Gradients, losses: LossGradients | None = None) -> Tensor | None:
    """The gradient of the logits of a call on a GPU, as run.gradient_of; None if no kernel takes it."""
    x = adjacent(call.x)
    index, dtype = x.get_device(), dtype_name(x.dtype)
    if refusal(dtype, len(x), from_torch("cuda", index)) or len(x) > MOST_TOKENS:
        return None
    given, losses = readable(call, found, given, losses)
    given = Gradients(*(None if t is None else t.contiguous() for t in given))
    width = width_of(x)
    if given.prob_sums is not None and given.prob_sums.data_ptr() % 16:
        width = 1
    flags = flags_of(call, given, losses)
    run = _run_of(call.rule, dtype, width, flags, len(x), x.stride(0), call.sequences, index)
    return run(call._replace(x=x), found, given, losses)


def readable(
    call: Call, found: Routed, given: Gradients, losses: LossGradients | None
) -> tuple[Gradients, LossGradients | None]:  # fmt: skip
    """Gradients as the kernel reads them: at most one vector for prob_sums, and numbers on its device."""
    if losses is None:
        return given, None
    two = given.prob_sums is not None and losses.balance is not None
    if two or any(t is not None and t.device != call.x.device for t in losses[:2]):
        return losses.added(given, call, found.lse), None
    return given, losses


Run = Callable[[Call, Routed, Gradients, LossGradients | None], Tensor]


@lru_cache(MOST_ENTRIES)
def _run_of(
    rule: Rule, dtype: str, width: int, flags: frozenset[str], count: int, stride: int, sequences: int, index: int
) -> Run:  # fmt: skip
    """`gradient` of calls with these properties."""
    shape = shape_of(rule, dtype, width, flags)
    plan = f"gradient.cuh, {shape.team} of {shape.threads} threads for a token"
    note_plan(Kind("route_backward", (count, rule.experts), dtype, f"cuda:{index}"), plan, f"k is {rule.k}")
    launch = launcher(launch_of(shape, rule, stride, count // sequences, sequences, from_torch("cuda", index)))

    def run(call: Call, found: Routed, given: Gradients, losses: LossGradients | None) -> Tensor:
        dx = torch.empty_like(call.x, memory_format=torch.contiguous_format)
        launch(index, addresses(call, found, given, losses, dx))
        return dx

    return on_device(run, torch.device("cuda", index))


def addresses(call: Call, found: Routed, given: Gradients, losses: LossGradients | None, dx: Tensor) -> list[int]:
    """The addresses of the tensors, in the order of POINTERS; the arguments are those of `gradient`, and its result."""
    weights, sums, lse = given
    z_slope, balance, z_loss = 0, None, None
    if losses is not None:
        balance, z_loss, slopes = losses
        sums = sums if balance is None else slopes
        z_slope = slopes.data_ptr() + slopes.element_size() * (slopes.numel() - 1)
    before = [call.x, call.bias, found.indices, found.lse, weights, sums, lse, balance]
    first, second = ([0 if t is None else t.data_ptr() for t in part] for part in (before, [z_loss, dx]))
    return [*first, z_slope, *second]
