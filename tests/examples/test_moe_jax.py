"""The mixture of experts learns through its gate, balances its experts, and runs as a script."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

for name in ("jax", "flax", "optax", "typer", "sklearn", "matplotlib"):
    # importorskip would import them in every process that collects tests: flax and scikit-learn take seconds.
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"the example needs {name}", allow_module_level=True)

import jax  # noqa: E402  only where jax is installed

EXAMPLE = Path(__file__).parents[2] / "examples" / "moe_jax.py"

NARROW = {"hidden": 1, "epochs": 15, "learning_rate": 1e-2}
"""Experts with one hidden unit: two of them cannot separate ten digits, so the accuracy depends on the gate."""

LEARNT = 0.78
"""Accuracy that training must reach.  For seeds 0 to 5, working gates reach 0.84 to 0.92, broken ones 0.10 to 0.68."""

RTOL = 2e-6
"""Some dozens of float32 roundings of 6e-8 each."""


def train(example: ModuleType, library: Any, **config: Any) -> tuple[Any, list[Any]]:
    """Train a model and return it with the measurements of each epoch."""
    model = example.MoE(example.Config(**config), library)
    return model, list(example.train(model, example.handwritten_digits()[0]))


def accuracy(example: ModuleType, model: Any) -> float:
    """Compute the fraction of test images that the model classifies correctly."""
    test = example.handwritten_digits()[1]
    return float(example.evaluate(model, test)[0]) / len(test.images)


def test_a_short_training_learns_through_its_gate(example: ModuleType) -> None:
    model, epochs = train(example, example.OURS, **NARROW)
    assert accuracy(example, model) >= LEARNT
    assert epochs[-1].loss < epochs[0].loss / 2
    assert all(epoch.use.shape == (8,) and np.isclose(epoch.use.sum(), example.TOP_K) for epoch in epochs)
    assert epochs[-1].use.min() > 0.05, "load balancing leaves no expert idle"


def test_a_training_depends_only_on_its_seed(example: ModuleType) -> None:
    config = NARROW | {"epochs": 1}
    (first,), (again,), (other,) = (train(example, example.OURS, **config, seed=seed)[1] for seed in (3, 3, 4))
    assert first.loss == again.loss
    np.testing.assert_array_equal(first.use, again.use)
    assert first.loss != other.loss


def test_noise_changes_in_every_step_and_only_in_training(example: ModuleType) -> None:
    from flax import nnx

    model, images = example.MoE(example.Config(hidden=1)), example.handwritten_digits()[1].images
    route = nnx.jit(lambda model, rngs: model(images, rngs).routed)
    rngs = nnx.Rngs(noise=0)
    noisy, noisier, quiet, quiet_again = (np.asarray(route(model, r)) for r in (rngs, rngs, None, None))
    assert (noisy != quiet).any()
    assert (noisy != noisier).any()
    np.testing.assert_array_equal(quiet, quiet_again)


def test_load_balancing_loss_is_1_for_even_use_and_larger_otherwise(example: ModuleType) -> None:
    model, images = example.MoE(example.Config(hidden=1)), np.eye(64, dtype=np.float32)

    def loss(first: np.ndarray, second: np.ndarray) -> float:
        """Compute the loss of 64 one-pixel images; image i is routed to experts first[i] and second[i]."""
        model.gate.kernel[...] = 100 * (2 * jax.nn.one_hot(first, 8) + jax.nn.one_hot(second, 8))
        return float(model(images).load_balancing_loss)

    each, none = np.arange(64) % 8, np.zeros(64, int)
    assert loss(each, (each + 1) % 8) == pytest.approx(1, rel=RTOL)
    assert loss(none, none + 1) == pytest.approx(8 / 2, rel=RTOL)
    assert 1 < loss(each // 2, each // 2 + 1) < 4


@pytest.mark.early
def test_the_script_as_a_user_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--epochs", "2", "--experts", "4", "--plot", "use.png"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert (tmp_path / "use.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("1437 training images, 360 test images; Config(experts=4, ")
    assert [line.split(":")[0] for line in rest if line.startswith("epoch")] == ["epoch   1 of 2", "epoch   2 of 2"]
    table = [line.split() for line in rest[rest.index("") + 2 :][:4]]
    assert [row[0] for row in table] == ["1", "2", "3", "4"]
    assert sum(float(row[1].rstrip("%")) for row in table) == pytest.approx(200, abs=0.3)
    assert rest[-2].startswith("test accuracy ")
    assert rest[-2].endswith(" s for compilation and training")
    assert rest[-1] == "plot of the loss and the use of the experts: use.png"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--experts", "1"], "Invalid value for '--experts': "),
        (["--epochs", "0"], "Invalid value for '--epochs': "),
        (["--noise", "-0.1"], "Invalid value for '--noise': "),
        (["--balance", "much"], "Invalid value for '--balance': "),
        (["--plot", "nowhere/use.png"], "Invalid value for '--plot': The folder 'nowhere' does not exist or "),
        (["--plot", "use.svg"], "Invalid value for '--plot': 'use.svg' does not end in .png."),
    ],
)
def test_wrong_arguments_are_named_before_anything_is_trained(
    example: ModuleType, arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(example, "train", lambda *_: pytest.fail("trained"))
    result = CliRunner().invoke(example.app, arguments)
    assert result.exit_code == 2
    assert sentence in result.output
    assert list(tmp_path.iterdir()) == []
