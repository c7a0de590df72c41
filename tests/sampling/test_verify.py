"""Speculative decoding gives the distribution of the large model, whatever the small one proposes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import onlinesoftmax as osm
from pairs import rest_exhaustive

Tensor = torch.Tensor

ROWS = 100_000
PLACES = 2


def drafts_of(target: Tensor, logits: Tensor | None, **given: Any) -> Tensor:
    """Two drafted tokens of each row: sampled, or the most probable ones of the target."""
    if logits is None:
        return target[:PLACES].argmax(1).expand(ROWS, PLACES)
    numbers = torch.arange(ROWS)
    return torch.stack([osm.sample(logits[:, i], seed=numbers, offset=i, **given).token for i in range(PLACES)], 1)


def chi_square(tokens: Tensor, p: Tensor) -> float:
    count = torch.bincount(tokens, minlength=len(p)).double()
    assert not count[p == 0].any()
    want = len(tokens) * p[p > 0]
    return float(((count[p > 0] - want) ** 2 / want).sum())


GIVEN: list[dict[str, Any]] = [{}, {"temperature": 0.7, "top_k": 4}, {"top_p": 0.85}]


@pytest.mark.parametrize(
    ("given", "kind"), rest_exhaustive(itertools.product(GIVEN, ("near", "far", "greedy"))), ids=str
)
def test_tokens_are_those_of_the_target(kind: str, given: dict[str, Any]) -> None:
    """The logits do not depend on the tokens before, so each place has one distribution: that of the target."""
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(PLACES + 1, 6, generator=generator) * 1.5
    draft = None if kind == "greedy" else target[:PLACES] * (0.8 if kind == "near" else -0.5)
    p = osm.sample(target, seed=0, top_logprobs=6, **given)
    p = torch.zeros(3, 6, dtype=torch.float64).scatter(1, p.top_tokens, p.top_logprobs.double().exp())
    logits = None if draft is None else draft.expand(ROWS, PLACES, 6)
    drafts = drafts_of(target, logits, **given)
    # The seeds of the drafts: the noise must be independent all the same.
    found = osm.verify(target.expand(ROWS, 3, 6), drafts, logits, seed=torch.arange(ROWS), **given)
    for place in range(3):
        reached = found.tokens[:, place] >= 0
        assert torch.equal(reached, found.accepted >= place)
        # With 5 degrees of freedom, 25.7 is passed with a probability of 0.0001.  Nothing but the filters of "far" lets
        # no draft stay.
        if kind == "far" and not reached.any():
            continue
        assert chi_square(found.tokens[reached, place], p[place]) < 25.7
    q = osm.sample(draft, seed=0, top_logprobs=6, **given) if draft is not None else None
    if q is None:
        chance = float(p[0].max())
    else:
        q = torch.zeros(2, 6, dtype=torch.float64).scatter(1, q.top_tokens, q.top_logprobs.double().exp())
        chance = float(torch.minimum(p[0], q[0]).sum())
    assert float((found.accepted > 0).double().mean()) == pytest.approx(chance, abs=0.006)
    at = found.tokens.clamp(min=0)
    want = torch.where(found.tokens < 0, 0.0, p.log().expand(ROWS, 3, 6).gather(2, at.unsqueeze(2)).squeeze(2))
    assert torch.allclose(found.logprobs.double(), want, atol=1e-5)


def test_greedy_rows_keep_what_the_target_would_write() -> None:
    target = torch.tensor([[[0, 5, 1], [4, 0, 0], [0, 0, 3]]], dtype=torch.float32).expand(3, 3, 3)
    drafts = torch.tensor([[1, 0], [1, 2], [0, 0]])
    for draft_logits in (None, torch.nn.functional.one_hot(drafts, 3).float()):
        found = osm.verify(target, drafts, draft_logits, temperature=0.0, seed=1)
        assert found.accepted.tolist() == [2, 1, 0]
        assert found.tokens.tolist() == [[1, 0, 2], [1, 0, -1], [1, -1, -1]]
        assert not found.logprobs.any()


def test_a_trace_without_filters_moves_no_tokens() -> None:
    """A scatter of tokens to the places where they are made Inductor of PyTorch 2.13 fail with a KeyError on a CPU."""
    given = torch.randn(2, 3, 9), torch.randint(9, (2, 2)), torch.randn(2, 2, 9)
    traced = make_fx(lambda *a: osm.verify(*a, seed=1).tokens)(*given)
    assert "scatter" not in traced.code


def test_rows_without_drafts_are_sampled() -> None:
    target = torch.randn(4, 3, 50, generator=torch.Generator().manual_seed(2))
    seed, offset = torch.arange(4), torch.tensor([5, 6, 7, 8])
    drafts = torch.tensor([[-1, -1], [-1, 3], [-1, 50], [-1, -1]])
    found = osm.verify(target, drafts, torch.zeros(4, 2, 50), seed=seed, offset=offset, top_p=0.9)
    want = osm.sample(target[:, 0], seed=seed, offset=offset, top_p=0.9)
    assert torch.equal(found.tokens[:, 0], want.token)
    assert torch.equal(found.logprobs[:, 0], want.logprob)
    assert (found.tokens[:, 1:] == -1).all()
    assert not found.accepted.any()
    none = osm.verify(target[:, :1], drafts[:, :0], seed=seed, offset=offset, top_p=0.9)
    assert torch.equal(none.tokens[:, 0], want.token)
    assert osm.verify(target[:0], drafts[:0], seed=1).tokens.shape == (0, 3)


def test_a_row_without_a_distribution_is_not_valid_and_changes_no_other() -> None:
    target = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(3))
    drafts, seed = torch.tensor([[1, 2], [3, 4]]), torch.tensor([1, 2])
    want = osm.verify(target, drafts, seed=seed)
    broken = target.clone()
    broken[0, 0, 5] = torch.nan
    found = osm.verify(broken, drafts, seed=seed)
    assert found.valid.tolist() == [False, True]
    assert found.tokens[0].tolist() == [-1, -1, -1]
    assert all(torch.equal(a[1], b[1]) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize(
    ("target", "drafts", "draft", "words"),
    [
        ((3,), (2,), None, "target_logits must have shape"),
        ((2, 0, 5), (2, 0), None, "target_logits must have shape"),
        ((2, 3, 5), (2, 3), None, r"target_logits must have n \+ 1 = 4 positions for 3 drafts, got 3: "),
        ((2, 3, 5), (2, 3), (2, 3, 5), r"target_logits must have n \+ 1 = 4 positions for 3 drafts, got 3: "),
        ((2, 3, 5), (2, 3), (2, 2, 5), r"draft_tokens has shape \(2, 3\), and must have \(2, 2\)"),
        ((2, 3, 5), (1, 3), None, r"draft_tokens has shape \(1, 3\), and must have \(2, 2\)"),
        ((2, 3, 5), (2, 2), (2, 3, 5), "draft_logits has shape"),
    ],
)
def test_wrong_shapes_are_named(target: tuple[int, ...], drafts: tuple[int, ...], draft: Any, words: str) -> None:
    logits = None if draft is None else torch.zeros(draft)
    with pytest.raises(ValueError, match=words):
        osm.verify(torch.zeros(target), torch.zeros(drafts, dtype=torch.int64), logits)
    with pytest.raises(RuntimeError, match="draft_logits is on meta"):
        osm.verify(torch.zeros(2, 3, 5), torch.ones(2, 2).long(), torch.zeros(2, 2, 5, device="meta"))
    with pytest.raises(ValueError, match="temperature must be a number or have one for each row, of shape"):
        osm.verify(torch.zeros(2, 3, 5), torch.zeros(2, 2, dtype=torch.int64), temperature=torch.ones(3))
