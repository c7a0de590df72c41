"""The kernel that gathers the tokens which rows could be sampled from gives what PyTorch's operations give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import onlinesoftmax as osm
from cuda_simulator import simulate_own
from onlinesoftmax.kernels.cuda import compile
from onlinesoftmax.sampling.eager import support_of
from onlinesoftmax.sampling.kernels import support


@pytest.mark.parametrize(
    ("rows", "most", "listed"), [(1, 1, 1), (5, 7, 9), (70, 3, 3), (3, 200, 1000), (2, 1024, 1024)]
)
def test_tokens_are_those_of_the_operations(rows: int, most: int, listed: int, folder: Path) -> None:
    g = torch.Generator().manual_seed(most)
    tokens = torch.stack([torch.randperm(5000, generator=g)[:listed] for _ in range(rows)])
    full, none, too_many = torch.full((rows,), most), torch.zeros(rows).long(), torch.full((rows,), most + 1)
    for kept in torch.randint(0, most + 2, (rows,), generator=g), full, none, too_many:
        want = support_of(tokens[:, :most], kept)
        found = osm.sampling.Support(torch.full((rows * most,), 77), torch.full((rows + 1,), 77))
        memory = {"listed": tokens, "kept": kept, **found._asdict()}
        simulate_own(support.KERNEL, support.Shape(64), memory, (rows, listed, most), rows, folder)
        assert all(map(torch.equal, found, want))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_kernel_compiles_without_spills(arch: str, log_of: Any) -> None:
    pytest.importorskip("cuda.core", reason="cuda-core compiles the kernels")
    assert compile.usage(log_of(support.KERNEL.source(support.Shape()), arch))["spills"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [6, support.MOST_ROWS + 3])
def test_a_gpu_gathers_the_tokens_of_a_cpu(rows: int) -> None:
    z = torch.randn(rows, 300, generator=torch.Generator().manual_seed(3)) * 3
    z[2], z[3, 5] = -torch.inf, torch.nan
    for top, filters in ((0, {"top_k": 9}), (5, {"top_p": 0.7}), (20, {"min_p": 0.1, "ties": "first"})):
        given: dict[str, Any] = {"seed": 3, "return_support": 12, "top_logprobs": top, **filters}
        want = osm.sample(z, **given)
        for _ in range(3):  # a call of the same kind is prepared, and found by a guard
            found = osm.sample(z.cuda(), **given)
            assert all(torch.equal(a.cpu(), b) for a, b in zip(found.support, want.support, strict=True))
            assert torch.equal(found.token.cpu(), want.token)
            assert top == 0 or torch.equal(found.top_tokens.cpu(), want.top_tokens)
            assert (found.top_tokens is None) == (not top)
    cube = osm.sample(z[:6].view(2, 3, 300).cuda(), top_k=9, seed=3, return_support=12).support
    assert torch.equal(cube.token_ids.cpu(), osm.sample(z[:6], top_k=9, seed=3, return_support=12).support.token_ids)
