"""Training with our softmax gives the losses of training with PyTorch's, eager and compiled."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

import onlinesoftmax as osm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

CURVE_RTOL = 1e-5
"""Relative tolerance of a loss: about a hundred units of float32's epsilon, 1.2e-7.

A mean of log-probabilities should differ by a few units.  The weights drift no faster, with one exception: softmax is
invariant to the biases of the keys, so the gradients of these biases are pure rounding error, and AdamW scales this
error to whole steps.  The loss is invariant to the same biases.
"""

WHOLE_CURVE_ATOL = 5e-5
"""Largest difference between two losses, in nats.

Rounding errors grow from step to step, and a GPU may sum in a different order each time.  On a CPU over 200 steps, the
losses with a float64 softmax differ from those with a float32 softmax by at most 5e-7.  With probabilities rounded to
bfloat16, they differ by up to 1e-4.
"""

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LEARNT = 2.7
"""Loss in nats that a trained model must reach.  A model of letter frequencies without context reaches 3.25."""


class Case(NamedTuple):
    """A library to compare with PyTorch, and the sizes of a short training."""

    library: Any
    config: Any
    steps: int


@pytest.fixture(params=["default", "triton"])
def case(example: ModuleType, request: pytest.FixtureRequest) -> Case:
    """The planner's choice, and the Triton kernels.  Without a GPU, the kernels run in Triton's interpreter."""
    tiny = example.Config(layers=2, heads=2, width=16, context=12, batch=3)
    if request.param == "default":
        return Case(example.OURS, tiny, 12)
    kernels = example.Library(
        "kernels",
        lambda scores, scale: osm.softmax(scores, scale=scale, causal=True, backend="triton"),
        partial(osm.log_softmax, backend="triton"),
    )
    # The interpreter takes about a second per step of this model.
    return Case(kernels, tiny, 12) if DEVICE == "cuda" else Case(kernels, tiny._replace(layers=1, batch=1), 3)


@pytest.mark.parametrize("compiler", [None, pytest.param("aot_eager", marks=pytest.mark.exhaustive)])
def test_the_loss_curves_agree(example: ModuleType, case: Case, compiler: str | None) -> None:
    ours = example.train(case.library, case.config, case.steps, device=DEVICE, compiler=compiler)
    theirs = example.train(example.TORCH, case.config, case.steps, device=DEVICE)
    assert ours.shape == (case.steps,)
    torch.testing.assert_close(ours, theirs, rtol=CURVE_RTOL, atol=0)


def test_both_trainings_start_equal_and_see_the_same_batches(example: ModuleType) -> None:
    config = example.Config(layers=1, heads=2, width=16, context=12, batch=3)
    ours, theirs = (example.make_model(library, config, 0, DEVICE) for library in (example.OURS, example.TORCH))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    read, following = example.batches(config, 5, 0, DEVICE)
    assert read.shape == following.shape == (5, 3, 12)
    assert torch.equal(read[..., 1:], following[..., :-1])
    again, _ = example.batches(config, 5, 0, DEVICE)
    assert torch.equal(again, read)


def test_letters_do_not_depend_on_later_letters(example: ModuleType) -> None:
    """The causal mask is part of our softmax: changing the later letters does not change the earlier activations."""
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
    assert "The largest difference between the two curves is" in printed
    assert example.main(["--steps", "1", "--device", DEVICE, "--library", "ours"]) == 0
    assert "PyTorch" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        example.main(["--steps", "0"])


@pytest.mark.gpu
@pytest.mark.parametrize("compiler", [pytest.param(None, id="eager"), pytest.param("inductor", id="compiled")])
# torch.compile warns about speed; the warnings do not concern the results.
@pytest.mark.filterwarnings("ignore:TensorFloat32", "ignore:(?s).*Online softmax is disabled")
def test_a_whole_training_on_a_gpu(example: ModuleType, compiler: str | None) -> None:
    ours, theirs = (
        example.train(library, example.Config(), 200, device="cuda", compiler=compiler)
        for library in (example.OURS, example.TORCH)
    )
    assert ours[-20:].mean() < LEARNT
    assert (ours - theirs).abs().max() < WHOLE_CURVE_ATOL
