"""Operands narrower or wider than the logits: everything is computed in the widest dtype, from exact operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ways import HOW

import onlinesoftmax as osm
from contract import DEVICE
from loss_formula import expected_loss
from onlinesoftmax import distributed

TARGET = torch.tensor([1, 69, -100, 7, 33], device=DEVICE)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(DEVICE)


def assert_near(found: torch.Tensor, want: torch.Tensor) -> None:
    """At most some rounding errors of the result's dtype, beside its largest element."""
    eps = torch.finfo(found.dtype).eps
    assert (found.double() - want).abs().max() <= 64 * eps * want.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_narrow_weights_of_float64_logits(reduction: str, dtype: torch.dtype) -> None:
    x, weight = random(5, 70).requires_grad_(), random(70, seed=1).abs().to(dtype)
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 0.01}
    dy = torch.linspace(1, 2, 5, dtype=torch.float64, device=DEVICE) if reduction == "none" else torch.tensor(1.5).to(x)
    arrays = (t.detach().double().cpu().numpy() if t.is_floating_point() else t.cpu().numpy() for t in (x, TARGET, dy))
    exact = expected_loss(*arrays, weight=weight.double().cpu().numpy(), **options)
    want, dx = torch.from_numpy(exact.loss).to(DEVICE), torch.from_numpy(exact.gradient).to(DEVICE)
    with distributed.one_process() as group:
        how: dict[str, Any] = {"group": group, "shards": distributed.Shards(0, 70, 70)}
        for y in (
            osm.cross_entropy(x, TARGET, weight, **options, **HOW),
            distributed.cross_entropy(x, TARGET, weight, **options, **how, **HOW),
            distributed.cross_entropy(x, TARGET, weight, **options, **how, backend="eager"),
        ):
            assert_near(y.detach(), want)
            assert_near(torch.autograd.grad(y, x, dy)[0], dx)


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("dtypes", [
    (torch.float32, torch.float64), (torch.float64, torch.float32), (torch.float64, torch.bfloat16),
    (torch.bfloat16, torch.float32),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_scales_and_biases(name: str, dtypes: tuple[torch.dtype, torch.dtype], softcap: float | None) -> None:
    """The dtype of the logits, and that of the scale and the bias; the result has the wider one."""
    of_x, of_operands = dtypes
    x = random(5, 70).to(of_x).requires_grad_()
    bias, scale = random(70, seed=2).to(of_operands).requires_grad_(), torch.tensor(
        0.7, dtype=of_operands, device=DEVICE, requires_grad=True)  # fmt: skip
    y = getattr(osm, name)(
        x, 1, bias=bias, scale=scale, softcap=softcap, dtype=torch.promote_types(of_x, of_operands), **HOW
    )
    wide = [t.detach().double().requires_grad_() for t in (x, bias, scale)]
    z = wide[0] * wide[2]
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    want = getattr(torch, name)(z + wide[1], 1)
    dy = random(5, 70, seed=3).to(y.dtype)
    assert_near(y.detach(), want.detach())
    for found, exact in zip(
        torch.autograd.grad(y, (x, bias, scale), dy), torch.autograd.grad(want, wide, dy.double()), strict=True
    ):
        assert_near(found, exact)
