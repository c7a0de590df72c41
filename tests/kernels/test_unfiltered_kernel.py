"""The kernel that samples without a filter gives what PyTorch's operations give, token for token."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import onlinesoftmax as osm
from cuda_simulator import simulate_own
from hard_logits import assert_same_samples
from onlinesoftmax.core.device import KNOWN
from onlinesoftmax.kernels.cuda import compile
from onlinesoftmax.sampling.kernels import source, unfiltered, unfiltered_launch, which_kernel
from pairs import rest_exhaustive

Tensor = torch.Tensor

THREADS = 64
"""Threads of a simulated block, so that short rows have several steps."""


def simulated(x: Tensor, cluster: int, folder: Path, raw: bool, **given: Tensor) -> dict[str, Tensor]:
    """Results of the kernel, by name."""
    rows, cols = x.shape
    shape = unfiltered.Shape(
        str(x.dtype).removeprefix("torch."), cluster, THREADS, unfiltered_launch.is_aligned(x), raw
    )
    whole, real = torch.int64, torch.float32
    out = {"token": whole, "logprob": real, "lse": real, "kept": whole, "valid": torch.bool}
    memory = {"x": x, **given} | {name: torch.full((rows,), 77, dtype=dtype) for name, dtype in out.items()}
    numbers = x.stride(0), cols, source.slice_of(cols, cluster), 0, 0, 0
    simulate_own(unfiltered.KERNEL, shape, memory, numbers, rows, folder)
    return {name: memory[name] for name in out}


def check(x: Tensor, cluster: int, folder: Path, raw: bool = False, temperature: Any = 1.0) -> None:
    rows = len(x)
    given = {
        "temperature": torch.as_tensor(temperature).expand(rows).contiguous(),
        "seed": torch.arange(rows),
        "offset": torch.arange(rows) * 2**33,
    }
    got = simulated(x, cluster, folder, raw, **given)
    assert_same_samples(got, osm.sample(x, **given, logprobs="raw" if raw else "processed")._asdict())


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(("cols", "cluster"), [(1, 1), (100, 1), (5000, 2), (9001, 8)])
def test_tokens_are_those_of_the_formulas(cols: int, cluster: int, raw: bool, folder: Path) -> None:
    x = torch.randn(6, cols, generator=torch.Generator().manual_seed(cols)) * 3
    x[4] *= 30
    x[5, : cols // 2] = -torch.inf
    check(x, cluster, folder, raw, torch.tensor([1.0, 0.5, 0.0, 2.0, 0.01, 1.0]))


@pytest.mark.parametrize(
    ("dtype", "first"), rest_exhaustive(itertools.product((torch.bfloat16, torch.float16), (0, 1))), ids=str
)
def test_16_bit_logits_and_rows_that_are_not_aligned(dtype: torch.dtype, first: int, folder: Path) -> None:
    x = (torch.randn(3, 2777 + first, generator=torch.Generator().manual_seed(1)) * 2).to(dtype)
    check(x[:, first:], 2, folder)
    check(x[:, first:], 2, folder, temperature=torch.tensor([1e-3, 1.0, 0.0]))


@pytest.mark.parametrize("raw", [False, True])
def test_ties_and_rows_without_a_distribution(raw: bool, folder: Path) -> None:
    inf, nan = torch.inf, torch.nan
    odd = [2.0, 1.0, -0.0, 0.0, 5.0, 5.0, 1.0, 2.0, -inf, 5.0]
    rows = [odd, [1.0] * 10, [-inf] * 10, [0.0] * 9 + [nan], [inf, 1.0, inf] + [0.0] * 7, [3.0] + [-inf] * 9]
    rows += [[-0.0, 0.0] * 5, [inf, -inf] * 5, [nan, inf] * 5]
    # The odd logits come late, or alone.
    late = torch.full((3, 3000), -1.0)
    late[0, 2500], late[1, 2500], late[2, :2999] = nan, inf, -inf
    for temperature in (1.0, 0.0, -1.0, inf, nan, 1e-45, 3e38):
        for cluster in (1, 2):
            check(torch.tensor(rows), cluster, folder, raw, temperature)
        check(late, 2, folder, raw, temperature)


@pytest.mark.parametrize(
    "row",
    [
        # Keys that are equal in float32, or too close; sums that leave float32; logits that do.
        [3.4e38, -3.4e38, -3.4e38, -3.4e38], [1000.0, 1e-15, 0.0, -1.0], [1e30, 2.0, 1.0, 0.0], [7.0] * 40,
        [-3e6, -3e6 + 1, -3e6 + 2], [5e6, 5e6, 5e6 - 1], [-5e6, -5e6, -5e6 - 1], [0.0, 200.0, 400.0, 401.0],
    ],
)  # fmt: skip
def test_scores_at_the_limits_of_rounding(row: list[float], folder: Path) -> None:
    for temperature in (1.0, 3e38, 1e-6, 1e-38):
        check(torch.tensor([row]), 1, folder, False, temperature)
    # Many steps, each with larger logits than the one before.
    rising = torch.arange(6000.0).unsqueeze(0) * torch.tensor([[1e-3], [0.3]]) + row[-1]
    check(rising, 2, folder)


@pytest.mark.parametrize(
    ("arch", "cluster", "aligned"),
    # Few cells have a row of one block and one of several, aligned and not.
    rest_exhaustive(
        (
            (*one, aligned) for one in (("sm_80", 1), ("sm_90", 16), ("sm_100", 8)) for aligned in (True, False)
        ),
        lambda cell: (("cluster", cell[1] > 1), ("aligned", cell[2])),
    ),
)  # fmt: skip
def test_the_kernel_compiles_without_spills(arch: str, cluster: int, aligned: bool, log_of: Any) -> None:
    pytest.importorskip("cuda.core", reason="cuda-core compiles the kernels")
    shape = unfiltered.Shape("bfloat16", cluster, unfiltered.MOST_THREADS, aligned, False)
    log = log_of(unfiltered.KERNEL.source(shape), arch)
    assert compile.usage(log)["spills"] == 0


def test_few_rows_use_many_multiprocessors_and_short_rows_few_threads() -> None:
    hopper, ada = (KNOWN[name] for name in ("h100", "l4"))
    for device, most in ((hopper, 16), (ada, 1)):
        for rows, cols in ((1, 1), (1, 128256), (8, 128256), (64, 32000), (512, 128256), (10_000, 1000), (1, 1 << 31)):
            shape = unfiltered.shape_of(rows, cols, "float32", True, False, device)
            length = source.slice_of(cols, shape.cluster)
            assert length * shape.cluster >= cols > length * (shape.cluster - 1)
            assert shape.cluster <= most
            assert rows * shape.cluster <= max(rows, device.multiprocessors)
            assert shape.threads <= max(length // 8, 64)
    assert [unfiltered.shape_of(n, 128256, "float32", True, False, hopper).cluster for n in (4, 8, 32)] == [16, 8, 4]


def test_gpus_without_the_instructions_have_no_kernel() -> None:
    ampere = KNOWN["a100"]
    assert which_kernel.refusal("float32", 1, ampere) is None
    reason = which_kernel.refusal("float32", 1, replace(ampere, compute_capability=(7, 5)))
    assert reason is not None
    assert "compute capability 8.0" in reason


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "cols"), [(1, 128256), (64, 32000), (300, 50257), (3, 262208), (2, 1 << 20), (5, 1)])
def test_a_gpu_samples_the_tokens_of_a_cpu(rows: int, cols: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = (torch.randn(rows, cols, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)
        seed, temperature = torch.arange(rows), torch.linspace(0.0, 2.0, rows)
        for logprobs in ("processed", "raw"):
            want = osm.sample(x, seed=seed, temperature=temperature, logprobs=logprobs)
            got = osm.sample(x.cuda(), seed=seed.cuda(), temperature=temperature.cuda(), logprobs=logprobs)
            assert_same_samples(got._asdict(), want._asdict())


@pytest.mark.gpu
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}], ids=str)
def test_a_gpu_that_is_not_the_current_one_samples(filters: dict[str, Any]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = torch.randn(3, 5000, generator=torch.Generator().manual_seed(3))
    for _ in range(2):  # the second call is prepared
        got = osm.sample(x.to("cuda:1"), seed=7, **filters)
        assert torch.equal(got.token.cpu(), osm.sample(x, seed=7, **filters).token)


@pytest.mark.gpu
def test_prepared_calls_take_other_numbers_and_graphs() -> None:
    x = torch.randn(2, 3, 5000, generator=torch.Generator().manual_seed(3))
    on_gpu, seed, offset = x.cuda(), torch.arange(6).reshape(2, 3), torch.zeros(2, 3, dtype=torch.int64)
    for step in range(3):
        for given in ({"seed": step}, {"seed": 7, "offset": step}, {"seed": 5, "temperature": 0.5 * step}):
            assert torch.equal(osm.sample(on_gpu, **given).token.cpu(), osm.sample(x, **given).token), given
        of_rows = osm.sample(on_gpu, seed=seed.cuda(), offset=(offset + step).cuda())
        assert torch.equal(of_rows.token.cpu(), osm.sample(x, seed=seed, offset=offset + step).token)
    seeds, offsets, graph = seed.cuda(), offset.cuda(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = osm.sample(on_gpu, seed=seeds, offset=offsets)
    for step in range(3):
        graph.replay()
        assert torch.equal(found.token.cpu(), osm.sample(x, seed=seed, offset=offset + step).token)
        offsets += 1
