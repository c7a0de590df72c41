"""The kernel of a router's losses gives the losses and the gradients of the formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import onlinesoftmax as osm
from cuda_simulator import simulate_sample
from onlinesoftmax.kernels.cuda import compile
from onlinesoftmax.routing import loss_run, losses
from onlinesoftmax.routing.kernels import losses as kernels
from onlinesoftmax.routing.kernels import losses_launch

Tensor = torch.Tensor


def simulated(
    counts: Tensor, values: Tensor, factor: float, z_loss: bool, cluster: int, folder: Path
) -> tuple[Tensor, Tensor]:
    """What the kernel writes."""
    found, slopes = torch.full((), -5.0), torch.full(values.shape, -5.0)
    pointers = [t.data_ptr() for t in (counts, values, found, slopes)]
    fields = np.array([*pointers, *losses_launch.numbers_of(counts, values, factor)], np.int64)
    simulate_sample(kernels.Shape(z_loss, 64, cluster if z_loss else 1), fields, 1, folder, kernels)
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
    for ours, wanted in zip(*results, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_kernels_compile_without_spills(arch: str) -> None:
    pytest.importorskip("cuda.core", reason="cuda-core compiles the kernels")
    for shape in (kernels.Shape(False), kernels.Shape(True, 512, 1 if arch < "sm_90" else 8)):
        _, log, _ = compile.build(kernels.source(shape), arch)
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
