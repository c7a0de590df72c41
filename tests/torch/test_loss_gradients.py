"""Gradients of the losses: memory of the logits, derivatives of derivatives, multiplication in place."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional
from ways import HOW, gradient

import onlinesoftmax as osm
from contract import DEVICE, DTYPES, GPU
from onlinesoftmax.kernels import registry


def test_the_logits_are_not_changed_unless_allowed() -> None:
    h = torch.randn(4, 64, device=DEVICE, requires_grad=True)
    target = torch.randint(64, (4,), device=DEVICE)
    x = 2 * h
    before = x.detach().clone()
    want = gradient(functional.cross_entropy(2 * h, target), h, torch.tensor(3.0))
    torch.testing.assert_close(gradient(osm.cross_entropy(x, target, **HOW), h, torch.tensor(3.0)), want)
    assert torch.equal(x, before)
    x = 2 * h
    loss = osm.cross_entropy(x, target, inplace_backward=True, **HOW)
    assert not torch.equal(x, before)
    torch.testing.assert_close(gradient(loss, h, torch.tensor(3.0)), want)
    x = 2 * h
    other = (x * x).sum()
    loss = osm.cross_entropy(x, target, inplace_backward=True, **HOW) + other
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(RuntimeError, match="a leaf that requires grad"):
        osm.cross_entropy(h, target, inplace_backward=True, **HOW)


def test_statistics_are_those_of_the_logits_that_the_gradient_overwrites() -> None:
    h = torch.randn(16, 64, device=DEVICE, requires_grad=True)
    target = h.argmax(1)  # The gradient is negative there, and only there.
    loss, stats = osm.cross_entropy(2 * h, target, inplace_backward=True, return_stats=True, **HOW)
    assert torch.equal(stats.largest, target)
    assert stats.correct.all()
    torch.testing.assert_close(stats.lse, (2 * h).detach().logsumexp(1))
    loss.backward()


def test_a_second_derivative_of_a_target_out_of_range_is_zero() -> None:
    x, target = torch.randn(3, 8, device=DEVICE, requires_grad=True), torch.tensor([8, -3, 2], device=DEVICE)
    losses = osm.cross_entropy(x, target, reduction="none", **HOW)
    (dx,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
    found = gradient((dx * dx).sum(), x, torch.tensor(1.0))
    assert (dx[:2] == 0).all()
    assert (found[:2] == 0).all()
    (dx,) = torch.autograd.grad(functional.cross_entropy(x[2:], target[2:]), x, create_graph=True)
    torch.testing.assert_close(found, gradient((dx * dx).sum(), x, torch.tensor(1.0)))


def test_a_gradient_for_each_row_by_vmap() -> None:
    x, target = torch.randn(3, 8, device=DEVICE), torch.tensor([1, 7, 2], device=DEVICE)
    weight = torch.rand(8, device=DEVICE)

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = osm.cross_entropy(x, target, weight, z_loss=0.1, scale=0.5, label_smoothing=0.1)
        return found

    each = torch.func.vmap(torch.func.grad(loss))(x, target)
    for row in range(3):
        torch.testing.assert_close(each[row], torch.func.grad(loss)(x[row : row + 1], target[row : row + 1])[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [1.0, -2.5])
def test_a_gradient_is_multiplied_in_place(dtype: torch.dtype, factor: float) -> None:
    wide_dtype = torch.promote_types(dtype, torch.float32)
    for count in (1, 15, 4097, 70001):
        x = torch.randn(count + 8, dtype=torch.float64, device=DEVICE).to(dtype)
        want, before = (factor * x[:count].to(wide_dtype)).to(dtype), x.clone()
        backends = ("cuda", "triton") if GPU else ("triton",)
        for backend, factor_dtype in itertools.product(backends, {wide_dtype, dtype}):
            y = before.clone()
            registry.load(backend).multiply_in_place(y[:count], torch.tensor(factor, dtype=factor_dtype, device=DEVICE))
            torch.testing.assert_close(y[:count], want)
            assert torch.equal(y[count:], before[count:])
