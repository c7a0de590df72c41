"""The kernel of a router's losses gives the losses and the gradients of the formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import onlinesoftmax as osm
import simulated_routing
from cuda_simulator import simulate_own
from onlinesoftmax.kernels.cuda import compile
from onlinesoftmax.routing import eager, loss_run, losses, run
from onlinesoftmax.routing.kernels import gradient_launch, losses_launch
from onlinesoftmax.routing.kernels import losses as kernels
from onlinesoftmax.routing.results import Routed, losses_of
from onlinesoftmax.routing.rules import Call
from onlinesoftmax.routing.run import in_shape
from pairs import one_architecture
from simulated_routing import a_call, logits, near

Tensor = torch.Tensor


def simulated(
    counts: Tensor, values: Tensor, factor: float, z_loss: bool, cluster: int, folder: Path
) -> tuple[Tensor, Tensor]:
    """What the kernel writes."""
    found, slopes = torch.full((), -5.0), torch.full(values.shape, -5.0)
    arrays, numbers = (counts, values, found, slopes), losses_launch.numbers_of(counts, values, factor)
    shape = kernels.Shape(z_loss, 64, cluster if z_loss else 1)
    simulate_own(kernels.KERNEL, shape, dict(zip(kernels.POINTERS, arrays, strict=True)), numbers, 1, folder)
    return found, slopes


def some(sequences: int, tokens: int, experts: int, dtype: torch.dtype = torch.float32) -> Tensor:
    rng = torch.Generator().manual_seed(tokens)
    return (torch.randn(sequences, tokens, experts, generator=rng) * 3).to(dtype)


@pytest.mark.parametrize(
    ("sequences", "tokens", "experts", "cluster"),
    [(1, 7, 5, 1), (1, 300, 70, 4), (3, 33, 40, 1), (5, 1, 1, 4), (2, 0, 8, 1)],
)  # fmt: skip
def test_losses_and_their_gradients(
    sequences: int, tokens: int, experts: int, cluster: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the host, in the place of the launch."""
    monkeypatch.setattr(losses_launch, "loss", lambda *given: simulated(*given, cluster, folder))

    def by_kernel(values: Tensor, counts: Tensor, factor: float, z_loss: bool) -> Tensor:
        found: Tensor = loss_run._Loss.apply(values, counts.int().contiguous(), factor, z_loss)
        return found

    mask = torch.ones(sequences, tokens, dtype=torch.bool)
    if sequences > 2:
        mask[1] = False
    results = []
    for fused in (by_kernel, None):
        x = some(sequences, tokens, experts).requires_grad_()
        found = osm.route(x, min(3, experts), mask=mask, prob_sums=True)
        several: Any = lambda counts: (counts, 2)  # noqa: E731  two processes, of which the other has no tokens
        made = [
            losses.load_balancing_loss(found, "switch", several, fused),
            losses.load_balancing_loss(found, "sequence", several, fused),
            losses.router_z_loss(found, several, fused),
        ]
        results.append([*made, *(torch.autograd.grad(one, x, torch.tensor(1.5), retain_graph=True)[0] for one in made)])
    torch.testing.assert_close(*results, rtol=2e-6, atol=1e-9)


