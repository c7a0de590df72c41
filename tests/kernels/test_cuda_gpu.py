"""The CUDA backend on a GPU: the laws of its states, and what only running kernels shows."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import laws
import onlinesoftmax as osm
from contract import DTYPES, assert_as_good_as_pytorch, outliers
from contract import OPERATIONS as FORWARD
from cuda_algebra import ALGEBRAS, CudaAlgebra
from onlinesoftmax.planner.strategies import TABLE

pytest.importorskip("cuda.core", reason="cuda.core is not installed")

STRATEGIES = [strategy for backend, strategy, _ in TABLE if backend == "cuda"]


@pytest.mark.gpu
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.name)
@pytest.mark.parametrize("algebra", ALGEBRAS, ids=lambda algebra: algebra.name)
def test_law(algebra: CudaAlgebra, law: laws.Law) -> None:
    # The first example compiles.
    @settings(max_examples=algebra.examples, suppress_health_check=[HealthCheck.too_slow])
    @given(law.cases(algebra.dtypes))
    def holds(case: laws.Case) -> None:
        law.check(algebra, case)

    holds()


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
