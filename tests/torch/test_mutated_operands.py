"""Operands that change in place between forward and backward: PyTorch's error, or the gradient of the old values."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import onlinesoftmax as osm
from contract import DEVICE, GPU
from onlinesoftmax import distributed
from onlinesoftmax.core.call import Call, Settings
from onlinesoftmax.core.options import PLAIN
from onlinesoftmax.core.task import Choice
from onlinesoftmax.ops import OPERATIONS
from onlinesoftmax.torch import custom_op
from onlinesoftmax.torch.recording import with_tensors
from pairs import rest_exhaustive

BACKENDS = (None, "triton", "cuda") if GPU else (None, "triton")

Tensors = dict[str, torch.Tensor]


class Noted(dict[str, torch.Tensor]):
    """Tensors by name, and the names of those that a call has read."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(tensors)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.read.add(name)
        return super().__getitem__(name)


Function = Callable[[Tensors, "str | None"], torch.Tensor]


def tensors() -> Tensors:
    generator = torch.Generator().manual_seed(5)
    random = {
        "x": torch.randn(3, 11, generator=generator),
        "dy": torch.randn(3, 11, generator=generator),
        "bias": torch.randn(11, generator=generator),
        "scale": torch.tensor(0.7),
        "mask": torch.rand(3, 11, generator=generator) < 0.8,
        "target": torch.tensor([2, 7, 10]),
        "weight": torch.rand(11, generator=generator),
    }
    return {name: t.to(DEVICE) for name, t in random.items()}


def some(t: Tensors, *names: str) -> Tensors:
    return {name: t[name] for name in names}


def operator(name: str, t: Tensors, backend: str | None) -> torch.Tensor:
    """The custom operator, which torch.compile calls."""
    choice = Choice(backend or (None if GPU else "triton"))
    bare = Call(OPERATIONS[name], None, Settings(1, choice=choice), PLAIN._replace(softcap=5.0))
    return custom_op.forward(with_tensors(bare, some(t, "x", "bias", "scale", "mask")))


def loss(t: Tensors, **given: Any) -> torch.Tensor:
    y: torch.Tensor = osm.cross_entropy(t["x"], t["target"], t["weight"], z_loss=0.01, **given)
    return y


def tokens(t: Tensors, index: torch.Tensor, **given: Any) -> torch.Tensor:
    found = osm.token_logprobs(t["x"], index, **given)
    return found.logprob.view(3) + found.entropy * found.lse


NAMES = ("softmax", "log_softmax", "logsumexp")
FUNCTIONS: dict[str, Function] = {
    **{name: lambda t, b, name=name: getattr(osm, name)(t["x"], -1, backend=b) for name in NAMES},
    **{
        f"{name}, scored": lambda t, b, name=name: getattr(osm, name)(
            t["x"], -1, **some(t, "bias", "scale", "mask"), softcap=5.0, backend=b
        )
        for name in NAMES
    },
    **{f"{name}, operator": lambda t, b, name=name: operator(name, t, b) for name in NAMES},
    **{
        f"loss, {reduction}": lambda t, b, r=reduction: loss(t, reduction=r, label_smoothing=0.1, backend=b)
        for reduction in ("none", "mean", "sum")
    },
    **{
        f"loss, {reduction}, scored": lambda t, b, r=reduction: loss(
            t, reduction=r, **some(t, "mask", "scale"), backend=b
        )
        for reduction in ("none", "mean")
    },
    "tokens": lambda t, b: tokens(t, t["target"], backend=b),
    "tokens, scored": lambda t, b: tokens(t, t["target"], **some(t, "mask", "scale"), backend=b),
    "several tokens": lambda t, b: tokens(t, t["target"][:, None], **some(t, "mask", "scale"), backend=b),
}


def change(t: torch.Tensor) -> None:
    with torch.no_grad():
        if t.dtype == torch.bool:
            t.logical_not_()
        elif t.is_floating_point():
            t.mul_(3).add_(1)
        else:
            t.sub_(1)