def trained(call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Routed:
    """The results of simulated kernels, recorded by autograd."""

    def differentiate(call: Call, found: Routed, *given: Any) -> Tensor:
        some, losses = gradient_launch.readable(call, found, *given)
        return simulated_routing.simulated_gradient(call, found, some, folder, losses)

    monkeypatch.setattr(run, "_gradient_by_kernel", differentiate)
    found = run.recorded(call, lambda x, *_: simulated_routing.simulated(call._replace(x=x.detach()), folder, 2))
    return in_shape(found, call.rule, (len(call.x),), False)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_gradients_of_both_losses(score: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of the gradient takes those of the losses as numbers."""
    x, mask, generator = logits(40, 60).requires_grad_(), torch.arange(40) % 7 != 3, torch.Generator().manual_seed(3)
    call = a_call(x, 5, mask=mask, score=score, renormalize=False)
    ours = trained(call, folder, monkeypatch)
    want = in_shape(eager.found_at(call, eager.choose(call)), call.rule, (40,), False)
    noise = [torch.randn(t.shape, generator=generator) for t in (want.weights, want.prob_sums, want.lse)]
    found: list[list[Tensor]] = []
    for one in (ours, want):
        balance, z_loss = osm.load_balancing_loss(one) * 30, osm.router_z_loss(one) * -2
        own = [(t * dy).sum() for t, dy in zip((one.weights, one.prob_sums, one.lse), noise, strict=True)]
        sums = [balance, z_loss, balance + z_loss, own[0] + balance + z_loss, sum(own) + balance + z_loss]
        found.append([torch.autograd.grad(total, x, retain_graph=True)[0] for total in sums])
        (first,) = torch.autograd.grad(sums[-1], x, create_graph=True)
        found[-1] += [first.detach(), *torch.autograd.grad(first.square().sum(), x)]
    for dx, exact in zip(*found, strict=True):
        near(dx, exact, 1e-5)


def test_a_loss_is_that_of_the_results(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's loss is for one caller, as long as nobody has changed the results."""
    routed = trained(a_call(logits(24, 60).requires_grad_(), 5), folder, monkeypatch)
    kept = losses_of(routed)
    assert kept is not None
    assert kept.z_loss is not None
    with torch.no_grad():
        assert not osm.router_z_loss(routed).requires_grad
    first, second = osm.router_z_loss(routed), osm.router_z_loss(routed)
    assert first is kept.z_loss
    first.mul_(2)
    near(second * 2, first)
    assert osm.load_balancing_loss(routed._replace(prob_sums=2 * routed.prob_sums)) > 1.5
    assert routed.counts is not None
    routed.counts[1:] = 0
    near(osm.load_balancing_loss(routed), losses.load_balancing_loss(Routed(*routed), "switch"))


def test_a_loss_of_counts_that_a_collective_changed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch counts no change by `all_reduce`, as it counts none of `.data`."""
    routed = trained(a_call(logits(24, 60).requires_grad_(), 5), folder, monkeypatch)
    assert routed.counts is not None
    with osm.distributed.one_process():
        routed.counts.data[1:] = 0
        near(osm.load_balancing_loss(routed), losses.load_balancing_loss(Routed(*routed), "switch"))


@pytest.mark.parametrize("arch", one_architecture(2))
def test_the_kernels_compile_without_spills(arch: str, log_of: Any) -> None:
    pytest.importorskip("cuda.core", reason="cuda-core compiles the kernels")
    for shape in (kernels.Shape(False), kernels.Shape(True, 512, 1 if arch < "sm_90" else 8)):
        log = log_of(kernels.KERNEL.source(shape), arch)
        assert not compile.usage(log)["spills"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: torch.cuda.is_available() is False")
@pytest.mark.parametrize(
    ("sequences", "tokens", "experts"), [(1, 70000, 256), (3, 33, 40), (64, 1024, 128), (1, 5, 8192), (1, 300000, 64)]
)  # fmt: skip
def test_losses_on_a_gpu(sequences: int, tokens: int, experts: int) -> None:
    """Those of PyTorch's operations in float64, alone and under a second derivative."""
    x = some(sequences, tokens, experts).cuda().requires_grad_()
    wide = x.detach().double().requires_grad_()
    ours, wanted = (osm.route(t, min(3, experts), prob_sums=True) for t in (x, wide))
    for loss in (osm.load_balancing_loss, lambda r: osm.load_balancing_loss(r, "sequence"), osm.router_z_loss):
        one, other = loss(ours), loss(wanted)
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-8)
        dx, dy = (torch.autograd.grad(a, b, retain_graph=True)[0] for a, b in ((one, x), (other, wide)))
        # A gradient is a probability times a difference of derivatives, which may cancel.
        of_results = torch.autograd.grad(other, (wanted.prob_sums, wanted.lse), retain_graph=True, allow_unused=True)
        largest = sum(part.abs().max() for part in of_results if part is not None)
        assert ((dx.double() - dy).abs() <= 4e-6 * largest * wide.detach().softmax(-1)).all()
    again = osm.route(x, min(3, experts), prob_sums=True)
    (dx,) = torch.autograd.grad(osm.router_z_loss(again), x, create_graph=True)
    assert dx.sum().requires_grad
