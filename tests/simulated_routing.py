"""The kernels of routing on the host, and logits and experts that are hard to choose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cuda_simulator import simulate_own
from onlinesoftmax.core.device import KNOWN, Device
from onlinesoftmax.routing import eager, losses
from onlinesoftmax.routing.kernels import gradient, gradient_launch, route_launch, source
from onlinesoftmax.routing.results import Losses, Routed, losses_of, with_losses
from onlinesoftmax.routing.rules import Call, Gradients, LossGradients, Rule, checked_rule
from onlinesoftmax.routing.run import in_shape, training

Tensor = torch.Tensor


def a_call(x: Tensor, k: int, sequences: int = 1, **given: Any) -> Call:
    """A call that wants all results, and of one sequence the losses too."""
    groups = given.get("groups"), given.get("group_k"), given.get("group_score", "top2_sum")
    score, order = given.get("score", "softmax"), given.get("order", "score_first")
    numbers = groups, given.get("renormalize", True), given.get("scale", 1.0)
    rule = checked_rule("route", x.shape[1], k, score, order, *numbers)
    operands = (given.get(name) for name in ("bias", "mask", "indices"))
    return training(Call(x, *operands, rule, sequences, len(x) // sequences, True, score != "identity"))


SMALL = replace(KNOWN["h100"], multiprocessors=0)
"""A GPU on which all calls have many tokens."""


def simulated(call: Call, folder: Path, parts: int, device: Device = SMALL) -> Routed:
    """Results of the kernel, by name."""
    x, rule, count = call.x, call.rule, len(call.x)
    dtype = str(x.dtype).removeprefix("torch.")
    tokens = call.tokens
    shape = source.shape_of(
        rule, dtype, route_launch.width_of(x), source.flags_of(call), tokens, call.sequences, device
    )
    assert shape is not None
    shape = shape._replace(threads=max(shape.team, 32))
    out = {
        "weights": torch.full((count, rule.k), -5.0), "indices": torch.full((count, rule.k), -5, dtype=torch.int32),
        "lse": torch.full((count,), -5.0), "counts": torch.full((call.sequences, rule.experts), -5, dtype=torch.int32),
        "prob_sums": torch.full((call.sequences, rule.experts), -5.0),
    }  # fmt: skip
    slopes = torch.full((-(-rule.experts // 4) * 4 + 1,), -5.0)
    of_losses = Losses(torch.full((), -5.0), torch.full((), -5.0), slopes)
    words = torch.zeros(source.words_of(shape, rule, call.sequences, parts), dtype=torch.int64)
    operands = {"x": x, "bias": call.bias, "mask": call.mask, "given": call.indices, "words": words}
    numbers = source.numbers_of(shape, rule, x.stride(0), tokens, parts)
    memory = operands | out | of_losses._asdict()
    simulate_own(source.KERNEL, shape, memory, numbers, call.sequences * parts, folder)
    assert not words.any(), "the kernel left words behind"
    if not call.prob_sums:
        out["prob_sums"] = None
    return with_losses(Routed(**out), of_losses if call.losses else None)


def simulated_gradient(
    call: Call, found: Routed, given: Gradients, folder: Path, losses: LossGradients | None = None
) -> Tensor:  # fmt: skip
    """The gradient that the kernel writes."""
    x, rule = call.x, call.rule
    dtype = str(x.dtype).removeprefix("torch.")
    shape = gradient.shape_of(rule, dtype, route_launch.width_of(x), gradient.flags_of(call, given, losses))
    shape = shape._replace(threads=max(shape.team, 32))
    dx = torch.full(x.shape, -5.0, dtype=x.dtype)
    arrays = dict(zip(gradient.POINTERS, gradient_launch.addresses(call, found, given, losses, dx), strict=True))
    numbers = gradient.numbers_of(rule, x.stride(0), len(x) // call.sequences, 2)
    simulate_own(gradient.KERNEL, shape, arrays, numbers, call.sequences * 2, folder)
    return dx


def check(call: Call, folder: Path, parts: int = 2, device: Device = SMALL) -> None:
    """Compare with the formulas."""
    got, want = simulated(call, folder, parts, device), eager.found_at(call, eager.choose(call))
    assert torch.equal(got.indices, want.indices)
    assert torch.equal(got.counts, want.counts)
    near(got.weights, want.weights)
    near(got.lse, want.lse)
    if call.prob_sums:
        near(got.prob_sums, want.prob_sums)
    if call.losses:
        check_losses(losses_of(got), want, call.rule)


def check_losses(got: Losses | None, want: Routed, rule: Rule) -> None:
    """Compare losses and their derivatives with those of the formulas."""
    assert got is not None
    one = in_shape(want, rule, (len(want.lse),), False)
    assert one.prob_sums is not None
    sums, lse = (t.double().requires_grad_() for t in (one.prob_sums, one.lse))
    one = one._replace(prob_sums=sums, lse=lse)
    balance, z_loss = losses.load_balancing_loss(one, "switch"), losses.router_z_loss(one)
    for ours, exact in ((got.balance, balance), (got.z_loss, z_loss)):
        torch.testing.assert_close(ours.cpu().double(), exact, rtol=1e-5, atol=1e-8, equal_nan=True)
    (of_sums,), (of_lse,) = torch.autograd.grad(balance, sums), torch.autograd.grad(z_loss, lse)
    slopes = got.slopes.cpu().double()
    torch.testing.assert_close(slopes[: rule.experts], of_sums, rtol=1e-5, atol=0, equal_nan=True)
    torch.testing.assert_close(one.lse * slopes[-1], of_lse, rtol=1e-5, atol=0, equal_nan=True)


def near(got: Tensor, want: Tensor, error: float = 2e-6) -> None:
    assert torch.allclose(got.cpu().float(), want.cpu().float(), rtol=error, atol=error, equal_nan=True)


def logits(tokens: int, experts: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(tokens, experts, generator=torch.Generator().manual_seed(experts)) * 2).to(dtype)


def hard_rows(experts: int) -> Tensor:
    """Rows with NaN, infinities and ties."""
    inf, nan, x = torch.inf, torch.nan, logits(16, experts)
    half = experts // 2
    x[0, 1], x[1, half], x[2, experts - 1] = nan, -nan, inf
    x[3, half], x[3, 0] = inf, inf
    x[4], x[5], x[6], x[7, 2:] = -inf, nan, 1.0, -inf
    x[8], x[9, : half + 1] = x[8].round(), 0.0
    x[9, ::2] = -0.0
    x[10], x[11, 0] = inf, 3.4e38
    x[12, 1:] = nan
    x[13, half:], x[13, 0] = nan, -inf
    x[14] *= 1e37
    x[15, : experts - 3] = -inf
    return x


def a_bias(experts: int) -> Tensor:
    """A bias that excludes two experts."""
    bias = torch.linspace(-1, 1, experts)[torch.arange(experts) * 7 % experts].contiguous()
    bias[[3, 20]] = -torch.inf
    return bias
