"""The kernel of topk_logprobs gives what PyTorch's operations give, however a row is cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import onlinesoftmax as osm
from cuda_simulator import simulate_own
from onlinesoftmax.core.device import KNOWN, Device
from onlinesoftmax.kernels.cuda import compile
from onlinesoftmax.sampling.kernels import source, topk, unfiltered_launch
from pairs import rest_exhaustive

Tensor = torch.Tensor


def simulated(x: Tensor, k: int, target: Tensor | None, cluster: int, folder: Path, **shape: int) -> dict[str, Tensor]:
    """Results of the kernel, by name."""
    rows, cols = x.shape
    dtype, aligned = str(x.dtype).removeprefix("torch."), unfiltered_launch.is_aligned(x)
    most = topk.SHORT_LIST if k <= topk.SHORT_LIST else topk.MOST
    of = topk.Shape(dtype, cluster, 128, aligned, target is not None, most)
    of = of._replace(**shape)
    out = {name: torch.full((rows, k), -5.0) for name in ("values", "logprobs")}
    out |= {name: torch.full((rows,), -5.0) for name in ("lse", "target_logprob")}
    out |= {"indices": torch.full((rows, k), -5), "target_rank": torch.full((rows,), -5)}
    numbers = x.stride(0), cols, source.slice_of(cols, cluster), k
    simulate_own(topk.KERNEL, of, {"x": x, "target": target, **out}, numbers, rows, folder)
    return out


def check(x: Tensor, k: int, cluster: int, folder: Path, target: Tensor | None = None, **shape: int) -> None:
    """Compare with a stable sort, and with float64 log-probabilities."""
    got = simulated(x, k, target, cluster, folder, **shape)
    z = x.double()
    values, order = z.sort(dim=1, descending=True, stable=True)
    lse = z.logsumexp(1)
    logp = (z - lse.unsqueeze(1)).where(lse.isfinite().unsqueeze(1), torch.nan)
    assert torch.equal(got["indices"], order[:, :k])
    near(got["values"], values[:, :k], 0.0)
    near(got["lse"], lse)
    near(got["logprobs"], logp.gather(1, order)[:, :k])
    if target is not None:
        inside = (target >= 0) & (target < x.shape[1])
        at = target.where(inside, 0).unsqueeze(1)
        assert torch.equal(got["target_rank"], ((order == at).int().argmax(1) + 1).where(inside, 0))
        near(got["target_logprob"], logp.gather(1, at).squeeze(1).where(inside, torch.nan))


def near(got: Tensor, want: Tensor, error: float = 5e-7) -> None:
    assert torch.allclose(got.cpu().float(), want.cpu().float(), rtol=error, atol=error, equal_nan=True)


@pytest.mark.parametrize(
    ("cols", "cluster", "dtype"),
    rest_exhaustive(
        (*one, dtype)
        for one in ((100, 1), (5001, 1), (9000, 2), (20001, 8))
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ),
)
def test_logits_of_each_dtype(cols: int, cluster: int, dtype: torch.dtype, folder: Path) -> None:
    x = (torch.randn(3, cols, generator=torch.Generator().manual_seed(cols)) * 3).to(dtype)
    for k in (1, 20, 100):
        check(x, k, cluster, folder, torch.tensor([cols // 2, cols - 1, 3]))
    check(x[:, 1:], 7, cluster, folder)
    check(x, 0, cluster, folder, torch.tensor([-1, cols, 0]))


@pytest.mark.parametrize("cluster", [1, 2])
def test_rows_without_a_softmax_ties_and_infinities(cluster: int, folder: Path) -> None:
    inf, nan = torch.inf, torch.nan
    noise = torch.randn(9, 3000, generator=torch.Generator().manual_seed(1))
    x = noise.clone()
    x[0, [5, 2900]], x[1, [7, 2999]], x[2] = nan, inf, -inf
    x[3] = torch.where(torch.arange(3000) % 700 == 3, noise[3], -inf)
    x[4], x[5] = 1.0, (noise[5] * 2).round()
    x[6], x[7, :2], x[8] = nan, torch.tensor([3.4e38, -3.4e38]), noise[8] * 1e37
    x[0, 2900] = -nan
    for column in (0, 5, 700, 1503, 2999):
        check(x, 20, cluster, folder, torch.full((9,), column))
    check(x, 1000, cluster, folder, torch.arange(9))
    check(x, 1024, cluster, folder)
    check(x[:, :5], 5, 1, folder, torch.arange(9) % 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lists_that_overflow(dtype: torch.dtype, folder: Path) -> None:
    cols = 12_003
    noise = torch.randn(4, cols, generator=torch.Generator().manual_seed(4))
    late = torch.where(torch.arange(cols) < 2048, noise[3] - 8, noise[3])
    x = torch.stack([torch.linspace(-4, 4, cols), torch.ones(cols), (noise[2] * 2).round(), late]).to(dtype)
    x[1, 11_000], x[2, 11_500:] = 2.0, torch.inf
    for k in (5, 128, 700, 1024):
        check(x, k, 1, folder, torch.arange(4) * 4000)
    check(x, 1024, 4, folder, torch.arange(4) * 4000)


@pytest.mark.parametrize(
    ("arch", "cluster"),
    [
        *(pytest.param(arch, 1, marks=pytest.mark.exhaustive) for arch in ("sm_80", "sm_90")),
        ("sm_90", 8),
        ("sm_100", 1),
    ],
)
def test_the_kernel_compiles(arch: str, cluster: int, log_of: Any) -> None:
    pytest.importorskip("cuda.core", reason="cuda-core compiles the kernels")
    shape = topk.Shape("bfloat16", cluster, 512, True, False, topk.SHORT_LIST)
    log = log_of(topk.KERNEL.source(shape), arch)
    assert not compile.usage(log)["spills"]


def test_few_rows_have_many_blocks() -> None:
    hopper, ampere = KNOWN["h100"], KNOWN["a100"]

    def shape(rows: int, cols: int, device: Device) -> topk.Shape:
        found = topk.shape_of(rows, cols, 20, "bfloat16", True, False, device)
        assert found is not None
        return found

    assert shape(1, 128256, hopper).cluster > shape(64, 128256, hopper).cluster > shape(512, 128256, hopper).cluster
    assert shape(1, 1 << 20, ampere).cluster == 1
    # An H100 has places for 14 clusters of 8 and 30 of 4.
    assert [shape(rows, 128256, hopper).cluster for rows in (14, 16, 29, 32)] == [8, 4, 4, 2]
    assert shape(1000, 300, hopper).threads < shape(1000, 128256, hopper).threads
    assert topk.shape_of(1, 100, 20, "bfloat16", True, False, replace(hopper, shared_memory=16 << 10)) is None
    # 512 threads would need more shared memory.
    less = topk.shape_of(64, 128256, 20, "float32", True, False, KNOWN["l4"])
    assert less is not None
    assert less.threads == 256


def same(got: osm.sampling.TopLogprobs, want: osm.sampling.TopLogprobs) -> None:
    for name in ("indices", "target_rank"):
        if getattr(want, name) is not None:
            assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name
    near(got.values, want.values, 0.0)
    for name in ("logprobs", "lse", "target_logprob"):
        if getattr(want, name) is not None:
            near(getattr(got, name), getattr(want, name), 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "cols"), [(1, 128256), (8, 50257), (64, 32000), (300, 1000), (2, 1 << 20)])
def test_a_gpu_lists_the_tokens_of_a_cpu(rows: int, cols: int, dtype: torch.dtype) -> None:
    x = (torch.randn(rows, cols, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)
    target = torch.arange(rows) * 7 % cols
    for k in (0, 1, 20, 128, 700):
        same(osm.topk_logprobs(x.cuda(), k, target=target.cuda()), osm.topk_logprobs(x, k, target=target))
    # The second call is a prepared one; then slices that are not aligned, and other dimensions.
    for _ in range(2):
        same(osm.topk_logprobs(x.cuda(), 20), osm.topk_logprobs(x, 20))
    same(osm.topk_logprobs(x.cuda()[:, 1:], 20), osm.topk_logprobs(x[:, 1:], 20))
    same(osm.topk_logprobs(x.cuda().T, 5, dim=0), osm.topk_logprobs(x.T, 5, dim=0))
    same(osm.topk_logprobs(x.cuda().double(), 5), osm.topk_logprobs(x.double(), 5))
    if cols > 5000:
        same(osm.topk_logprobs(x.cuda(), 1024), osm.topk_logprobs(x, 1024))
        same(osm.topk_logprobs(x.cuda(), 2000, target=target.cuda()), osm.topk_logprobs(x, 2000, target=target))


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [5000, 128256])
def test_a_gpu_lists_hard_rows(cols: int) -> None:
    inf, nan, columns = torch.inf, torch.nan, torch.arange(cols)
    noise = torch.randn(12, cols, generator=torch.Generator().manual_seed(1))
    x = noise.clone()
    x[0, [5, cols - 9]], x[1, [7, cols - 1]], x[2] = torch.tensor([nan, -nan]), inf, -inf
    x[3] = torch.where(columns % 700 == 3, noise[3], -inf)
    x[4], x[5], x[6], x[7, :2] = 1.0, (noise[5] * 2).round(), nan, torch.tensor([3.4e38, -3.4e38])
    x[8], x[9] = torch.linspace(-4, 4, cols), torch.where(columns < 4096, noise[9] - 8, noise[9])
    x[10], x[11, cols // 2 :] = noise[10] * 1e37, inf
    for repeat in (1, 60):
        rows = x.repeat(repeat, 1)
        for k in (20, 1024):
            target = torch.arange(len(rows)) * 4000 % cols
            same(osm.topk_logprobs(rows.cuda(), k, target=target.cuda()), osm.topk_logprobs(rows, k, target=target))


@pytest.mark.gpu
def test_gradients_and_graphs_on_a_gpu() -> None:
    x = torch.randn(6, 3000, generator=torch.Generator().manual_seed(2))
    x[1, :2900] = -torch.inf
    mask, target = torch.arange(3000) % 7 != 3, torch.tensor([5, 2950, -1, 8, 9, int(x[5].argmax())])
    for options in ({}, {"mask": mask, "softcap": 4.0, "scale": 0.5}):
        found = []
        for device in ("cpu", "cuda", "cuda"):
            z = x.to(device, copy=True).requires_grad_()
            given = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in options.items()}
            out = osm.topk_logprobs(z, 9, target=target.to(device), **given)
            weighted = [
                t.masked_fill(~t.isfinite(), 0.0) for t in (out.values, out.logprobs, out.target_logprob, out.lse)
            ]
            sum(
                (t * torch.linspace(1, 2, t.numel(), device=device).reshape(t.shape)).sum() for t in weighted
            ).backward()
            found.append(z.grad)
        for dx in found[1:]:
            near(dx, found[0], 1e-5)
    z = x.cuda()
    want = osm.topk_logprobs(z, 9)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = osm.topk_logprobs(z, 9)
    graph.replay()
    same(got, osm.sampling.TopLogprobs(*[None if t is None else t.cpu() for t in want]))
    compiled = torch.compile(lambda z: osm.topk_logprobs(z, 9), backend="aot_eager", fullgraph=True)
    same(compiled(z), osm.topk_logprobs(x, 9))
