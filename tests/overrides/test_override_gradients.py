"""Gradients of and through the logits of a head in a block of `override(linear=...)`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from test_override_heads import CE, CLASSES, LOGPROBS, assert_same, classes, leaves, loss, target
from torch import nn

import onlinesoftmax as osm

F = nn.functional
Tensor = torch.Tensor


class Halved(torch.autograd.Function):
    """A clone whose gradient is half of that of a clone."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy / 2


def with_hook(z: Tensor) -> Tensor:
    z.register_hook(lambda dy: 2 * dy)
    return loss(z)


def with_late_hook(z: Tensor) -> Tensor:
    y = loss(z)
    z.register_hook(lambda dy: 2 * dy)
    return y


def with_gradient_of_logits(z: Tensor) -> list[Tensor]:
    """Gradients with respect to the logits, after losses that needed none of them."""
    chosen = torch.gather(z, -1, classes().unsqueeze(-1)).squeeze(-1) - z.logsumexp(-1)
    losses = loss(z / 2), F.nll_loss(z.log_softmax(-1).view(-1, CLASSES), target().view(-1)), chosen.sum()
    logprob, _, lse = osm.token_logprobs(z, classes())
    ours = osm.cross_entropy(z.view(-1, CLASSES), target().view(-1)), logprob.sum() + lse.square().sum()
    return [torch.autograd.grad(y, z, retain_graph=True)[0] for y in (*losses, *ours)]


def with_inputs(z: Tensor) -> Tensor:
    """A pass that ends at the logits and gives them a gradient, though they are no leaf."""
    loss(z).backward(inputs=[z], retain_graph=True)
    assert z.grad is not None
    return z.grad.clone() * z


def with_second_derivative(z: Tensor) -> Tensor:
    (dz,) = torch.autograd.grad(loss(z), z, create_graph=True)
    return dz


def scaled_without_gradient(z: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient does not know the factor."""
    with torch.no_grad():
        z.mul_(2)
    return loss(z), z.mean(1)


def viewed_in_inference_mode(z: Tensor) -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        best = z[:, :-1].reshape(-1, CLASSES).argmax(-1)
    return loss(z), best.clone()


def with_retained_gradient(z: Tensor) -> tuple[Tensor, Tensor]:
    z.retain_grad()
    y = loss(z)
    y.backward(retain_graph=True)
    assert z.grad is not None
    return y, z.grad.clone()


def with_leaf(z: Tensor) -> Tensor:
    leaf = z.detach().requires_grad_()
    loss(leaf).backward()
    assert leaf.grad is not None
    return z * leaf.grad


COMPUTED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "hook": (with_hook, "cross_entropy"),
    "retain_grad": (with_retained_gradient, "cross_entropy"),
    "leaf": (with_leaf, "cross_entropy"),
    "gradient of the user": (lambda z: loss(Halved.apply(z)), "cross_entropy"),
    "second derivative": (lambda z: torch.autograd.grad(z.square().sum(), z, create_graph=True)[0].sin(), "pow"),
    "hook after the loss": (with_late_hook, "cross_entropy"),
    "inputs of a backward pass": (with_inputs, "cross_entropy"),
    "second derivative of a loss": (with_second_derivative, "cross_entropy"),
    "factor without gradient": (scaled_without_gradient, "mul_"),
    "view in inference mode": (viewed_in_inference_mode, "argmax"),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_gradients_that_need_the_logits(name: str) -> None:
    function, reason = COMPUTED[name]
    mode = osm.override(linear=CLASSES)
    assert_same(function, mode)
    assert {(name, count) for name, count in mode.report().left.items() if name[0] == "linear"} == {
        (("linear", f"{reason} needs the logits"), 1)
    }


def test_the_gradient_of_logits_exists_after_a_loss() -> None:
    mode = osm.override(linear=CLASSES)
    assert_same(with_gradient_of_logits, mode)
    assert mode.report().taken == {CE: 3, LOGPROBS: 2}
    assert {reason for _, reason in mode.report().left} >= {"cross_entropy needs the logits"}


def test_second_derivatives_go_through_the_logits() -> None:
    found = []
    for block in (nullcontext(), osm.override(linear=CLASSES)):
        tensors = leaves()
        with block:
            y = loss(F.linear(*tensors))
        gradients = torch.autograd.grad(y, tensors, create_graph=True)
        torch.stack([g.square().sum() for g in gradients]).sum().backward()
        found.append([*gradients, *(t.grad for t in tensors)])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_hook_before_and_after_a_change_in_place(first: bool, has_bias: bool) -> None:
    """PyTorch's logits of three dimensions are a view if there is a bias, and views lose the hooks that come first.

    PyTorch crashes in register_hook of a view whose node is out of date; the sum in its place is no view.
    """
    found = []
    for block in (nullcontext(), osm.override(linear=CLASSES)):
        x, weight, bias = leaves()
        with block as mode:
            if has_bias and (first or mode is not None):
                z = F.linear(x, weight, bias)
            else:
                z = F.linear(x, weight) + bias if has_bias else F.linear(x, weight)
            for registers in (first, not first):
                _ = z.register_hook(lambda dy: 2 * dy) if registers else z[0].mul_(2)
            loss(z).backward()
        found.append([x.grad, weight.grad])
    torch.testing.assert_close(found[1], found[0])


def test_a_loss_keeps_no_head_after_its_backward() -> None:
    x, weight, bias = leaves()
    with osm.override(linear=CLASSES):
        z = F.linear(x, weight, bias)
        y = loss(z)
    head = weakref.ref(z.head)  # type: ignore[attr-defined]  # it is no ordinary tensor
    del z
    y.backward()
    assert head() is None
    with pytest.raises(RuntimeError, match="an earlier backward pass has taken the gradients"):
        y.backward()
