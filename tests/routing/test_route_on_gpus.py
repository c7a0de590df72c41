"""`route` and its losses on a GPU: the results of a CPU, compiled, in CUDA graphs, without waiting, of many tokens."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import onlinesoftmax as osm
from onlinesoftmax.routing import Routed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: torch.cuda.is_available() is False"),
]

Tensor = torch.Tensor

KINDS: list[dict[str, Any]] = [
    {},
    {"renormalize": False, "scale": 0.5},
    {"score": "sigmoid", "bias": torch.linspace(-0.5, 0.5, 64), "groups": 8, "group_k": 4, "scale": 2.5},
    {"score": "sqrtsoftplus", "bias": torch.linspace(0.5, -0.5, 64)},
    {"order": "topk_first"},
]


def logits(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(7)) * 2).to(dtype)


def on_gpu(given: dict[str, Any]) -> dict[str, Any]:
    return {name: t.cuda() if isinstance(t, Tensor) else t for name, t in given.items()}


def total(found: Routed) -> Tensor:
    """A scalar that depends on every result with a gradient."""
    weighted = (found.weights * torch.arange(1, 5, device=found.weights.device)).sum()
    return (
        weighted
        + osm.load_balancing_loss(found, "sequence")
        + osm.load_balancing_loss(found)
        + osm.router_z_loss(found)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", KINDS, ids=str)
def test_results_and_gradients_are_those_of_a_cpu(given: dict[str, Any], dtype: torch.dtype) -> None:
    """The first call takes the general path, and the second one is prepared."""
    x, mask = logits(3, 50, 64, dtype=dtype), torch.rand(3, 50, generator=torch.Generator().manual_seed(8)) > 0.1
    ours, wanted = x.cuda().requires_grad_(), x.clone().requires_grad_()
    want = osm.route(wanted, 4, mask=mask, prob_sums=True, **given)
    (dx,) = torch.autograd.grad(total(want), wanted)
    for _ in range(2):
        found = osm.route(ours, 4, mask=mask.cuda(), prob_sums=True, **on_gpu(given))
        assert torch.equal(found.indices.cpu(), want.indices)
        assert torch.equal(found.counts.cpu(), want.counts)
        for name in ("weights", "prob_sums", "lse"):
            torch.testing.assert_close(getattr(found, name).cpu(), getattr(want, name), rtol=1e-5, atol=1e-6)
        (own,) = torch.autograd.grad(total(found), ours)
        torch.testing.assert_close(own.cpu(), dx, rtol=torch.finfo(dtype).eps * 2 + 1e-5, atol=1e-5)


def test_compiled_by_inductor() -> None:
    x, given = logits(2, 40, 64).cuda().requires_grad_(), on_gpu(KINDS[2])
    compiled = torch.compile(lambda x: total(osm.route(x, 4, prob_sums=True, **given)), fullgraph=True)
    plain = total(osm.route(x, 4, prob_sums=True, **given))
    torch.testing.assert_close(compiled(x), plain)
    ours, wanted = (torch.autograd.grad(loss, x)[0] for loss in (compiled(x), plain))
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)


def test_a_cuda_graph_and_no_call_waits() -> None:
    x, given = logits(512, 64).cuda(), on_gpu(KINDS[2])

    def step(x: Tensor) -> tuple[Tensor, ...]:
        found = osm.route(x, 4, prob_sums=True, **given)
        return found.weights, found.indices, found.counts, osm.load_balancing_loss(found), osm.router_z_loss(found)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(x), step(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(x)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, step(x), strict=True))
    z = x.clone().requires_grad_()
    with warnings.catch_warnings(action="ignore"):
        # PyTorch says that it is a prototype.
        torch.cuda.set_sync_debug_mode("error")
    try:
        total(osm.route(z, 4, prob_sums=True, **given)).backward()
        osm.route(z.detach(), 4, mask=z[:, 0] > 0, indices=captured[1], dense=True, **given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_more_than_2_to_the_31_logits() -> None:
    tokens = (1 << 31) // 64 + 100
    x = torch.zeros(tokens, 64, dtype=torch.bfloat16, device="cuda")
    x[-5:] = logits(5, 64).cuda()
    found = osm.route(x, 4, prob_sums=True)
    want = osm.route(x[-5:].cpu(), 4)
    assert torch.equal(found.indices[-5:].cpu(), want.indices)
    torch.testing.assert_close(found.weights[-5:].cpu(), want.weights, rtol=1e-5, atol=1e-6)
    assert found.counts.sum() == 4 * tokens
    torch.testing.assert_close(found.prob_sums.sum(), torch.tensor(float(tokens), device="cuda"), rtol=1e-4, atol=0)
