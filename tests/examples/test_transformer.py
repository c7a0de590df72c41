"""A training with our softmax is a training with PyTorch's: same gradients, same losses, eager and compiled."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from scripts import load

import onlinesoftmax as osm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMPILERS = [pytest.param(None, id="eager"), pytest.param("aot_eager", id="compiled")]

CURVE_RTOL = 1e-5
"""A few units of float32's 1.2e-7 are expected of a mean of log-probabilities; a hundred are allowed.

Weights drift no faster, but for the biases of the keys: softmax cannot see them, so their gradients are rounding
alone, which AdamW blows up to whole steps.  For the same reason the loss cannot see them either.
"""

GRADIENT_RTOL = 2e-6
"""Of the norm of each parameter's gradient: float32's 6e-8 for each of some dozens of roundings on the way."""

WHOLE_CURVE_ATOL = 5e-5
"""In nats.  Rounding is amplified from step to step, and a GPU may sum in another order each time.

On a CPU, 200 steps with the softmax in float64 are never more than 5e-7 from those in float32; with probabilities
rounded to bfloat16 they are up to 1e-4 away.
"""

LEARNT = 2.7
"""In nats.  Who knows the frequencies of the letters, and no context, is left with 3.25."""


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """examples/transformer.py, which is no part of the package."""
    return load(Path(__file__).parents[2] / "examples" / "transformer.py")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """What was compiled before counts against the limit of recompilations."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Case(NamedTuple):
    """A library to compare with PyTorch, and a training short enough for it."""

    library: Any
    config: Any
    steps: int


@pytest.fixture(params=["default", "triton"])
def case(example: ModuleType, request: pytest.FixtureRequest) -> Case:
    """What the planner chooses, and the kernels: by themselves on a GPU, in Triton's interpreter elsewhere."""
    tiny = example.Config(layers=2, heads=2, width=16, context=12, batch=3)
    if request.param == "default":
        return Case(example.OURS, tiny, 12)
    kernels = example.Library(
        "kernels",
        lambda scores, scale: osm.softmax(scores, scale=scale, causal=True, backend="triton"),
        partial(osm.log_softmax, backend="triton"),
    )
    # The interpreter takes about a second for a step of this.
    return Case(kernels, tiny, 12) if DEVICE == "cuda" else Case(kernels, tiny._replace(layers=1, batch=1), 3)


def first_gradients(example: ModuleType, library: Any, config: Any, compiler: str | None) -> dict[str, torch.Tensor]:
    """The gradient of each parameter in the first step of a training."""
    model = example.make_model(library, config, 0, DEVICE)
    loss_of = model if compiler is None else torch.compile(model, backend=compiler, fullgraph=True)
    read, following = example.batches(config, 1, 0, DEVICE)
    loss_of(read[0], following[0]).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_loss_curves_agree(example: ModuleType, case: Case, compiler: str | None) -> None:
    ours = example.train(case.library, case.config, case.steps, device=DEVICE, compiler=compiler)
    theirs = example.train(example.TORCH, case.config, case.steps, device=DEVICE)
    assert ours.shape == (case.steps,)
    torch.testing.assert_close(ours, theirs, rtol=CURVE_RTOL, atol=0)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_first_gradients_agree(example: ModuleType, case: Case, compiler: str | None) -> None:
    ours = first_gradients(example, case.library, case.config, compiler)
    for name, theirs in first_gradients(example, example.TORCH, case.config, None).items():
        apart = torch.linalg.vector_norm(ours[name] - theirs) / torch.linalg.vector_norm(theirs)
        assert apart <= GRADIENT_RTOL, f"{name}: {apart:.1e}"


def test_both_see_the_same_and_begin_alike(example: ModuleType) -> None:
    config = example.Config(layers=1, heads=2, width=16, context=12, batch=3)
    ours, theirs = (example.make_model(library, config, 0, DEVICE) for library in (example.OURS, example.TORCH))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    read, following = example.batches(config, 5, 0, DEVICE)
    assert read.shape == following.shape == (5, 3, 12)
    assert torch.equal(read[..., 1:], following[..., :-1])
    again, _ = example.batches(config, 5, 0, DEVICE)
    assert torch.equal(again, read)


def test_no_letter_sees_those_after_it(example: ModuleType) -> None:
    """The mask is ours to apply: the loss of the first letters is that of a shorter text."""
    config = example.Config(layers=2, heads=2, width=16, context=12, batch=3)
    model = example.make_model(example.OURS, config, 0, DEVICE)
    read, _ = example.batches(config, 1, 0, DEVICE)
    scrambled = read[0].clone()
    scrambled[:, 6:] = scrambled[:, 6:].flip(-1)
    hidden, other = (model.blocks(model.letter(x) + model.place.weight) for x in (read[0], scrambled))
    torch.testing.assert_close(hidden[:, :6], other[:, :6])
    assert not torch.allclose(hidden[:, 6:], other[:, 6:])


def test_the_command_line(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--steps", "3", "--device", DEVICE]) == 0
    printed = capsys.readouterr().out
    assert "The largest difference of the two curves is" in printed
    assert example.main(["--steps", "1", "--device", DEVICE, "--library", "ours"]) == 0
    assert "PyTorch" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        example.main(["--steps", "0"])


@pytest.mark.gpu
@pytest.mark.parametrize("compiler", [pytest.param(None, id="eager"), pytest.param("inductor", id="compiled")])
# Advice of torch.compile's about speed, none of which is about what is compared.
@pytest.mark.filterwarnings("ignore:TensorFloat32", "ignore:(?s).*Online softmax is disabled")
def test_a_whole_training_on_a_gpu(example: ModuleType, compiler: str | None) -> None:
    ours, theirs = (
        example.train(library, example.Config(), 200, device="cuda", compiler=compiler)
        for library in (example.OURS, example.TORCH)
    )
    assert ours[-20:].mean() < LEARNT
    assert (ours - theirs).abs().max() < WHOLE_CURVE_ATOL
