"""Calls that `override` takes: every spelling of the softmax functions, and cross-entropy."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from spellings import BACKEND, DEVICE, ON_CPU, SPELLINGS, Function, cases, sample
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import onlinesoftmax as osm
from onlinesoftmax.overrides import Report
from onlinesoftmax.overrides.table import REPLACEMENTS


@pytest.mark.parametrize(("name", "call"), cases(SPELLINGS))
def test_every_spelling_is_taken(name: str, call: Function, ours: list[str]) -> None:
    x = sample()
    expected = call(x)
    with osm.override(backend=BACKEND) as mode:
        found = call(x)
    torch.testing.assert_close(found, expected)
    assert mode.report() == Report({name: 1}, {})
    assert ours == [name]


@pytest.mark.parametrize(("name", "call"), cases(SPELLINGS))
def test_pytorch_runs_on_a_cpu_by_default(name: str, call: Function, ours: list[str]) -> None:
    x = sample().cpu()
    expected = call(x)
    with osm.override() as mode:
        found = call(x)
    assert torch.equal(found, expected)
    assert mode.report() == Report({}, {(name, ON_CPU): 1})
    assert ours == []


def test_every_replaced_function_has_a_spelling_above() -> None:
    seen = set()

    class Record(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(func)
            return func(*args, **(kwargs or {}))

    with Record():
        for calls in SPELLINGS.values():
            for call in calls:
                call(sample())
    assert seen >= set(REPLACEMENTS) - {functional.cross_entropy}


def test_a_forced_backend_that_cannot_run_is_an_error() -> None:
    with pytest.raises(osm.PlanError, match="cuda/row: "), osm.override(backend="cuda"):
        torch.softmax(sample().cpu(), 1)


@pytest.mark.parametrize("backend", [BACKEND, "eager"])
@pytest.mark.parametrize("rows", [0, 2])
def test_every_function_is_taken_by_a_forced_backend(backend: str | None, rows: int) -> None:
    x, target = sample(2, 3)[:rows], torch.tensor([0, 1], device=DEVICE)[:rows]

    def results() -> list[torch.Tensor]:
        loss = functional.cross_entropy(x, target, reduction="sum")
        return [torch.softmax(x, 1), torch.log_softmax(x, 1), torch.logsumexp(x, 1), loss]

    want = results()
    with osm.override(backend=backend, strict=True) as mode:
        found = results()
    torch.testing.assert_close(found, want)
    assert mode.report() == Report(dict.fromkeys(("softmax", "log_softmax", "logsumexp", "cross_entropy"), 1), {})


def test_cross_entropy() -> None:
    """The function and the module are taken; calls that only PyTorch computes are left, with their reasons."""
    x, target = sample(2, 3), torch.tensor([0, 1], device=DEVICE)
    weight = torch.tensor([1.0, 2.0, 0.5], dtype=x.dtype, device=DEVICE)
    module = torch.nn.CrossEntropyLoss(weight, ignore_index=0, label_smoothing=0.5)
    want = module(x, target), functional.cross_entropy(x, target, weight, None, -100, None, "sum", 0.1)
    probabilities = functional.cross_entropy(x, x.softmax(1))
    with osm.override(strict=True) as outer, osm.override(backend=BACKEND) as mode:
        found = module(x, target), functional.cross_entropy(x, target, weight, None, -100, None, "sum", 0.1)
    torch.testing.assert_close(found, want)
    assert mode.report() == Report({"cross_entropy": 2}, {})
    assert outer.report() == Report({}, {})
    with osm.override(backend=BACKEND) as mode, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.testing.assert_close(functional.cross_entropy(x, x.softmax(1)), probabilities)
        functional.cross_entropy(x, target, reduce=False)
    reasons = {reason for name, reason in mode.report().left if name == "cross_entropy"}
    assert reasons == {
        "the targets are class probabilities, for which there is no kernel",
        "reduce is deprecated, and our function does not have it",
    }
    with osm.override(backend=BACKEND, strict=True), pytest.raises(RuntimeError, match="class probabilities"):
        functional.cross_entropy(x, x.softmax(1))
