"""The losses under torch.compile, under autocast and in CUDA graphs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.nn import functional
from ways import HOW, gradient

import onlinesoftmax as osm
from contract import DEVICE


# Dynamo itself makes an instance of an autograd function while it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(backend: str) -> None:
    x, target = torch.randn(6, 37, device=DEVICE, requires_grad=True), torch.randint(37, (6,), device=DEVICE)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return osm.cross_entropy(2 * x, target, label_smoothing=0.1, z_loss=0.01, softcap=4.0, **HOW)

    def rows(x: torch.Tensor) -> torch.Tensor:
        found = osm.token_logprobs(2 * x, target, **HOW)
        per_row = osm.cross_entropy(2 * x, target, reduction="none", **HOW)
        return found.logprob.sum() + found.entropy.sum() + found.lse.sum() + (per_row * per_row).sum()

    def masked(x: torch.Tensor) -> torch.Tensor:
        mask, scale = torch.arange(37, device=x.device) < 35, torch.linspace(-1, 2, 6, device=x.device)[:, None]
        options: dict[str, Any] = {"mask": mask, "scale": scale, "dtype": torch.float64, "softcap": 5.0, **HOW}
        mean = osm.cross_entropy(2 * x, target.clamp(max=34), **options)
        per_row = osm.cross_entropy(2 * x, target.clamp(max=34), reduction="none", **options)
        return mean + (per_row * per_row).sum()

    for function in (loss, rows, masked):
        ours, compiled = function(x), torch.compile(function, fullgraph=True, backend=backend)(x)
        torch.testing.assert_close(compiled, ours)
        one = torch.tensor(1.0)
        torch.testing.assert_close(gradient(compiled, x, one), gradient(ours, x, one))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compile_with_symbols_for_shapes_and_numbers(reduction: str) -> None:
    weight = torch.rand(37, device=DEVICE)
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.01, "scale": 0.5, "ignore_index": 5}

    def loss(x: torch.Tensor, target: torch.Tensor) -> Any:
        return osm.cross_entropy(2 * x, target, weight, reduction=reduction, return_stats=True, **options, **HOW)

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (6, 9):
        x, target = torch.randn(rows, 37, device=DEVICE, requires_grad=True), torch.arange(rows, device=DEVICE)
        (ours, stats), (theirs, expected) = compiled(x, target), loss(x, target)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(stats, expected)
        one = torch.ones_like(ours)
        torch.testing.assert_close(gradient(ours, x, one), gradient(theirs, x, one))


def test_autocast_gives_float32() -> None:
    x, target = torch.randn(3, 8, device=DEVICE, dtype=torch.bfloat16), torch.tensor([1, 0, 2], device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        ours, theirs = osm.cross_entropy(x, target, **HOW), functional.cross_entropy(x, target)
    assert ours.dtype == theirs.dtype == torch.float32
    # On a GPU PyTorch rounds the logarithms of the probabilities to bfloat16.
    torch.testing.assert_close(ours, functional.cross_entropy(x.float(), target))


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu() -> None:
    x = torch.randn(64, 1000, device=DEVICE, requires_grad=True)
    target, weight = torch.randint(1000, (64,), device=DEVICE), torch.rand(1000, device=DEVICE)

    def step() -> None:
        osm.cross_entropy(x, target).backward()
        osm.cross_entropy(x, target, weight, label_smoothing=0.1, z_loss=0.1).backward()
        osm.cross_entropy(x, target, reduction="none").sum().backward()
        found = osm.token_logprobs(x, target)
        (found.logprob.sum() + found.entropy.sum()).backward()

    step()
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            # The mode warns that it is a prototype.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph, want = torch.cuda.CUDAGraph(), x.grad.clone() * 1.5
    x.grad.zero_()
    with torch.cuda.graph(graph):
        step()
    x.grad.zero_()
    for _ in range(3):
        graph.replay()
    torch.testing.assert_close(x.grad, want)
