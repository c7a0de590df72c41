"""The check of gradients: it covers every operation, and a wrong gradient fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the check compares with PyTorch")

import torch

from onlinesoftmax import api
from onlinesoftmax.lab import verify as verification
from onlinesoftmax.ops import OPERATIONS
from pairs import rest_exhaustive

FORWARD = ["softmax", "log_softmax", "logsumexp"]


def check(name: str, **how: Any) -> verification.Cell:
    """The one cell of the eager backend."""
    how = {"dtypes": ["float32"], "quick": True} | how
    (cell,) = verification.verify(backends=["eager"], operations=[f"{name}_backward"], **how)
    return cell


def test_a_quick_check_covers_every_operation() -> None:
    assert set(verification.QUICK_GRADIENTS) <= {case.name for case in verification.CASES}
    cells = verification.verify(backends=["eager"], quick=True)
    assert {cell.operation for cell in cells} == set(OPERATIONS)
    assert {cell.result for cell in cells} == {"pass"}
    assert {cell.dtype for cell in cells if cell.operation == "softmax_backward"} == {"bfloat16", "float32"}
    assert check("softmax", dtypes=["float64"]).dtype == "float64"


@pytest.mark.parametrize("name", rest_exhaustive([(name,) for name in FORWARD], lambda _: ("every input",)))
def test_every_input_has_a_gradient(name: str) -> None:
    cell = check(name, quick=False)
    assert (cell.result, cell.cases) == ("pass", len(verification.CASES))
    # The eager backend runs PyTorch's own function.
    assert 0 < cell.error == cell.pytorch_error


def wrong(function: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    """The function with a wrong gradient, like that of a wrong backward kernel."""

    def changed(x: torch.Tensor, dim: int, **how: Any) -> torch.Tensor:
        x = x.view_as(x)
        x.register_hook(change)
        return function(x, dim, **how)

    return changed


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda dx: dx * 1.001, "PyTorch's own"),
        (lambda dx: dx.roll(1, -1), "PyTorch's own"),
        (lambda dx: dx.nan_to_num(0.0), "where PyTorch has nan"),
        (lambda dx: dx / 0, "outputs are wrong"),
    ],
    ids=["inexact", "elsewhere", "specials", "infinite"],
)
def test_a_wrong_gradient_fails(
    name: str, change: Callable[[Any], Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, name, wrong(getattr(api, name), change))
    cell = check(name)
    assert cell.result == "fail"
    assert any(words in failure for failure in cell.failures), cell.failures


def test_a_gradient_that_autograd_cannot_take_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = api.softmax
    monkeypatch.setattr(api, "softmax", lambda x, dim, **how: right(x.detach(), dim, **how))
    assert "does not require grad" in check("softmax").failures[0]


def test_the_command_names_the_interpreter_beside_float64_alone(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("typer", reason="the command line needs typer")
    from onlinesoftmax.cli import verify as command

    command._print([verification.Cell("pallas", "row", "logsumexp", "float64", slack=8)], {}, "cpu")
    assert "Pallas kernels run in JAX's interpreter" in capsys.readouterr().out


def test_a_gradient_of_long_rows_is_judged_by_the_result_before_it_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "CASES", [case for case in verification.CASES if case.name == "taller columns"])
    [cell] = verification.verify(backends=["eager"], operations=["softmax_backward"], dtypes=["float16"])
    assert cell.result == "pass", cell.failures


def test_a_gradient_is_judged_by_the_logsumexp_that_was_kept() -> None:
    """Ours keeps it in float32, `eager` too; PyTorch keeps its result of 16 bits."""
    case = next(case for case in verification.CASES if case.name == "3 x 33")
    exact = verification.Exact.of(case, "logsumexp_backward", "bfloat16", "cpu")

    def keeps_float32(x: torch.Tensor, dim: int, **_: Any) -> torch.Tensor:
        return torch.logsumexp(x.float(), dim).to(x.dtype)

    def keeps_result(x: torch.Tensor, dim: int, **_: Any) -> torch.Tensor:
        return torch.logsumexp(x, dim)

    def units(function: Callable[..., Any], backend: str) -> float:
        found = exact.outcome(function, backend=backend)
        result = np.asarray(found.result.double(), np.longdouble)
        return float(np.max(np.abs(result - found.exact) / found.unit))

    for backend in ("cuda", "triton", "pallas", "eager"):
        assert units(keeps_float32, backend) <= 1
        assert units(keeps_result, backend) > 4


@pytest.mark.parametrize("name", FORWARD)
def test_the_exact_gradient_is_the_derivative(name: str) -> None:
    generator = np.random.default_rng(0)
    x, step = generator.standard_normal((3, 5)).astype(np.longdouble), 1e-6
    saved = verification.exact_result(name, x, 1)
    dy = generator.standard_normal(saved.shape)
    found, _ = verification.exact_gradient(f"{name}_backward", x, saved, dy, 1)
    for place in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[place] += step
        down[place] -= step
        change = verification.exact_result(name, up, 1) - verification.exact_result(name, down, 1)
        assert found[place] == pytest.approx(np.sum(dy * change) / (2 * step), rel=1e-8, abs=1e-10)
