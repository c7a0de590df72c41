"""examples/policy_gradient.py learns, and its objective has the gradient of PyTorch's operations."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import pytest
import torch

import onlinesoftmax as osm
from onlinesoftmax.core.task import Choice
from onlinesoftmax.linear import rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_the_script_learns_and_checks_itself(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--device", DEVICE, "--batches", "12"]) == 0
    printed = capsys.readouterr().out
    for name in ("PyTorch", "token_logprobs()", "linear_token_loss()"):
        assert f"\n{name} " in printed


def test_the_policy_finds_the_right_tokens(example: ModuleType) -> None:
    curve = example.train(example.without_logits, example.Settings(batches=12), DEVICE)
    assert curve[0] == pytest.approx(1 / example.Settings().vocabulary)
    assert curve[-1] > 0.9


@pytest.mark.parametrize("way", ["on_logits", "without_logits"])
def test_kernels_give_the_gradient_of_pytorch(example: ModuleType, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Triton kernels; without a GPU, they run in Triton's interpreter.  A bound of memory makes two chunks."""
    pytest.importorskip("triton", reason="the kernels are forced")
    settings = example.Settings(prompts=2, samples=4)
    monkeypatch.setattr(osm, "token_logprobs", partial(osm.token_logprobs, backend="triton"))
    monkeypatch.setattr(rows, "why_not_kernels", lambda *_: None)
    monkeypatch.setattr(rows, "CHOICE", Choice("triton"))
    monkeypatch.setattr(example, "MEMORY", 4 * settings.vocabulary * 4)
    # A gradient is a sum of some dozen terms, each with a few float32 roundings of 6e-8.
    assert example.gradient_difference(getattr(example, way), settings, DEVICE) < 1e-5
