"""Calls of `sample` on a GPU that come again, and in CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import onlinesoftmax as osm
from hard_logits import assert_same_samples

Tensor = torch.Tensor


@pytest.mark.gpu
def test_a_gpu_samples_the_tokens_of_a_cpu_in_a_graph_too() -> None:
    z = torch.randn(16, 5000, generator=torch.Generator().manual_seed(9)) * 3
    given: dict[str, Any] = {
        "top_k": 40,
        "top_p": 0.9,
        "seed": torch.arange(16),
        "temperature": torch.linspace(0, 2, 16),
    }
    want, on_gpu = osm.sample(z, **given), {k: v.cuda() if isinstance(v, Tensor) else v for k, v in given.items()}
    logits = z.cuda()
    assert torch.equal(osm.sample(logits, **on_gpu).token.cpu(), want.token)
    graph, found = torch.cuda.CUDAGraph(), None
    with torch.cuda.graph(graph):
        found = osm.sample(logits, **on_gpu)
    logits.copy_(z.flip(0))
    graph.replay()
    assert torch.equal(found.token.cpu(), osm.sample(z.flip(0), **given).token)


@pytest.mark.gpu
@pytest.mark.parametrize("top", [0, 7])
@pytest.mark.parametrize(
    "filters", [{"top_k": 40, "top_p": 0.9, "min_p": 0.01}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}, {}], ids=str
)
def test_repeated_calls_with_numbers_are_those_with_one_value_a_row(filters: dict[str, Any], top: int) -> None:
    """A call of the same kind is found when it comes again; numbers go to the kernel without a tensor."""
    z = torch.randn(3, 5, 5000, generator=torch.Generator().manual_seed(9)) * 3
    narrow = {"top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32, "temperature": torch.float64}
    for seed, temperature in (3, 0.7), (2**40, 1.3), (3, 0.0):
        numbers = {"temperature": temperature, "offset": 5, "seed": seed, **filters}
        want = osm.sample(z, top_logprobs=top, **numbers)
        of_rows = {name: torch.full((3, 5), value, device="cuda") for name, value in numbers.items()}
        others = {name: t.to(narrow.get(name, t.dtype)) for name, t in of_rows.items()}
        for given in numbers, numbers, of_rows, of_rows, others, others:
            found = osm.sample(z.cuda(), top_logprobs=top, **given)
            assert torch.equal(found.token.cpu(), want.token)
            assert torch.equal(found.kept.cpu(), want.kept)
            assert torch.allclose(found.logprob.cpu(), want.logprob, rtol=1e-6, atol=1e-6)
            assert (found.top_tokens is None) == (not top)
            assert not top or torch.equal(found.top_tokens.cpu(), want.top_tokens)
    del numbers["seed"]
    drawn = [
        osm.sample(z.cuda(), generator=g, **numbers) for g in (torch.Generator("cuda").manual_seed(s) for s in (8, 9))
    ]
    for repeated in range(2):
        for seed, want in zip((8, 9), drawn, strict=True):
            torch.cuda.manual_seed(seed)
            assert torch.equal(osm.sample(z.cuda(), **numbers).token, want.token), repeated
    with pytest.raises(TypeError, match="top_k must be an int"):
        osm.sample(z.cuda(), temperature=0.7, offset=5, seed=3, top_logprobs=top, top_k=40.0)


@pytest.mark.gpu
@pytest.mark.parametrize("filters", [{"top_k": 40}, {"top_p": 0.9}, {}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_scores_with_options_are_sampled_as_on_a_cpu(filters: dict[str, Any], dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(5)
    z, bias = (torch.randn(6, 3000, generator=g) * 3).to(dtype), torch.randn(3000, generator=g).to(dtype)
    allowed = torch.rand(6, 3000, generator=g) < 0.3
    allowed[2] = False
    strided = osm.sample(z.t().contiguous().cuda(), dim=0, seed=torch.arange(6, device="cuda"), **filters)
    assert torch.equal(strided.token.cpu(), osm.sample(z, seed=torch.arange(6), **filters).token)
    want = osm.sample(z, bias=bias, mask=allowed, seed=torch.arange(6), **filters)
    found = osm.sample(z.cuda(), bias=bias.cuda(), mask=allowed.cuda(), seed=torch.arange(6, device="cuda"), **filters)
    for name in ("token", "kept", "valid"):
        assert torch.equal(getattr(found, name).cpu(), getattr(want, name)), name
    assert want.valid.tolist() == [True, True, False, True, True, True]


@pytest.mark.gpu
@pytest.mark.parametrize("filters", [{"top_k": 40, "ties": "first"}, {"top_p": 0.9, "min_p": 0.01}, {}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_draft", [True, False])
def test_drafts_are_verified_as_on_a_cpu(filters: dict[str, Any], dtype: torch.dtype, has_draft: bool) -> None:
    g = torch.Generator().manual_seed(6)
    target = (torch.randn(9, 4, 5003, generator=g) * 2).to(dtype)
    draft = (target[:, :3].float() + torch.randn(9, 3, 5003, generator=g) * 0.3).to(dtype)
    target[4, 1, 7] = torch.nan
    numbers = {"seed": torch.arange(9), "temperature": torch.linspace(0, 1.6, 9)}
    drafts = [osm.sample(draft[:, i], offset=i, **numbers, **filters).token for i in range(3)]
    tokens = torch.stack(drafts, 1)
    tokens[2, 1] = -1
    want = osm.verify(target, tokens, draft if has_draft else None, **numbers, **filters)
    on_gpu = {name: t.cuda() for name, t in numbers.items()}
    logits = target.cuda(), tokens.cuda(), draft.cuda() if has_draft else None
    for _ in range(3):  # a call of the same kind is prepared, and found by a guard
        assert_same_samples(osm.verify(*logits, **on_gpu, **filters)._asdict(), want._asdict())
    for seed, temperature in (3, 0.7), (2**40, 0.0):
        given: dict[str, Any] = {"seed": seed, "offset": 5, "temperature": temperature, **filters}
        want = osm.verify(target, tokens, draft if has_draft else None, **given)
        for _ in range(2):
            assert_same_samples(osm.verify(*logits, **given)._asdict(), want._asdict())


@pytest.mark.gpu
def test_other_drafts_and_graphs_are_verified_as_on_a_cpu() -> None:
    """Rows in two dimensions, drafts in int32, logits that are not aligned or of two dtypes, and no drafts."""
    g = torch.Generator().manual_seed(7)
    target, draft = torch.randn(2, 3, 5, 2001, generator=g) * 2, torch.randn(2, 3, 4, 2001, generator=g) * 2
    tokens, of_rows = draft.argmax(-1), {"top_k": torch.arange(1, 7).view(2, 3), "seed": torch.arange(6).view(2, 3)}
    on_gpu = {name: t.cuda() for name, t in of_rows.items()}
    narrow = on_gpu | {"top_k": on_gpu["top_k"].int()}
    half = draft.half()
    want = osm.verify(target, tokens, half.float(), **of_rows)
    for given in on_gpu, narrow, on_gpu, narrow:
        for drafts, logits in (tokens.cuda(), half.float().cuda()), (tokens.int().cuda(), half.cuda()):
            assert_same_samples(osm.verify(target.cuda(), drafts, logits, **given)._asdict(), want._asdict())
    found = osm.verify(target[:, :, :1].cuda(), tokens[:, :, :0].cuda(), draft[:, :, :0].cuda(), **on_gpu)
    assert torch.equal(found.tokens[..., 0].cpu(), osm.sample(target[:, :, 0], **of_rows).token)
    x, drafts, graph = target.cuda(), tokens.cuda(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = osm.verify(x, drafts, **on_gpu)
    x.copy_(target.flip(0))
    graph.replay()
    assert_same_samples(found._asdict(), osm.verify(target.flip(0), tokens, **of_rows)._asdict())
