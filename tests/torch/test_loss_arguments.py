"""Arguments of the losses: range checks, errors that name the argument, and the module with the same arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from ways import HOW, gradient

import onlinesoftmax as osm
from contract import DEVICE, GPU


def test_the_range_of_the_targets_is_checked_where_asked_for() -> None:
    x, target = torch.randn(2, 8, 3, device=DEVICE), torch.tensor([[1, -100, 2], [0, 8, -3]], device=DEVICE)
    with pytest.raises(IndexError, match=r"target is 8 at position \(1, 1\), which is not in \[0, 8\); 2 of 6 are out"):
        osm.cross_entropy(x, target, check=True, **HOW)
    with pytest.raises(IndexError, match=r"target is 8 at position \(1, 1\)"):
        osm.nn.CrossEntropyLoss(check=True)(x, target)
    inside = target.clamp(max=7).where(target != -3, 5)
    want = functional.cross_entropy(x, inside)
    torch.testing.assert_close(osm.cross_entropy(x, inside, check=True, **HOW), want)
    with pytest.raises(IndexError, match=r"index is -100 at position \(0, 1\)"):
        osm.token_logprobs(x, inside, 1, check=True, **HOW)
    with pytest.raises(IndexError, match=r"index is 9, which is not in \[0, 8\)"):
        osm.token_logprobs(x[0, :, 0], torch.tensor(9, device=DEVICE), check=True, **HOW)
    with pytest.raises(ValueError, match="target has shape"):
        osm.cross_entropy(x, target[:1], check=True)
    if not GPU:
        # PyTorch's own error, which a CPU gives by default.
        with pytest.raises(IndexError, match="out of bounds"):
            osm.cross_entropy(x, target)


X, TARGET = torch.randn(3, 8, device=DEVICE), torch.tensor([1, 0, 2], device=DEVICE)
ONE = torch.ones((), device=DEVICE)
WRONG: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (TypeError, "argument 'target' must be Tensor", {"target": [1, 0, 2]}),
    (RuntimeError, "input must be floating point", {"input": X.long()}),
    (RuntimeError, "input must be floating point of 16 to 64 bits", {"input": X.to(torch.float8_e5m2)}),
    (ValueError, "target has shape", {"target": TARGET[:2]}),
    (RuntimeError, "target with class probabilities", {"target": X[:2]}),
    (RuntimeError, "weight must have shape", {"weight": torch.ones(7, device=DEVICE)}),
    (RuntimeError, "label_smoothing must be from 0 to 1", {"label_smoothing": -0.1}),
    (ValueError, "not a valid value for reduction", {"reduction": "median"}),
    (TypeError, "'ignore_index' must be int, not float", {"ignore_index": 1.5}),
    (TypeError, "'ignore_index' must be int, not NoneType", {"ignore_index": None}),
    (TypeError, "'ignore_index' must be int, not bool", {"ignore_index": True}),
    (TypeError, "'ignore_index' must be int, not Tensor", {"ignore_index": torch.ones(())}),
    (TypeError, "'label_smoothing' must be float, not str", {"label_smoothing": "0.1"}),
    (TypeError, "'label_smoothing' must be float, not Tensor", {"label_smoothing": torch.ones(2)}),
    (TypeError, "'label_smoothing' must be float, not Tensor", {"label_smoothing": torch.ones((), requires_grad=True)}),
    (TypeError, "'label_smoothing' must be float, not bool", {"label_smoothing": True}),
    (TypeError, "'label_smoothing' must be float, not Tensor", {"label_smoothing": ONE > 0}),
    (RuntimeError, "label_smoothing must be from 0 to 1, got nan", {"label_smoothing": float("nan")}),
    (TypeError, "'z_loss' must be float, not bool", {"z_loss": True}),
    (ValueError, "z_loss must be at least 0 and finite in float32, got nan", {"z_loss": float("nan")}),
    (ValueError, "z_loss must be at least 0 and finite in float32, got inf", {"z_loss": 10**400}),
    (ValueError, "z_loss must be at least 0 and finite in float32, got -1", {"z_loss": -1}),
    (TypeError, "'z_loss' must be float, not str", {"z_loss": "0.1"}),
    (TypeError, "'z_loss' must be float, not Tensor", {"z_loss": ONE}),
    (ValueError, "softcap must be positive", {"softcap": -1.0}),
    (ValueError, "scale must fit a float", {"scale": 10**400}),
    (RuntimeError, "scale requires a gradient", {"scale": ONE.clone().requires_grad_()}),
    (RuntimeError, "mask must be boolean", {"mask": torch.ones(8, device=DEVICE)}),
    (RuntimeError, "target is on meta", {"target": torch.ones(3, 8, device="meta")}),
    (TypeError, "'dtype'", {"dtype": "float32"}),
    (RuntimeError, "dtype must be floating point", {"dtype": torch.int32}),
    (osm.PlanError, "unknown backend", {"backend": "cudnn"}),
    (osm.PlanError, "eager has no strategy 'looped'", {"backend": "eager", "strategy": "looped"}),
]


@pytest.mark.parametrize("how", [{}, HOW], ids=["default", "kernels"])
@pytest.mark.parametrize(("error", "message", "wrong"), WRONG, ids=[message for _, message, _ in WRONG])
def test_wrong_arguments_name_themselves(
    error: type[Exception], message: str, wrong: dict[str, Any], how: dict[str, Any]
) -> None:
    with pytest.raises(error, match=message):
        osm.cross_entropy(**({"input": X, "target": TARGET} | how | wrong))


def test_wrong_arguments_of_log_probabilities_and_of_kernels() -> None:
    for error, message, index, more in (
        (ValueError, "index has shape", TARGET[:2], {}), (ValueError, "index has shape", TARGET[:2, None], {}),
        (ValueError, "index has shape", TARGET[:, None, None], {}), (IndexError, "Dimension out", TARGET, {"dim": 2}),
        (RuntimeError, "index must have an integer dtype", TARGET.float(), {}),
        (TypeError, "'ignore_index'", TARGET, {"ignore_index": 0.5}),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            osm.token_logprobs(X, index, **more)
    with pytest.raises(osm.PlanError, match="class probabilities"):
        osm.cross_entropy(X, X.softmax(1), backend="triton")
    with pytest.raises(osm.PlanError, match="label_smoothing with a mask"):
        osm.cross_entropy(X, TARGET, mask=X > 0, label_smoothing=0.1, backend="triton")


@pytest.mark.parametrize("backend", [None, "eager", "triton"])
@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_inputs_without_elements(shape: tuple[int, int], backend: str | None) -> None:
    """They run with every forced backend, as those of softmax do."""
    x = torch.zeros(shape, device=DEVICE, requires_grad=True)
    target = torch.full(shape[:1], -100, device=DEVICE)
    for reduction in ("mean", "sum", "none"):
        want = functional.cross_entropy(x, target, reduction=reduction)
        loss, stats = osm.cross_entropy(x, target, reduction=reduction, return_stats=True, backend=backend)
        torch.testing.assert_close(loss, want, equal_nan=True)
        assert gradient(loss, x, torch.ones_like(loss)).shape == shape
        assert stats.largest.tolist() == [-1] * shape[0]
        assert not stats.correct.any()
    found = osm.token_logprobs(x, target, backend=backend)
    assert found.logprob.isnan().all()
    assert found.lse.tolist() == [-torch.inf] * shape[0]


@pytest.mark.parametrize("index", [2**53 + 1, 2**63 - 1, -(2**53) - 1])
def test_an_ignore_index_that_kernels_would_round(index: int) -> None:
    """Kernels take numbers as float64, so PyTorch's operations run a call with a larger integer."""
    x, target = torch.randn(2, 4, device=DEVICE, requires_grad=True), torch.tensor([index, 0], device=DEVICE)
    for reduction in ("mean", "none"):
        want = functional.cross_entropy(x, target, ignore_index=index, reduction=reduction)
        torch.testing.assert_close(osm.cross_entropy(x, target, ignore_index=index, reduction=reduction), want)
        with pytest.raises(osm.PlanError, match="kernels take integers from -9007199254740992 to 9007199254740992"):
            osm.cross_entropy(x, target, ignore_index=index, reduction=reduction, backend="triton")
    with osm.override(backend="triton") as mode:
        functional.cross_entropy(x, target, ignore_index=index)
    assert list(mode.report().left.values()) == [1]
    nearest = 2**53 if index > 0 else -(2**53)
    target = target.where(target != index, nearest)
    want = functional.cross_entropy(x, target, ignore_index=nearest)
    torch.testing.assert_close(osm.cross_entropy(x, target, ignore_index=nearest, **HOW), want)