def assert_changes_are_noticed(call: Callable[[Tensors], torch.Tensor]) -> None:
    """Mutate each operand that the call reads in turn: the gradient is that of the old values, or autograd's error."""
    names: set[str] = set()

    def gradient(changed: str | None) -> torch.Tensor:
        t = tensors()
        leaf = t["x"].requires_grad_()
        t["x"] = leaf.clone()
        noted = Noted(t)
        y = call(noted)
        names.update(noted.read)
        dy = t["dy"] if y.dim() == 2 else t["dy"][:, 0] if y.dim() == 1 else t["dy"][0, 0]
        if changed == "result":
            # A view of the result has the same version.
            change(y.detach())
        elif changed is not None:
            change(t[changed])
        (dx,) = torch.autograd.grad(y, leaf, dy)
        return dx

    want = gradient(None)
    assert want.abs().max() > 1e-3
    assert "x" in names
    for name in (*sorted(names), "result"):
        error, found = "", want
        try:
            found = gradient(name)
        except RuntimeError as raised:
            error = str(raised)
        assert not error or "modified by an inplace operation" in error, name
        torch.testing.assert_close(found, want, msg=lambda m, name=name: f"{name}: {m}")


WAYS = "cacheable", "general"


@pytest.mark.parametrize(
    ("name", "backend", "way"),
    rest_exhaustive(itertools.product(FUNCTIONS, BACKENDS, WAYS), lambda cell: itertools.combinations(cell, 2)),
    indirect=["way"],
)
def test_a_change_of_an_operand_is_noticed(name: str, backend: str | None, way: str) -> None:
    assert_changes_are_noticed(lambda t: FUNCTIONS[name](t, backend))


SHARDED: dict[str, Callable[..., torch.Tensor]] = {
    "softmax": lambda t, how: distributed.softmax(t["x"], mask=t["mask"], softcap=5.0, **how),
    "log_softmax": lambda t, how: distributed.log_softmax(t["x"], mask=t["mask"], **how),
    "logsumexp": lambda t, how: distributed.logsumexp(t["x"], mask=t["mask"], **how),
    "mean": lambda t, how: distributed.cross_entropy(
        t["x"], t["target"], t["weight"], label_smoothing=0.1, z_loss=0.01, **how
    ),
    "none": lambda t, how: distributed.cross_entropy(t["x"], t["target"], t["weight"], reduction="none", **how),
    "tokens": lambda t, how: sum(distributed.token_logprobs(t["x"], t["target"], mask=t["mask"], **how)),
}


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("shards", [None, distributed.Shards(0, 11, 11)])
@pytest.mark.parametrize("name", SHARDED)
def test_a_change_of_an_operand_of_a_shard_is_noticed(name: str, shards: Any, backend: str) -> None:
    with distributed.one_process() as group:
        how = {"backend": backend, "shards": shards, "group": group}
        assert_changes_are_noticed(lambda t: SHARDED[name](t, how))


def test_the_example_of_a_temperature_that_changes() -> None:
    x, target = torch.randn(2, 5, device=DEVICE, requires_grad=True), torch.tensor([1, 4], device=DEVICE)
    scale = torch.tensor(1.0, device=DEVICE)
    y = osm.token_logprobs(x, target, scale=scale, backend="triton").logprob
    scale.mul_(10)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), x)


@pytest.mark.parametrize(
    ("name", "way"),
    rest_exhaustive([(name, WAYS[(i + j) % 2]) for i in range(2) for j, name in enumerate(FUNCTIONS)]),
    indirect=["way"],
)
def test_saved_tensors_travel_through_hooks(name: str, way: str) -> None:
    def gradient() -> torch.Tensor:
        t = tensors()
        t["x"].requires_grad_()
        y = FUNCTIONS[name](t, "triton")
        (dx,) = torch.autograd.grad(y, t["x"], torch.ones_like(y))
        return dx

    def on_cpu() -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return gradient()

    torch.testing.assert_close(on_cpu(), gradient(), rtol=0, atol=0)
    t = tensors()
    t["x"].requires_grad_()
    y = torch.utils.checkpoint.checkpoint(
        lambda x: FUNCTIONS[name]({**t, "x": x}, "triton"), t["x"], use_reentrant=False
    )
    (dx,) = torch.autograd.grad(y, t["x"], torch.ones_like(y))
    torch.testing.assert_close(dx, gradient(), rtol=0, atol=0)
