"""The suite of training steps: each way finds the loss of the decoder, and a record has its speed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmark measures torch tensors")

import torch
from bench_cases import CPU, recorded, refused

from onlinesoftmax.lab.bench.heads.step_cases import StepCase
from onlinesoftmax.lab.bench.heads.step_peers import OursOnLogits, OursStep, TorchStep
from onlinesoftmax.lab.bench.heads.steps import make_batch, make_decoder, run_steps

CASE = StepCase("linear_cross_entropy", (96, 32, 300), 2, "bfloat16", (), True, layers=1)


class NoGradient(TorchStep):
    """A way whose loss is right, and whose head has no gradient."""

    name = "frozen"

    def prepare(self, case: Any) -> Any:
        """The loss, with a gradient of 0 for the head."""
        loss = super().prepare(case)
        return lambda x, weight, target: loss(x, weight.detach(), target) + 0 * weight.sum()


def test_every_way_finds_the_loss_of_the_decoder() -> None:
    everybody = [OursStep("cpu"), OursOnLogits("cpu"), TorchStep("cpu"), NoGradient("cpu"), TorchStep("cpu")]
    (found,) = run_steps([CASE], everybody, CPU, 1)
    assert [result.status for result in found.results] == ["ok", "ok", "ok", "wrong", "ok"]
    assert found.results[3].reason == "gradient of the head: error 1.0e+00, allowed 3.1e-02"
    assert all(result.times for result in found.results if result.status == "ok")


def test_a_token_sees_no_later_one() -> None:
    decoder, (tokens, target) = make_decoder(CASE, CPU), make_batch(CASE, CPU)
    assert torch.equal(target[:-1], tokens.flatten()[1:])
    with torch.no_grad():
        before = decoder(tokens)
        tokens[:, 50] += 1 - 2 * (tokens[:, 50] > 100)
        changed = (decoder(tokens) != before).any(1)
    assert changed[50]
    assert not changed[:50].any()
    assert sum(weight.numel() for weight in decoder.parameters()) == pytest.approx(CASE.parameters, rel=0.01)


def test_the_suite_writes_a_record(tmp_path: Path) -> None:
    asked = ("--suite", "training-step", "--quick", "--peers", "torch")
    printed, table = recorded(tmp_path / "steps.json", "step time", "", *asked)
    assert "64x32 -> 1000, 1 layers" in printed
    assert table.header[3:6] == ("who", "time ms", "tokens/s")


def test_wrong_arguments_of_the_suite() -> None:
    refused(
        "training-step",
        (("--shape", "4x8"), "needs three sizes, tokens x hidden x classes"),
        (("--shape", "3000x8x9"), "a multiple of 2048 tokens, or fewer, got 3000"),
        (("--peers", "jax"), "unknown peer 'jax'; there are: ours-compile"),
    )
