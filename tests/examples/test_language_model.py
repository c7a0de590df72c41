"""The language model has the curve of PyTorch's loss, with our kernels too, and its script prints, plots and checks."""

from __future__ import annotations

import importlib.util
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from scripts import load

import onlinesoftmax as osm
from onlinesoftmax.core.task import Choice
from onlinesoftmax.linear import rows

for name in ("transformers", "typer", "rich", "matplotlib"):
    # importorskip would import transformers before the example sets HF_HUB_OFFLINE.
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"the example needs {name}", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = ("--quick", "--steps", "4", "--batch", "1", "--length", "8", "--vocabulary", "48")
NAMES = ["PyTorch", "override()", "cross_entropy()", "without-logits"]


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """The module examples/language_model.py, which is not part of the package."""
    examples = Path(__file__).parents[2] / "examples"
    with pytest.MonkeyPatch.context() as patch:
        # A script finds the modules beside it.
        patch.syspath_prepend(examples)
        yield load(examples / "language_model.py")


def run(example: ModuleType, *arguments: str) -> Any:
    """Run the command line in this process."""
    from typer.testing import CliRunner

    return CliRunner().invoke(example.app, list(arguments))


def test_the_script_trains_on_the_cpu_without_a_network(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the example opened a connection"))
    monkeypatch.setattr(example, "SAMPLES", 3)
    plot = tmp_path / "curves.png"
    done = run(example, *TINY, "--device", "cpu", "--attention", "eager", "--plot", str(plot))
    assert done.exit_code == 0, done.output
    assert plot.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")

    table = re.findall(r"^(\S+) +([\d.]+) +([\d,]+) +not measured +([\d.]+) *(\S*) *$", done.output, re.MULTILINE)
    assert [row[0] for row in table] == NAMES
    assert [row[4] for row in table[:3]] == ["", "0.0e+00", "0.0e+00"]
    assert float(table[3][4]) < 1e-6
    for _, milliseconds, speed, loss, _ in table:
        # The speed is printed as a whole number, which a busy machine makes small.
        assert float(speed.replace(",", "")) == pytest.approx(8e3 / float(milliseconds), rel=0.01, abs=0.51)
        assert loss == table[0][3]
    assert "softmax: PyTorch ran 4 calls: input is on the CPU" in done.output
    assert "cross_entropy: PyTorch ran 4 calls: input is on the CPU" in done.output
    assert "All trainings ran PyTorch's operations" in done.output
    errors = re.findall(r"^(\S+) +(\d\S+e-\d+) +(\d\S+e-\d+|no logits) +(\d\S+e-\d+)$", done.output, re.MULTILINE)
    assert [row[0] for row in errors] == [*NAMES, "allowed"]
    assert errors[1][1:] == errors[2][1:] == errors[0][1:]
    assert errors[3][2] == "no logits"
    assert done.output.endswith("The losses agree with PyTorch's.\n")


def settings(example: ModuleType, device: str = DEVICE, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny training of two steps."""
    size = example.Size(layers=1, width=16, vocabulary=48, batch=1, length=8, steps=2)
    return example.Settings(size, device, dtype, "eager", 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_pass_both_checks(example: ModuleType, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forces the Triton kernels.  Without a GPU, they run in Triton's interpreter."""

    def kernels(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        logits = model(tokens).logits.flatten(0, 1)
        return osm.cross_entropy(logits, targets.flatten(), inplace_backward=True, backend="triton")

    mode = osm.override(backend="triton", strict=True)
    transformers = example.loss_of_transformers
    losses = transformers, transformers, kernels, example.our_loss_without_logits
    monkeypatch.setattr(rows, "why_not_kernels", lambda *_: None)
    monkeypatch.setattr(rows, "CHOICE", Choice("triton"))
    ways = [example.Way(*way) for way in zip(NAMES, losses, strict=True)]
    ways[1] = ways[1]._replace(block=mode)
    how = settings(example, dtype=dtype)
    results = {way.name: example.train(way, how, {1}) for way in ways}
    assert mode.report().taken == {"softmax": 2, "cross_entropy": 2}
    rounding, right = example.same_errors(results, ways, how)
    assert right
    assert example.same_curves(results, ways, how, rounding)[1]


def factor(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
    """PyTorch's loss, and 1.01 times its gradient."""
    loss = model(tokens, labels=tokens).loss
    return loss + 0.01 * (loss - loss.detach())


def element(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
    """PyTorch's loss, and its gradient with a 0 for one logit."""
    logits = model(tokens).logits.clone()
    one = torch.arange(logits.numel(), device=logits.device).view_as(logits) == 5
    logits.register_hook(lambda gradient: gradient.masked_fill(one, 0))
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def rounded(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
    """PyTorch's loss rounded to bfloat16, which does not change the gradient."""
    return model(tokens, labels=tokens).loss.bfloat16()


def nothing(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
    """NaN."""
    return model(tokens, labels=tokens).loss * torch.nan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_losses_fail_at_the_same_weights(example: ModuleType, dtype: torch.dtype) -> None:
    how = settings(example, "cpu", dtype)
    losses = (example.loss_of_transformers, factor, element, rounded, nothing)
    ways = [example.Way(loss.__name__, loss) for loss in losses]
    found = list(example.errors_at({0: example.make_model(how).state_dict()}, ways, how).values())
    allowed = found[0].allowed(dtype)
    assert [errors.within(allowed) for errors in found] == [True, False, False, False, False]
    assert found[1].logits == pytest.approx(0.01, rel=0.5)
    assert found[2].logits == pytest.approx(1, rel=0.01)


def test_a_curve_may_differ_as_far_as_curves_that_round_differently(example: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    center = torch.linspace(4, 3, 50, dtype=torch.float64)
    # Rounding moves a curve further from step to step.
    apart = torch.logspace(-6, -2, 50, dtype=torch.float64) * torch.randn(9, 50, generator=generator).double()
    samples = example.Samples(center, center + apart[:8])
    allowed = samples.allowed()
    assert samples.distances().mean() < 1 < allowed < 2
    assert samples.distance(center + apart[8]) <= allowed
    assert samples.distance(center + 10 * apart[8]) > allowed
    assert not samples.distance(center + torch.nan) <= allowed
    same = {name: example.Result(center, 1.0, None, {}) for name in NAMES[:2]}
    assert example.same_curves(same, [example.Way(name, nothing) for name in same], None, 0.0) == (None, True)


def test_a_wrong_loss_is_an_error(example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "our_loss", nothing)
    monkeypatch.setattr(example, "SAMPLES", 2)
    plot = tmp_path / "curves.png"
    done = run(example, *TINY, "--device", "cpu", "--plot", str(plot))
    assert done.exit_code == 1
    assert "Error: at the same weights, a loss or a gradient is further off than allowed.\n" in done.output
    assert "Error: a loss curve is further from PyTorch's than rounding explains.\n" in done.output
    assert plot.exists()


def test_rare_words_share_a_class_and_targets_follow_their_tokens(example: ModuleType) -> None:
    few, occurring = example.corpus(48)
    assert occurring == 48
    assert 0 < (few == 0).double().mean() < 0.7
    size = example.Size(layers=1, width=16, vocabulary=48, batch=3, length=8, steps=5)
    tokens, targets = example.batches(example.Settings(size, "cpu", torch.float32, "sdpa", 0))
    assert tokens.shape == targets.shape == (5, 3, 8)
    assert torch.equal(targets[..., :-1], tokens[..., 1:])
    assert (targets[..., -1] == -100).all()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--steps", "1"], "Invalid value for '--steps': "),
        (["--vocabulary", "1"], "Invalid value for '--vocabulary': "),
        (["--dtype", "int8"], "Invalid value for '--dtype': "),
        (["--plot", "nowhere/curves.png"], "Invalid value for '--plot': The folder 'nowhere' does not exist or "),
        (["--plot", "curves.svg"], "Invalid value for '--plot': 'curves.svg' does not end in .png."),
        pytest.param(
            ["--device", "cuda"],
            "Invalid value for '--device': PyTorch finds no CUDA device here.",
            marks=pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU"),
        ),
    ],
)
def test_wrong_arguments_are_named_before_anything_is_trained(
    example: ModuleType, arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(example, "train", lambda *_: pytest.fail("trained"))
    done = run(example, *arguments)
    assert done.exit_code == 2
    assert sentence in done.output
    assert list(tmp_path.iterdir()) == []
