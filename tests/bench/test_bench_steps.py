"""The suite of training steps: each way finds the loss of the decoder."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmark measures torch tensors")

import torch
from bench_cases import CPU

from onlinesoftmax.lab.bench.heads.cases import POLICY, TRAINING, StepCase
from onlinesoftmax.lab.bench.heads.step_peers import CLIP, OursOnLogits, OursStep, TorchStep, clipped
from onlinesoftmax.lab.bench.heads.steps import make_batch, make_decoder
from onlinesoftmax.lab.bench.kinds import run_kind

CASES = [StepCase(name, (96, 32, 300), 2, "bfloat16", (), True, layers=1) for name in (TRAINING, POLICY)]


class NoGradient(TorchStep):
    """A way whose loss is right, and whose head has no gradient."""

    name = "frozen"

    def forward(self, case: Any) -> Any:
        """The loss, with a gradient of 0 for the head."""
        loss = super().forward(case)
        return lambda x, weight, *given: loss(x, weight.detach(), *given) + 0 * weight.sum()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.operation)
def test_every_way_finds_the_loss_of_the_decoder(case: StepCase) -> None:
    everybody = [OursStep("cpu"), OursOnLogits("cpu"), TorchStep("cpu"), NoGradient("cpu"), TorchStep("cpu")]
    (found,) = run_kind("step time", [case], everybody, CPU, 1)
    assert [result.status for result in found.results] == ["ok", "ok", "ok", "wrong", "ok"]
    assert found.results[3].reason == "gradient of the head: error 1.0e+00, allowed 3.1e-02"
    assert all(result.times for result in found.results if result.status == "ok")


def test_a_token_sees_no_later_one() -> None:
    case = CASES[0]
    decoder = make_decoder(case, CPU)
    tokens, target, _ = make_batch(case, decoder, CPU)
    assert torch.equal(target[:-1], tokens.flatten()[1:])
    with torch.no_grad():
        before = decoder(tokens)
        tokens[:, 50] += 1 - 2 * (tokens[:, 50] > 100)
        changed = (decoder(tokens) != before).any(1)
    assert changed[50]
    assert not changed[:50].any()
    assert sum(weight.numel() for weight in decoder.parameters()) == pytest.approx(case.parameters, rel=0.01)


def test_one_token_in_eight_of_a_policy_is_clipped() -> None:
    """The loss of these tokens is flat where their advantage is positive, and no ratio lies at the edge."""
    decoder = make_decoder(CASES[1], CPU)
    batch = make_batch(CASES[1], decoder, CPU)
    advantage, old = batch.per_token
    with torch.no_grad():
        logits = decoder(batch.tokens).float() @ decoder.head.float().t()
    logprob = torch.log_softmax(logits, -1).gather(1, batch.target[:, None])[:, 0].requires_grad_()
    clipped(logprob, None, None, advantage, old).sum().backward()
    outside = (logprob - old).exp() > 1 + CLIP
    assert outside.sum() == len(old) / 8
    assert ((logprob - old).exp() - 1).abs()[~outside].max() < CLIP - 0.05
    assert logprob.grad is not None
    assert torch.equal(logprob.grad == 0, outside & (advantage > 0))
