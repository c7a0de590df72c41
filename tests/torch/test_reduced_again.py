"""A mean or a sum of losses by kernels is differentiated as often, and in as many passes, as PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from ways import HOW

import onlinesoftmax as osm
from contract import DEVICE, GPU

Loss = Callable[[torch.Tensor], torch.Tensor]

OPTIONS: list[dict[str, Any]] = [
    {"reduction": "mean"},
    {"reduction": "sum"},
    {"reduction": "mean", "weight": True, "label_smoothing": 0.1},
    {"reduction": "sum", "mask": True},
]


pytestmark = pytest.mark.usefixtures("way")


def logits() -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(4, 9, generator=generator, dtype=torch.float64).to(DEVICE).requires_grad_()


TARGET = torch.tensor([3, -100, 8, 0], device=DEVICE)
MASK = torch.arange(9, device=DEVICE) % 5 != 1
WEIGHT = torch.linspace(0.2, 2, 9, dtype=torch.float64, device=DEVICE)


def both(options: dict[str, Any]) -> tuple[Loss, Loss]:
    """Our loss and PyTorch's."""
    options = options | ({"weight": WEIGHT} if "weight" in options else {})
    mask = options.pop("mask", None) and MASK
    return (
        lambda x: osm.cross_entropy(x, TARGET, mask=mask, **options, **HOW),
        lambda x: functional.cross_entropy(x if mask is None else x.masked_fill(~mask, -torch.inf), TARGET, **options),
    )


def assert_same(compute: Callable[[Loss], Any], options: dict[str, Any]) -> None:
    ours, theirs = map(compute, both(options))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_backward_runs_again(options: dict[str, Any]) -> None:
    def passes(loss: Loss) -> list[torch.Tensor]:
        x = logits()
        y = loss(x)
        first = torch.autograd.grad(y, x, torch.tensor(3.0, device=DEVICE).double(), retain_graph=True)[0]
        kept = first.clone()
        first.zero_()
        second = torch.autograd.grad(y * 0.5, x, retain_graph=True)[0]
        y.backward()
        assert x.grad is not None
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            y.backward()
        return [kept, second, x.grad]

    assert_same(passes, options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_backward_of_parts_of_a_graph(options: dict[str, Any]) -> None:
    def passes(loss: Loss) -> torch.Tensor:
        x = logits()
        h = 2 * x
        y = loss(h)
        (y + (x * x).sum()).backward(retain_graph=True)
        # The logits may change: the passes read the gradient that forward stored.
        with torch.no_grad():
            h.zero_()
        y.backward(retain_graph=True)
        y.backward()
        assert x.grad is not None
        return x.grad

    assert_same(passes, options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_derivatives_of_the_gradient(options: dict[str, Any]) -> None:
    v = torch.randn(4, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(DEVICE)

    def products(loss: Loss) -> list[torch.Tensor]:
        x = logits()
        (dx,) = torch.autograd.grad(loss(x) ** 2, x, create_graph=True)
        (second,) = torch.autograd.grad((dx * dx).sum(), x, create_graph=True)
        (third,) = torch.autograd.grad((second * v).sum(), x)
        x = logits()
        y = loss(x)
        (dx,) = torch.autograd.grad(y, x, create_graph=True)
        (of_sum,) = torch.autograd.grad(dx.pow(2).sum() + y, x)
        return [dx, second, third, of_sum]

    def functions(loss: Loss) -> list[torch.Tensor]:
        x = logits().detach()
        each = [getattr(torch.autograd.functional, name)(loss, x, v)[1] for name in ("hvp", "vhp")]
        return [*each, *(torch.autograd.functional.hessian(loss, x, vectorize=how) for how in (False, True))]

    def by_func(loss: Loss) -> list[torch.Tensor]:
        x = logits().detach()
        return [torch.func.hessian(loss)(x), torch.func.jacrev(torch.func.grad(loss))(x)]

    assert_same(products, options)
    assert_same(functions, options)
    if GPU:
        # With a forced backend, torch.func is refused.
        assert_same(by_func, options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_batch_of_gradients(options: dict[str, Any], create_graph: bool) -> None:
    def batch(loss: Loss) -> torch.Tensor:
        x, dys = logits(), torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64, device=DEVICE)
        y = loss(x)
        more = {"retain_graph": True, "create_graph": create_graph, "is_grads_batched": True}
        (each,) = torch.autograd.grad(y, x, dys, **more)
        (again,) = torch.autograd.grad(y, x, dys, **more)
        torch.testing.assert_close(each, again)
        return each

    assert_same(batch, options)


def test_a_gradient_for_each_row_in_turn() -> None:
    def rows(loss: Loss) -> torch.Tensor:
        x = logits()
        h = x.sin()
        y, each = loss(h), torch.zeros_like(x)
        for row in range(len(x)):
            (dh,) = torch.autograd.grad(y, h, retain_graph=True)
            of_row = torch.arange(4, device=DEVICE)[:, None] == row
            (dx,) = torch.autograd.grad(h, x, dh.where(of_row, 0), retain_graph=True)
            each += dx
        return each

    assert_same(rows, {"reduction": "mean"})


def test_targets_out_of_range_and_statistics() -> None:
    x, target = logits(), torch.tensor([9, -3, 2, -100], device=DEVICE)
    y, stats = osm.cross_entropy(x, target, reduction="sum", z_loss=0.1, return_stats=True, **HOW)
    assert y.isnan()
    assert not stats.lse.requires_grad
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    (stored,) = torch.autograd.grad(y, x, retain_graph=True)
    torch.testing.assert_close(dx, stored)
    (second,) = torch.autograd.grad(dx.pow(2).sum(), x)
    for found in (dx, second):
        assert (found[[0, 1, 3]] == 0).all()
        assert (found[2] != 0).any()


def test_overwritten_logits() -> None:
    x = logits()
    y = osm.cross_entropy(2 * x, TARGET, inplace_backward=True, **HOW)
    want = torch.autograd.grad(functional.cross_entropy(2 * x, TARGET), x)[0]
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(y, x, retain_graph=True)[0], want)
    with pytest.raises(RuntimeError, match="inplace_backward=True has overwritten input"):
        torch.autograd.grad(y, x, create_graph=True)
    y.backward()
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        y.backward()


def test_changed_logits() -> None:
    """An ordinary backward pass does not read the logits; a derivative of the gradient does, and says so."""
    x = logits()
    h = 2 * x
    y = osm.cross_entropy(h, TARGET, **HOW)
    with torch.no_grad():
        h.mul_(5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, x, create_graph=True)
    want = torch.autograd.grad(functional.cross_entropy(2 * x, TARGET), x)[0]
    torch.testing.assert_close(torch.autograd.grad(y, x)[0], want)


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[2]], ids=str)
def test_hooks_are_given_the_gradient_that_waits_for_backward(options: dict[str, Any]) -> None:
    packed: list[torch.Tensor] = []

    def passes(loss: Loss) -> list[torch.Tensor]:
        x = logits()
        h = 2 * x
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t), t.clone())[1], torch.clone):
            y = loss(h)
        (dx,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(dx.pow(2).sum(), x, retain_graph=True)
        with torch.no_grad():
            h.zero_()
        found = [torch.autograd.grad(3 * y, x, retain_graph=keeps)[0] for keeps in (True, False)]
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            y.backward()
        return [second, *found]

    assert_same(passes, options)
    x = (2 * logits()).detach().requires_grad_()
    (stored,) = torch.autograd.grad(both(options)[1](x), x)
    assert any(t.shape == stored.shape and torch.allclose(t, stored) for t in packed)
