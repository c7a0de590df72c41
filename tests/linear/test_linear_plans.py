"""The plans of heads, and heads of real sizes on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

import onlinesoftmax as osm
from onlinesoftmax.linear import plans

GPU = torch.cuda.is_available()
DEVICE = "cuda"

PROBLEM = plans.LinearProblem(8192, 4096, 128256, 2, 4, False, True, True, ("tokens", "columns"))


@pytest.mark.parametrize(
    ("change", "memory", "name", "chunks", "products"),
    [
        ({"tokens": 4096}, None, "stored", 1, 3),
        ({}, None, "tokens", 2, 3),
        ({}, 1 << 29, "columns", 0, 4),
        ({"waits": True}, None, "columns", 0, 4),
        ({"waits": True}, 3 << 30, "stored", 1, 3),
        ({"waits": True, "cuts": ("tokens",)}, None, "tokens", 2, 4),
        ({"of_weight": False}, 1 << 29, "tokens", 4, 3),
        ({"tokens": 1024, "hidden": 512, "classes": 50257}, 40_000_000, "columns", 3, 4),
        ({"tokens": 777, "hidden": 768, "classes": 32000}, 40_000_000, "columns", 2, 4),
    ],
)
def test_plans(change: dict[str, Any], memory: int | None, name: str, chunks: int, products: int) -> None:
    problem = PROBLEM._replace(**change)
    plan = plans.plan_of(problem, memory)
    assert (plan.name, plan.products) == (name, products)
    assert plan.chunks == (chunks or -(-problem.classes // plan.chunk))
    assert memory is None or plan.bytes <= memory


def test_no_plan_fits() -> None:
    for cuts, least in ((("tokens", "columns"), "one token with"), (("columns",), "256 columns of all tokens")):
        with pytest.raises(ValueError, match=f"memory is 100 bytes, and {least}"):
            plans.plan_of(PROBLEM._replace(cuts=cuts), 100)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("memory", [None, 120_000_000, 40_000_000])
@pytest.mark.parametrize(("tokens", "hidden", "classes"), [(1024, 512, 50257), (777, 768, 32000), (2048, 100, 1003)])
def test_bfloat16_on_a_gpu(tokens: int, hidden: int, classes: int, memory: int | None) -> None:
    """The gradient of the weight is as near to float64's, with the logits rounded to bfloat16, as one product."""
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    w = (torch.randn(classes, hidden, device=DEVICE) * hidden**-0.5).bfloat16().requires_grad_()
    target = torch.randint(0, classes, (tokens,), device=DEVICE)
    z = functional.linear(x.detach(), w.detach()).double().requires_grad_()
    want = functional.cross_entropy(z, target)
    (dz,) = torch.autograd.grad(want, z)
    exact = dz @ w.detach().double(), dz.t() @ x.detach().double()
    y = osm.linear_cross_entropy(x, w, target, memory=memory, dtype=torch.float32)
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-6)
    leaf = functional.linear(x, w)
    theirs = torch.autograd.grad(functional.cross_entropy(leaf.float(), target), [x, w])
    for ours, pytorch, value in zip(torch.autograd.grad(y, [x, w]), theirs, exact, strict=True):
        error, own = ((t.double() - value).norm() / value.norm() for t in (ours, pytorch))
        assert error <= 1.05 * own
    found = osm.linear_token_logprobs(x, w, target, memory=memory)
    torch.testing.assert_close(
        found.logprob.double(), z.log_softmax(1).gather(1, target[:, None])[:, 0], rtol=1e-5, atol=2e-5
    )
    again = torch.autograd.grad(-found.logprob.mean(), [x, w])
    for ours, pytorch, value in zip(again, theirs, exact, strict=True):
        error, own = ((t.double() - value).norm() / value.norm() for t in (ours, pytorch))
        assert error <= 1.05 * own
