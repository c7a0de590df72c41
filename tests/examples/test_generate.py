"""examples/generate.py writes the text of a loop without its cache and graph, and samples what its rows ask for."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

import pytest
import torch

if importlib.util.find_spec("transformers") is None:
    # importorskip would import transformers before the example sets HF_HUB_OFFLINE.
    pytest.skip("the example needs transformers", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def model(example: ModuleType) -> Any:
    """A model of 64 tokens that has hardly learned."""
    settings = example.Settings(vocabulary=64, width=32, batch=2, length=8, steps=2)
    return example.trained_model(example.training_text(64), settings, DEVICE)


def test_the_script_prints_texts_and_speeds(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--device", DEVICE, "--steps", "2", "--length", "5"]) == 0
    printed = capsys.readouterr().out
    assert printed.count(":\n  The value of a") == len(example.ROWS)
    assert "\n  sample() " in printed
    assert "\n  PyTorch " in printed


def log_probabilities(logits: torch.Tensor, row: Any) -> torch.Tensor:
    """Log-probabilities of a row of logits under its temperature and filters, in float64."""
    z = logits.double() / (row.temperature or 1e-6)
    top = z.topk(row.top_k or len(z)).values
    p = z.masked_fill(z < top[-1], -torch.inf).softmax(0)
    ordered = p.sort(descending=True).values
    last = int((ordered.cumsum(0) < row.top_p).sum().clamp(max=len(z) - 1))
    p = p.where((p >= ordered[last]) & (p >= row.min_p * p.max()), 0.0)
    return (p / p.sum()).log()


@pytest.mark.parametrize("sampler", ["ours", "by_pytorch"])
def test_the_log_probabilities_are_those_of_the_rows(example: ModuleType, model: Any, sampler: str) -> None:
    loop = example.Loop(model, [1, 2, 3], 6, example.ROWS, getattr(example, sampler))
    loop.run()
    with torch.no_grad():
        logits = model(loop.tokens, use_cache=False).logits
    for row, tokens, scores, found in zip(example.ROWS, loop.tokens, logits, loop.logprobs, strict=True):
        for at in range(3, 9):
            exact = log_probabilities(scores[at - 1], row)[tokens[at]]
            torch.testing.assert_close(found[at].double(), exact, rtol=1e-5, atol=1e-5)


def test_a_text_depends_on_its_own_row(example: ModuleType, model: Any) -> None:
    """The texts of a batch are those of its rows alone, and with another seed there is another text."""
    whole = example.Loop(model, [1, 2, 3], 6, example.ROWS, example.ours)
    whole.run()
    for row, tokens in zip(example.ROWS, whole.tokens, strict=True):
        alone = example.Loop(model, [1, 2, 3], 6, [row, row._replace(seed=99)], example.ours)
        alone.run()
        assert torch.equal(alone.tokens[0], tokens)
        assert torch.equal(alone.tokens[1], tokens) == (row.name == "greedy")


def test_another_text_without_the_cache_is_an_error(
    example: ModuleType, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "trained_model", lambda *_: model)
    monkeypatch.setattr(example, "without_cache", lambda model, loop: loop.tokens + 1)
    assert example.main(["--device", DEVICE, "--prompt", "the of", "--length", "3"]) == 1


def test_an_unknown_word_is_named(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        example.main(["--device", DEVICE, "--prompt", "The qwertz"])
    assert "--prompt: ' qwertz' is not in list" in capsys.readouterr().err


@pytest.mark.parametrize("given", [("--length", "0"), ("--steps", "-1"), ("--prompt", "")], ids=str)
def test_wrong_options_are_named(example: Any, given: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        example.main(given)
    assert given[0] in capsys.readouterr().err.splitlines()[-1]
