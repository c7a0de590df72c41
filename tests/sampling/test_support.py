"""The tokens that sampling kept, and the log-probabilities of the distribution that is truncated to them."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import onlinesoftmax as osm

Tensor = torch.Tensor

T = torch.tensor([1.0, 0.0, 0.6, 2.0, 1.0])
SCALE = torch.where(T > 0, 1 / T, 1.0).unsqueeze(1)


def logits(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(2)) * 3).to(dtype)


def ids_of(support: Any, row: int) -> list[int]:
    begin, end = support.offsets[row : row + 2].tolist()
    ids: list[int] = support.token_ids[begin:end].tolist()
    return ids


def exact(x: Tensor, support: Any, scale: Any, softcap: float | None = None, mask: Tensor | None = None) -> Tensor:
    """log-softmax over the tokens of the support, in float64."""
    z = x.double() * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    kept = torch.zeros(x.shape, dtype=torch.bool)
    for row in range(len(x)):
        kept[row, ids_of(support, row)] = True
    return z.masked_fill(~(kept if mask is None else kept & mask), -torch.inf).log_softmax(1)


FILTERS = [{"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 9, "top_p": 0.95, "min_p": 0.01}, {}]


@pytest.mark.parametrize("ties", ["keep", "first"])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_support_has_the_tokens_with_a_probability(filters: dict[str, Any], ties: str) -> None:
    z = logits(5, 40).round()
    z[4, 3] = torch.nan
    found = osm.sample(z, temperature=T, seed=1, top_logprobs=40, return_support=7, ties=ties, **filters)
    token_ids, offsets = found.support
    assert token_ids.shape == (5 * 7,)
    assert bool((token_ids[offsets[-1] :] == -1).all())
    for row in range(5):
        kept = found.top_tokens[row][found.top_logprobs[row] > -torch.inf].sort().values.tolist()
        assert ids_of(found.support, row) == (kept if len(kept) <= 7 else [])
    assert ids_of(found.support, 1) == [int(z[1].argmax())]
    assert osm.sample(z, temperature=T, seed=1, return_support=2).top_tokens is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("filters", FILTERS[:4], ids=str)
def test_log_probabilities_are_those_that_were_sampled_from(filters: dict[str, Any], dtype: torch.dtype) -> None:
    z = logits(5, 40, dtype=dtype).requires_grad_()
    found = osm.sample(z, temperature=T, seed=3, return_support=40, **filters)
    again = osm.token_logprobs(z, found.token, support=found.support, scale=SCALE)
    for got, want in ((again.logprob, found.logprob), (again.lse, found.lse)):
        assert torch.allclose(got, want, rtol=1e-6, atol=2e-6)
    # Every token has a log-probability under the support, -inf outside; the others have no gradient.
    wide = z.detach().double().requires_grad_()
    log_p = exact(wide, found.support, SCALE)
    every = osm.token_logprobs(z, torch.arange(40).expand(5, 40), support=found.support, scale=SCALE).logprob
    assert torch.allclose(every.double(), log_p, rtol=1e-6, atol=2e-6)
    entropy = -torch.special.xlogy(log_p.exp(), log_p.exp()).sum(1)
    assert torch.allclose(again.entropy.double(), entropy, atol=2e-6)
    (dx,) = torch.autograd.grad(again.logprob.sum() + 2 * again.entropy.sum(), z)
    own = log_p.gather(1, found.token.unsqueeze(1)).sum()
    p = log_p.exp()
    (exact_dx,) = torch.autograd.grad(own - 2 * (p * log_p.where(p > 0, 0.0)).sum(), wide)
    assert torch.allclose(dx.double(), exact_dx, atol=3e-6, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6)
    assert not dx[log_p == -torch.inf].any()


def test_gradients_of_all_orders_with_score_options_along_any_dimension() -> None:
    z = logits(4, 9, dtype=torch.float64).requires_grad_()
    support = osm.sample(z, top_k=5, seed=0, return_support=5).support
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 0, 1, 1]).bool()
    index = torch.stack([support.token_ids[::5], torch.arange(4)], 1)
    options = {"softcap": 4.0, "mask": mask, "scale": torch.linspace(0.5, 2, 4).double().unsqueeze(1)}
    want = exact(z, support, options["scale"], 4.0, mask).gather(1, index)
    found = osm.token_logprobs(z, index, support=support, **options)
    assert torch.allclose(found.logprob, want, rtol=1e-12, atol=1e-12)

    def outputs(x: Tensor) -> tuple[Tensor, ...]:
        found = osm.token_logprobs(x, index, support=support, **options)
        return found.logprob.masked_fill(found.logprob == -torch.inf, 0.0), found.entropy, found.lse

    assert torch.autograd.gradcheck(outputs, (z,))
    assert torch.autograd.gradgradcheck(outputs, (z,), fast_mode=True)
    # The rows of a cube, with the tokens in its first dimension.
    cube = z.detach().T.reshape(9, 2, 2)
    across = osm.token_logprobs(cube, index.T.reshape(2, 2, 2), 0, support=support, softcap=4.0)
    flat = osm.token_logprobs(z, index, support=support, softcap=4.0)
    assert torch.allclose(across.logprob, flat.logprob.T.reshape(2, 2, 2))
    assert torch.allclose(across.lse, flat.lse.reshape(2, 2))
    sampled = osm.sample(cube, top_k=5, seed=0, return_support=5, dim=0).support
    assert torch.equal(sampled.token_ids, support.token_ids)


def test_a_batch_of_supports_is_that_of_single_calls() -> None:
    z = torch.stack([logits(4, 9), logits(4, 9).flip(1)])

    def trained(x: Tensor) -> Tensor:
        found = osm.sample(x, top_k=3, seed=0, return_support=3)
        return osm.token_logprobs(x, found.token, support=found.support).logprob

    assert torch.equal(torch.func.vmap(trained)(z), torch.stack([trained(x) for x in z]))


def test_rows_without_a_distribution_and_targets_without_a_logprob() -> None:
    z = logits(6, 8).requires_grad_()
    # Rows of no token, of more than three, with an id that is none, and three rows that are sound.
    token_ids = torch.tensor([1, 2, 3, 4, 8, 5, 6, 7, 2, 0, 1, -1, *[-1] * 6])
    support = token_ids, torch.tensor([0, 0, 4, 6, 8, 9, 11])
    index = torch.tensor([1, 2, 5, 7, 3, -100])
    found = osm.token_logprobs(z, index, support=support)
    assert found.logprob[:3].isnan().all()
    assert found.entropy[:3].isnan().all()
    assert found.logprob[3].item() == pytest.approx(z.detach().double()[3, 6:].log_softmax(0)[1].item(), abs=1e-6)
    assert found.logprob[4] == -torch.inf
    assert found.logprob[5].isnan()
    assert osm.token_logprobs(z, index, support=support, ignore_index=-100).logprob[5] == 0
    (dx,) = torch.autograd.grad(found.logprob[3] + found.lse.nan_to_num().sum() * 0, z)
    assert not dx[[0, 1, 2, 4, 5]].any()
    assert not dx[3, :6].any()
    # The logits of other tokens are not read.
    spoilt = z.detach().clone()
    spoilt[3, :6] = torch.nan
    assert torch.equal(osm.token_logprobs(spoilt, index, support=support).logprob[3], found.logprob[3])
    arrays = tuple(t.numpy() for t in support)
    for kept in (support, (token_ids.int(), support[1].int())):
        again = osm.token_logprobs(z, index, support=kept)
        assert all(torch.equal(a, b) for a, b in zip(found[2:], again[2:], strict=True))
    got = osm.token_logprobs(z.detach().numpy(), index.numpy(), support=arrays)
    for a, b in zip(got, found, strict=True):
        assert np.allclose(a, b.detach().numpy(), rtol=1e-6, atol=1e-6, equal_nan=True)
    empty = osm.token_logprobs(torch.zeros(0, 4), index[:0], support=(index[:0], torch.zeros(1, dtype=torch.int64)))
    assert empty.logprob.shape == (0,)
    assert osm.token_logprobs(z[:, :0], index, support=support).logprob.isnan().all()
    # No row of the support has a token, and it has no places.
    found = osm.token_logprobs(z, index, support=(index[:0], torch.zeros(7, dtype=torch.int64)))
    assert all(t.isnan().all() for t in found[:2])
    # The offsets of a part of the rows, behind and before the ids of that part.
    for first in (2, -1):
        part = torch.tensor([0, 1]), torch.tensor([0, 1, 2]) + first
        found = osm.token_logprobs(torch.zeros(2, 4), torch.tensor([0, 1]), support=part)
        arrays = osm.token_logprobs(np.zeros((2, 4)), np.array([0, 1]), support=tuple(t.numpy() for t in part))
        places = torch.arange(2) + first
        assert [t.isnan().tolist() for t in found[:2]] == 2 * [((places < 0) | (places > 1)).tolist()]
        assert [np.isnan(t).tolist() for t in arrays[:2]] == [t.isnan().tolist() for t in found[:2]]
    # A dtype that does not hold the number of tokens, and has an index that is none.
    wide, narrow = torch.zeros(3, 300), torch.tensor([5, -1, 7], dtype=torch.int8)
    kept = torch.tensor([5, 299, 5, 299, 5, 299]), torch.tensor([0, 2, 4, 6])
    found = osm.token_logprobs(wide, narrow, support=kept).logprob.tolist()
    assert found == pytest.approx([-math.log(2), math.nan, -math.inf], nan_ok=True)


@pytest.mark.parametrize(
    ("token_ids", "offsets", "words"),
    [
        ([0, 1, 2], [0, 1, 3], "token_ids must have as many places for each of the 2 rows"),
        ([0, 1, 2, -1], [0, 1], r"offsets must have rows \+ 1 = 3 elements"),
        ([[0, 1], [2, -1]], [0, 2, 3], "token_ids must have one dimension"),
        ([0.0, 1.0], [0, 1, 2], "token_ids must have an integer dtype"),
        ([0, 1], [0, 2, 2], "support has 2 tokens of row 0, which is not from 0 to 1"),
        ([0, 9], [0, 1, 2], r"token_ids is 9 at position \(1, 0\)"),
        ([0, 1], [2, 3, 4], r"offsets is 3 at position 1, which is not in \[0, 3\)"),
        (None, None, "support must be a tuple"),
    ],
)  # fmt: skip
def test_wrong_supports_are_named(token_ids: Any, offsets: Any, words: str) -> None:
    z, index = torch.zeros(2, 4), torch.tensor([0, 1])
    for x, i, array in ((z, index, torch.tensor), (z.numpy(), index.numpy(), np.array)):
        support = 3 if token_ids is None else (array(token_ids), array(offsets))
        with pytest.raises((TypeError, ValueError, RuntimeError, IndexError), match=words):
            osm.token_logprobs(x, i, support=support, check=True)
    with pytest.raises(ValueError, match="return_support must be from 1 to the 4 tokens"):
        osm.sample(z, return_support=5)


def replayed(z: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
    """What was sampled, and its log-probability with its gradient."""
    found = osm.sample(z, top_p=0.8, seed=seed, return_support=16)
    again = osm.token_logprobs(z, found.token, support=found.support)
    (dx,) = torch.autograd.grad(again.logprob.nansum() + again.entropy.nansum(), z)
    return found.token, *found.support, again.logprob, dx


def test_supports_are_traced_whole() -> None:
    z, seed = logits(4, 50).requires_grad_(), torch.arange(4)
    assert osm.sample(z, top_p=0.8, seed=seed).kept.max() <= 16
    sampled = torch.compile(
        lambda x, s: osm.sample(x, top_p=0.8, seed=s, return_support=16), backend="eager", fullgraph=True
    )
    again = torch.compile(
        lambda x, i, *s: osm.token_logprobs(x, i, support=s, ignore_index=-1), backend="aot_eager", fullgraph=True
    )
    token, *want, logprob, dx = replayed(z, seed)
    assert all(map(torch.equal, sampled(z, seed).support, want))
    found = again(z, token, *want)
    assert torch.allclose(found.logprob, logprob, equal_nan=True)
    assert torch.allclose(torch.autograd.grad(found.logprob.nansum() + found.entropy.nansum(), z)[0], dx, atol=1e-6)


def test_a_program_with_a_support_takes_any_number_of_rows() -> None:
    class Trained(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found = osm.sample(x, top_k=3, seed=0, return_support=3)
            return osm.token_logprobs(x, found.token, support=found.support).logprob

    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(Trained(), (logits(4, 9),), dynamic_shapes=({0: rows},), strict=False)
    assert torch.equal(program.module()(logits(7, 9)), Trained()(logits(7, 9)))


@pytest.mark.gpu
@pytest.mark.parametrize("most", [16, 600])
def test_a_gpu_replays_what_it_sampled(most: int) -> None:
    """The kernel lists at most 512 tokens of a row; runs give the same bits; nothing waits for the GPU."""
    z, seed = logits(64, 5000), torch.arange(64)
    on_cpu = osm.sample(z, top_p=0.8, seed=seed, return_support=most)
    x, seeds = z.cuda().requires_grad_(), seed.cuda()

    def step() -> tuple[Tensor, ...]:
        found = osm.sample(x, top_p=0.8, seed=seeds, return_support=most)
        again = osm.token_logprobs(x, found.token, support=found.support)
        (dx,) = torch.autograd.grad(again.logprob.nansum() + again.entropy.nansum(), x)
        return *found.support, again.logprob.detach(), dx, found.logprob

    first = step()
    with warnings.catch_warnings(action="ignore"):
        # PyTorch says that it is a prototype.
        torch.cuda.set_sync_debug_mode("error")
    try:
        second = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True))
    token_ids, offsets, logprob, dx, sampled = (t.cpu() for t in second)
    assert torch.equal(token_ids, on_cpu.support.token_ids)
    assert torch.equal(offsets, on_cpu.support.offsets)
    full = on_cpu.kept <= most
    assert torch.allclose(logprob[full], sampled[full], rtol=1e-6, atol=2e-6)
    assert logprob[~full].isnan().all()
    kept = z.clone().requires_grad_()
    again = osm.token_logprobs(kept, on_cpu.token, support=on_cpu.support)
    assert torch.allclose(dx, torch.autograd.grad(again.logprob.nansum() + again.entropy.nansum(), kept)[0], atol=1e-5)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, captured, strict=True))