def test_a_weight_gets_no_gradient() -> None:
    x, target = torch.randn(4, 8, device=DEVICE), torch.tensor([1, 0, 2, -100], device=DEVICE)
    weight = torch.rand(8, device=DEVICE)
    want = osm.cross_entropy(x, target, weight, **HOW)
    weight.requires_grad_()
    for inputs in (x, x.clone().requires_grad_()):
        for options in ({}, {"reduction": "none"}, {"label_smoothing": 0.1, "z_loss": 0.1}):
            for how in ({}, HOW):
                with pytest.raises(RuntimeError, match="weight requires a gradient"):
                    osm.cross_entropy(inputs, target, weight, **options, **how)
    with torch.no_grad():
        torch.testing.assert_close(osm.cross_entropy(x, target, weight, **HOW), want)
    loss, theirs = (f(x, x.softmax(1), weight) for f in (osm.cross_entropy, functional.cross_entropy))
    one = torch.tensor(1.0)
    torch.testing.assert_close(gradient(loss, weight, one), gradient(theirs, weight, one))


def test_the_module_is_the_function() -> None:
    x, target = torch.randn(4, 8, device=DEVICE), torch.tensor([1, 0, 2, -100], device=DEVICE)
    weight = torch.rand(8, device=DEVICE)
    ours = osm.nn.CrossEntropyLoss(weight, label_smoothing=0.1, z_loss=0.1, softcap=3.0)
    want = osm.cross_entropy(x, target, weight, label_smoothing=0.1, z_loss=0.1, softcap=3.0)
    torch.testing.assert_close(ours(x, target), want)
    assert repr(ours) == "CrossEntropyLoss(z_loss=0.1, softcap=3.0)"
    theirs = torch.nn.CrossEntropyLoss(weight, ignore_index=2, reduction="sum")
    want = theirs(x, target.clamp(min=0))
    assert osm.nn.replace(theirs).cross_entropy == 1
    assert type(theirs) is osm.nn.CrossEntropyLoss
    torch.testing.assert_close(theirs(x, target.clamp(min=0)), want)
    assert ours.state_dict().keys() == theirs.state_dict().keys() == {"weight"}
    with pytest.raises(ValueError, match="softcap must be positive"):
        osm.nn.CrossEntropyLoss(softcap=-1.0)
