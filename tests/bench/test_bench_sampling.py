"""The suites of tokens: exact thresholds, every way that runs on a CPU, wrong ways."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmark measures torch tensors")

import torch
from bench_cases import CPU

from onlinesoftmax.lab.bench.kinds import run_kind
from onlinesoftmax.lab.bench.sampling.cases import ASKED, SAMPLE, TOPK, VERIFY, DecodeCase, TokenCase
from onlinesoftmax.lab.bench.sampling.decoding import make_decoder
from onlinesoftmax.lab.bench.sampling.measure import make_inputs, make_logits, threshold_of, wrong, wrong_drafts
from onlinesoftmax.lab.bench.sampling.peers import TOKEN_PEERS, OursTokens, TorchTokens

HERE = [peer("cpu") for name, peer in TOKEN_PEERS.items() if name != "compile" and peer("cpu").why_absent() is None]
CASES = [
    TokenCase(name, shape, len(shape) - 1, dtype, logits=logits, asked=asked)
    for name, shape in ((SAMPLE, (3, 1500)), (TOPK, (3, 1500)), (VERIFY, (20, 4, 300)))
    for asked, (dtype, logits) in zip(ASKED[name], cycle((("float32", "zipf"), ("bfloat16", "peaked"))), strict=False)
]  # fmt: skip
DRAFTS = TokenCase(VERIFY, (20, 4, 300), 2, "float32", asked="top-k 50")
ALL = TokenCase(SAMPLE, (3, 1500), 1, "float32", asked="all, top 20")


def test_thresholds_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    order = torch.tensor([[0.4, 0.3, 0.2, 0.06, 0.04]], dtype=torch.float64).log()
    for given, kept in (
        ({}, 5), ({"top_k": 3}, 3), ({"top_p": 0.65}, 2), ({"top_p": 0.75}, 3), ({"min_p": 0.6}, 2),
        ({"top_k": 2, "top_p": 0.57}, 1), ({"top_k": 2, "top_p": 0.58}, 2), ({"temperature": 0.0}, 1),
    ):  # fmt: skip
        monkeypatch.setitem(ASKED[SAMPLE], "these", given)
        case = TokenCase(SAMPLE, (1, 5), 1, "float32", asked="these")
        assert int((order >= threshold_of(case, order)).sum()) == kept, given


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.asked} {case.dtype}")
def test_every_way_on_a_cpu_is_right_or_refuses(case: TokenCase) -> None:
    # XLA compiles for a second, so JAX runs two cases.
    everybody = [peer for peer in HERE if peer.name != "jax" or case.asked in ("all, top 20", "k 20")]
    (found,) = run_kind("token time", [case], [OursTokens("cpu"), *everybody], CPU, 1)
    assert set(found.yardsticks) == {"one read"}
    assert [(result.who, result.status) for result in found.results if result.status != "ok"] == []
    for result in found.results:
        assert result.of_read is not None
        assert result.of_read > 0


def test_peaked_rows_have_one_token_and_zipf_rows_have_a_tail() -> None:
    case = TokenCase(SAMPLE, (4, 1 << 16), 1, "float32", logits="peaked", asked="none")
    assert make_logits(case, CPU).softmax(-1).amax() > 0.999
    p = make_logits(replace(case, logits="zipf"), CPU).softmax(-1).sort(descending=True).values
    assert (p[:, 0] < 0.9).all()
    assert p[:, :100].sum(-1).diff().amin() > 0


class Late(TorchTokens):
    """The token with the smallest score."""

    name = "late"

    def forward(self, case: TokenCase) -> Any:
        return lambda x: (x.argmin(-1),)


def test_a_token_that_is_not_kept_has_no_time() -> None:
    (found,) = run_kind("token time", [replace(ALL, asked="top-k 50")], [OursTokens("cpu"), Late("cpu")], CPU, 1)
    late = found.results[1]
    assert (late.status, late.reason, late.times) == ("wrong", "3 of 3 tokens are not kept", None)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_step_of_decoding_samples_from_the_logits_of_the_decoder(device: str) -> None:
    case = DecodeCase(SAMPLE, (3, 500), 1, "bfloat16", asked="top-k 50", hidden=32, layers=1)
    where, everybody = torch.device(device), [OursTokens(device), TorchTokens(device), Late(device)]
    (found,) = run_kind("decoding time", [case], everybody, where, 1)
    assert [result.status for result in found.results] == ["ok", "ok", "wrong"]
    assert all(result.times for result in found.results[:2])
    decode = make_decoder(case, where)
    first = decode()
    before = first.clone()
    # A call reads its weights, whatever is allocated after them.
    others = [torch.full((1 << 16,), 1 << 40, device=where) for _ in range(20)]
    assert 0.5 < before.float().std() < 2
    assert decode() is first
    assert torch.equal(first, before)
    del others


def test_ours_has_to_be_exact() -> None:
    x, ours = make_logits(ALL, CPU), OursTokens("cpu")
    seed, found = ours.seeds(ALL), ours.prepare(ALL)(x)
    assert wrong(ALL, x, found, seed)[0] is None
    for field, value, words in (
        ("token", found.top_tokens[:, 3], "another token"), ("kept", found.kept + 1, "another number of tokens"),
        ("logprob", found.logprob + 1e-4, "log-probability: error 1.0e-04"),
        ("top_logprobs", found.top_logprobs * 1.001, "log-probability: error"),
    ):  # fmt: skip
        reason = wrong(ALL, x, found._replace(**{field: value}), seed)[0]
        assert words in str(reason), field
    k = replace(ALL, operation=TOPK, asked="k 20")
    best = ours.prepare(k)(x)
    assert wrong(k, x, tuple(best), seed)[0] is None
    assert wrong(k, x, (best.values, best.indices.flip(1)))[0] == "the 20 largest are others"


def test_our_drafts_have_to_be_exact() -> None:
    _, inputs = make_inputs(DRAFTS, CPU)
    ours = OursTokens("cpu")
    seed, found = ours.seeds(DRAFTS), ours.prepare(DRAFTS)(*inputs)
    # Some rows have all drafts, some have none, and some have a part of them.
    assert found.accepted.unique().tolist() == [0, 1, 2, 3]
    assert wrong_drafts(DRAFTS, *inputs, found, seed)[0] is None
    for field, value, words in (
        ("accepted", 3 - found.accepted, "rows have other tokens"), ("tokens", found.tokens.flip(0), "rows have other"),
        ("logprobs", found.logprobs - 1e-4, "log-probability: error 1.0e-04"),
    ):  # fmt: skip
        reason = wrong_drafts(DRAFTS, *inputs, found._replace(**{field: value}), seed)[0]
        assert words in str(reason), field


def test_drafts_of_others_have_to_be_possible() -> None:
    _, inputs = make_inputs(DRAFTS, CPU)
    target, drafts, _ = inputs
    accepted, tokens = TorchTokens("cpu").prepare(DRAFTS)(*inputs)
    assert wrong_drafts(DRAFTS, *inputs, (accepted, tokens))[0] is None
    place = accepted.unsqueeze(1)
    unlikely = target.argmin(-1).gather(1, place)
    all_stay = torch.full_like(accepted, 3), torch.cat([drafts, target[:, 3:].argmin(-1)], 1)
    for found in (
        (accepted, tokens.scatter(1, place, unlikely)), (accepted, tokens.scatter(1, place, -1)), all_stay,
        (accepted, tokens.clamp(min=0)), (3 - accepted, tokens),
    ):  # fmt: skip
        assert "rows have tokens that no draw gives" in str(wrong_drafts(DRAFTS, *inputs, found)[0])
