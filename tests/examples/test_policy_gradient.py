"""examples/policy_gradient.py learns, and checks that its gradients are those of PyTorch's operations."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

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
