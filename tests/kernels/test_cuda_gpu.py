"""The CUDA backend on a GPU: the laws of its states, and what only running kernels shows."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

import laws
import onlinesoftmax as osm
from contract import DTYPES, assert_as_good_as_pytorch, outliers
from contract import OPERATIONS as FORWARD
from cuda_algebra import ALGEBRAS, CudaAlgebra
from onlinesoftmax.core.problem import Problem
from onlinesoftmax.kernels import registry
from onlinesoftmax.kernels.cuda.strategy.grid.proposals import grid
from onlinesoftmax.kernels.cuda.strategy.grid.ring_proposals import STREAM
from onlinesoftmax.kernels.request import Request
from onlinesoftmax.lab.bench.tune_shapes import Shape, task
from onlinesoftmax.planner.plan import priced
from onlinesoftmax.planner.strategies import TABLE
from onlinesoftmax.torch.device import from_torch

pytest.importorskip("cuda.core", reason="cuda.core is not installed")

STRATEGIES = [strategy for backend, strategy, _ in TABLE if backend == "cuda"]


@pytest.mark.gpu
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.name)
@pytest.mark.parametrize("algebra", ALGEBRAS, ids=lambda algebra: algebra.name)
def test_law(algebra: CudaAlgebra, law: laws.Law) -> None:
    law.test(algebra)


def by(operation: str, strategy: str) -> Callable[..., torch.Tensor]:
    """An operation on the last dimension by one strategy; skips where the GPU cannot."""
    if strategy == "cluster" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("clusters of blocks need compute capability 9.0")
    return functools.partial(FORWARD[operation], dim=-1, backend="cuda", strategy=strategy)


SHAPES = {"row": (64, 3000), "cluster": (16, 100001), "grid": (3, 1 << 20), "looped": (64, 70001)}


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_side_streams_and_graphs(strategy: str) -> None:
    softmax = by("softmax", strategy)
    first, second = torch.randn(2, *SHAPES[strategy], device="cuda")
    x, y = first.clone(), torch.empty_like(first)
    of_first, of_second = softmax(first.clone()), softmax(second.clone())
    softmax(x, out=y)
    assert torch.equal(y, of_first)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = softmax(x * 1)
    stream.synchronize()
    assert torch.equal(late, of_first)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        softmax(x, out=y)
    for given_x, expected in ((second, of_second), (first, of_first), (second, of_second)):
        x.copy_(given_x)
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "cols"), [(48, 1 << 20), (9, 2000003)])
def test_several_long_rows_in_a_pipeline(rows: int, cols: int, dtype: torch.dtype) -> None:
    softmax = by("softmax", "grid")
    x = outliers(rows, cols, dtype=dtype, device="cuda")
    x[1], x[2, 5], x[3, 7] = -torch.inf, torch.inf, torch.nan
    if torch.cuda.get_device_capability() == (9, 0) and dtype == torch.bfloat16:
        assert osm.explain(x, backend="cuda", strategy="grid").plan.stages
    y = softmax(x)
    assert_as_good_as_pytorch(y, "softmax", x, -1)
    assert torch.equal(softmax(x).nan_to_num(-1), y.nan_to_num(-1))
    x_copy = x.clone()
    softmax(x_copy, out=x_copy)
    assert torch.equal(x_copy.nan_to_num(-1), y.nan_to_num(-1))


@pytest.mark.gpu
def test_grids_on_two_streams_at_once() -> None:
    softmax = by("softmax", "grid")
    inputs = [torch.randn(3, 1 << 20, device="cuda"), torch.randn(5, 300001, device="cuda")]
    streams, expected = [torch.cuda.Stream() for _ in inputs], [softmax(x) for x in inputs]
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for x, stream, want in zip(inputs, streams, expected, strict=True):
            with torch.cuda.stream(stream):
                found.append((softmax(x), want))
    torch.cuda.synchronize()
    assert all(torch.equal(ours, want) for ours, want in found)


@pytest.mark.gpu
@pytest.mark.usefixtures("device_memory")
def test_grid_of_more_elements_than_an_int32_counts() -> None:
    x = torch.empty(1, 2**31 + 4097, dtype=torch.bfloat16, device="cuda").normal_()
    y = by("softmax", "grid")(x)
    # As in test_triton.py: PyTorch has no softmax of one such row in float64.
    l = sum(float(part.double().exp().sum()) for part in x[0].split(1 << 27))
    for part in (slice(0, 1 << 20), slice(2**31 - 4096, 2**31 + 4096), slice(-(1 << 20), None)):
        exact = x[0, part].double().exp() / l
        assert ((y[0, part].double() - exact).abs() <= exact * 2**-8 + 2**-133).all()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [2.0**29, 3e9, 1e12, -1e12, 3e38])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_large_bfloat16_maxima(strategy: str, m: float) -> None:
    x = torch.full(SHAPES[strategy], -3e38, dtype=torch.bfloat16, device="cuda")
    x[:, 1::7], x[:, 5], x[:, -1] = m - abs(m) / 2, m, m
    y = by("softmax", strategy)(x)
    assert torch.equal(y.float(), torch.softmax(x.float(), -1))


PART = 1 << 20
"""Elements that are compared at the beginning, in the middle and at the end of a row."""


@pytest.mark.gpu
@pytest.mark.usefixtures("device_memory")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("operation", "rows", "cols"), [
    ("softmax", 1, 1 << 27), ("softmax", 3, 50000003), ("softmax_backward", 2, 1 << 26), ("log_softmax", 1, 70000001),
])  # fmt: skip
def test_every_streaming_variant_is_right(operation: str, rows: int, cols: int, dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("bulk copies need compute capability 9.0")
    wanted = task(Shape(operation, str(dtype).removeprefix("torch."), rows, cols))
    problem, device = Problem.of(wanted), from_torch("cuda")
    proposals = grid(problem, device)
    assert not isinstance(proposals, str)
    plans = [priced(one, problem, device) for one in proposals if one.kernel == STREAM]
    assert plans
    x = torch.randn(rows, cols, device="cuda").to(dtype)
    more, dy = {}, torch.randn(rows, cols, device="cuda").to(dtype)
    if operation == "softmax_backward":
        x, more = torch.softmax(x, -1), {"dy": dy}
    parts = [slice(0, PART), slice(cols // 2, cols // 2 + PART), slice(cols - PART, cols)]
    exact = [exact_part(operation, x, dy, part) for part in parts]
    for plan in plans:
        run = registry.load("cuda").prepare(Request(wanted, plan))
        y, again = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
        run(x, y, dict(more))
        run(x, again, dict(more))
        assert not y.isnan().any()
        assert torch.equal(y, again)
        for part, want in zip(parts, exact, strict=True):
            size = want.abs() + 1e-3 * want.abs().max()
            assert ((y[:, part].double() - want).abs() <= 4 * torch.finfo(dtype).eps * size).all(), plan.variant
        # The output may overwrite the input, whichever block writes a tile.
        z = x.clone()
        run(z, z, dict(more))
        assert torch.equal(z, y)


def exact_part(operation: str, x: torch.Tensor, dy: torch.Tensor, part: slice) -> torch.Tensor:
    """A part of the result in float64; sums over a row are added in pieces, because float64 takes much memory."""
    if operation == "softmax_backward":
        pieces = zip(x.split(1 << 24, 1), dy.split(1 << 24, 1), strict=True)
        dot = sum((y.double() * g.double()).sum(1, keepdim=True) for y, g in pieces)
        return x[:, part].double() * (dy[:, part].double() - dot)
    lse = torch.stack([z.double().logsumexp(1) for z in x.split(1 << 24, 1)]).logsumexp(0)[:, None]
    y = x[:, part].double() - lse
    return y if operation == "log_softmax" else y.exp()
