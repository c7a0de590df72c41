"""Cross-entropy: inputs that break other libraries, statistics, and gradients that overwrite the logits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.nn import functional
from ways import HOW, gradient

import onlinesoftmax as osm
from contract import DEVICE, DTYPES, GPU
from onlinesoftmax.kernels import registry


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.exhaustive), torch.bfloat16], ids=str)
def test_pytorchs_own_samples(dtype: torch.dtype) -> None:
    """The inputs with which PyTorch tests its function; a gradient is that of the same numbers in float32."""
    pytest.importorskip("expecttest", reason="PyTorch's samples need expecttest, which is not installed")
    from torch.testing._internal.common_methods_invocations import op_db

    operator = next(one for one in op_db if one.name == "nn.functional.cross_entropy")
    wide = lambda t: t.float() if isinstance(t, torch.Tensor) and t.is_floating_point() else t  # noqa: E731  in a loop
    taken = 0
    for sample in operator.sample_inputs(DEVICE, dtype, requires_grad=True):
        x, target = sample.input, sample.args[0]
        want = operator(x, *sample.args, **sample.kwargs)
        how = HOW if not target.is_floating_point() and x.numel() else {}
        taken += bool(how) or GPU
        ours = osm.cross_entropy(x, *sample.args, **sample.kwargs, **how)
        torch.testing.assert_close(ours, want, equal_nan=True)
        if want.requires_grad and want.isfinite().all():
            ones = torch.ones_like(want)
            want = operator(wide(x), *map(wide, sample.args), **{name: wide(t) for name, t in sample.kwargs.items()})
            torch.testing.assert_close(gradient(ours, x, ones), gradient(want, x, ones))
    assert taken >= 10


def test_class_probabilities_get_gradients() -> None:
    x, weight = torch.randn(4, 9, device=DEVICE, requires_grad=True), torch.rand(9, device=DEVICE)
    target = torch.rand(4, 9, device=DEVICE).softmax(1).requires_grad_()
    for options in ({}, {"label_smoothing": 0.2}, {"reduction": "none"}, {"reduction": "sum"}):
        ours, theirs = (f(x, target, weight, **options) for f in (osm.cross_entropy, functional.cross_entropy))
        dy = torch.ones_like(theirs)
        torch.testing.assert_close(*(torch.autograd.grad(y, (x, target), dy) for y in (ours, theirs)))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_gradient_scaler_reaches_float16_before_it_rounds(reduction: Any, weighted: bool) -> None:
    """1 / 512 of a small probability is 0 in float16; times the factor of the scaler it is not."""
    x = torch.randn(512, 40, generator=torch.Generator().manual_seed(0)) / 3
    x[:, 10:] -= 10.5
    x = x.to(DEVICE, torch.float16).requires_grad_()
    target, factor = torch.arange(512, device=DEVICE) % 10, 65536.0 if reduction == "mean" else 1024.0
    weight = torch.linspace(0.5, 1.5, 40, device=DEVICE) if weighted else None
    wide = x.detach().double().requires_grad_()
    of_wide = functional.cross_entropy(wide, target, None if weight is None else weight.double(), reduction=reduction)
    exact = torch.autograd.grad(of_wide * factor, wide)[0][:, 10:]
    assert reduction == "sum" or not (exact / factor).half().any()
    for _ in range(2):
        loss = osm.cross_entropy(x, target, weight, reduction=reduction, dtype=torch.float32, **HOW)
        # The float32 loss, in units of its last place.
        torch.testing.assert_close(loss, of_wide.float(), rtol=2 * torch.finfo(torch.float32).eps, atol=0)
        (dx,) = torch.autograd.grad(loss * factor, x)
        assert (dx[:, 10:].double() - exact).norm() < 1e-2 * exact.norm()


def test_a_confident_true_class_keeps_its_gradient() -> None:
    """In bfloat16 p = 0.999 rounds to 1, and a gradient from the rounded p would be 0."""
    x = torch.zeros(2, 16, dtype=torch.bfloat16, device=DEVICE)
    x[:, 3] = 9.5
    x.requires_grad_()
    exact = (x.detach().double().softmax(1) - functional.one_hot(torch.tensor([3, 3], device=DEVICE), 16)).float()
    for reduction in ("sum", "none"):
        y = osm.cross_entropy(x, torch.tensor([3, 3], device=DEVICE), reduction=reduction, **HOW)
        dx = gradient(y, x, torch.ones_like(y)).float()
        assert ((dx - exact).abs() <= torch.finfo(torch.bfloat16).eps * exact.abs()).all()


def test_a_large_common_offset_changes_nothing() -> None:
    x, target = torch.randn(4, 33, device=DEVICE).round(decimals=1), torch.tensor([0, 8, 4, 32], device=DEVICE)
    shifted = x + 1e4
    for options in ({}, {"label_smoothing": 0.3}):
        want = functional.cross_entropy((shifted.double() - 1e4), target, reduction="none", **options)
        found = osm.cross_entropy(shifted, target, reduction="none", **options, **HOW)
        torch.testing.assert_close(found.double(), want, rtol=1e-6, atol=2e-7)
    assert (osm.token_logprobs(shifted, target, **HOW).logprob <= 0).all()


def test_ignored_rows_may_hold_nan() -> None:
    x = torch.randn(3, 8, device=DEVICE)
    x[1] = torch.nan
    x.requires_grad_()
    target = torch.tensor([1, -100, 2], device=DEVICE)
    for reduction in ("mean", "none"):
        y = osm.cross_entropy(x, target, reduction=reduction, z_loss=0.1, label_smoothing=0.1, **HOW)
        dx = gradient(y, x, torch.ones_like(y))
        assert y.isfinite().all()
        assert (dx[1] == 0).all()
        assert dx.isfinite().all()


@pytest.mark.parametrize("how", [HOW, {}], ids=["triton", "default"])
def test_statistics_have_no_gradient_and_an_ignored_row_is_not_correct(how: dict[str, Any]) -> None:
    x, target = torch.randn(3, 8, device=DEVICE), torch.tensor([1, -100, 2], device=DEVICE)
    x[2, 2] = 9.0
    loss, stats = osm.cross_entropy(x.clone().requires_grad_(), target, z_loss=0.1, return_stats=True, **how)
    assert loss.requires_grad
    assert not any(t.requires_grad for t in stats)
    assert stats.largest.tolist() == x.argmax(1).tolist()
    assert stats.correct.tolist() == [int(x[0].argmax()) == 1, False, True]


@pytest.mark.parametrize("how", [HOW, {}], ids=["triton", "default"])
def test_without_z_loss_its_statistic_is_0(how: dict[str, Any]) -> None:
    x = torch.tensor([[0.0, 1.0], [-torch.inf, -torch.inf], [torch.inf, 0.0], [torch.nan, 0.0]], device=DEVICE)
    target = torch.zeros(4, dtype=torch.long, device=DEVICE)
    _, stats = osm.cross_entropy(x, target, return_stats=True, **how)
    assert stats.lse.isfinite().tolist() == [True, False, False, False]
    assert stats.z_loss.tolist() == [0.0] * 4
    _, stats = osm.cross_entropy(x, target, z_loss=0.5, return_stats=True, **how)
    torch.testing.assert_close(stats.z_loss, 0.5 * x.logsumexp(1) ** 2, equal_nan=True)


def test_batch_invariant_rows_have_the_same_bits() -> None:
    x, target = torch.randn(9, 1000, device=DEVICE), torch.randint(1000, (9,), device=DEVICE)
    options: dict[str, Any] = {"reduction": "none", "batch_invariant": True, **HOW}
    whole = osm.cross_entropy(x, target, **options)
    for i in range(9):
        assert torch.equal(whole[i], osm.cross_entropy(x[i : i + 1], target[i : i + 1], **options)[0])


@pytest.mark.gpu
def test_more_than_two_billion_elements(device_memory: None) -> None:
    rows, cols = 17000, 128256
    x = torch.zeros(rows, cols, dtype=torch.bfloat16, device=DEVICE)
    target = torch.arange(rows, device=DEVICE)
    x[-1, target[-1]] = 8.0
    x.requires_grad_()
    loss = osm.cross_entropy(x, target, reduction="none")
    want = functional.cross_entropy(x[-1:].float(), target[-1:], reduction="none")
    torch.testing.assert_close(loss[-1:].float(), want, rtol=1e-2, atol=1e-2)
    dx = gradient(osm.cross_entropy(x, target, reduction="sum"), x, torch.ones((), device=DEVICE))
    assert torch.equal(dx.argmin(1), target)


def test_the_largest_class_is_that_of_the_scores() -> None:
    x, target = torch.tensor([[1.0, 3.0, 2.0]], device=DEVICE), torch.tensor([0], device=DEVICE)
    _, stats = osm.cross_entropy(x, target, scale=-1.0, return_stats=True, **HOW)
    assert (stats.largest.tolist(), stats.correct.tolist()) == ([0], [True])
    x, scale = x.expand(3, 3), torch.tensor([[1.0], [-1.0], [2.0]], device=DEVICE)
    mask = torch.tensor([[True] * 3, [False, True, True], [True] * 3], device=DEVICE)
    _, stats = osm.cross_entropy(x, target.expand(3), scale=scale, return_stats=True, **HOW)
    assert stats.largest.tolist() == [1, 0, 1]
    _, stats = osm.cross_entropy(x, target.expand(3), scale=scale, mask=mask, return_stats=True, **HOW)
    assert stats.largest.tolist() == [1, 2, 1]
    # Scores that a softcap rounds to one number, equal logits, and NaN.
    x = torch.tensor([[50.0, 60.0, 55.0], [-0.0, 0.0, -1.0], [torch.inf, torch.nan, torch.nan]], device=DEVICE)
    _, stats = osm.cross_entropy(x, target.expand(3), softcap=1.0, return_stats=True, **HOW)
    assert stats.largest.tolist() == [1, 0, 1] == x.argmax(1).tolist()


def test_the_logits_are_not_changed_unless_allowed() -> None:
    h = torch.randn(4, 64, device=DEVICE, requires_grad=True)
    target = torch.randint(64, (4,), device=DEVICE)
    x = 2 * h
    before = x.detach().clone()
    want = gradient(functional.cross_entropy(2 * h, target), h, torch.tensor(3.0))
    torch.testing.assert_close(gradient(osm.cross_entropy(x, target, **HOW), h, torch.tensor(3.0)), want)
    assert torch.equal(x, before)
    x = 2 * h
    loss = osm.cross_entropy(x, target, inplace_backward=True, **HOW)
    assert not torch.equal(x, before)
    torch.testing.assert_close(gradient(loss, h, torch.tensor(3.0)), want)
    x = 2 * h
    other = (x * x).sum()
    loss = osm.cross_entropy(x, target, inplace_backward=True, **HOW) + other
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    # A call that PyTorch's operations run overwrites nothing, and has the same error.
    for leaf, labels, how in ((h, target, HOW), (h.cpu(), target.cpu(), {})):
        with pytest.raises(RuntimeError, match="a leaf that requires grad"):
            osm.cross_entropy(leaf.detach().requires_grad_(), labels, inplace_backward=True, **how)


def test_statistics_are_those_of_the_logits_that_the_gradient_overwrites() -> None:
    h = torch.randn(16, 64, device=DEVICE, requires_grad=True)
    target = h.argmax(1)  # The gradient is negative there, and only there.
    loss, stats = osm.cross_entropy(2 * h, target, inplace_backward=True, return_stats=True, **HOW)
    assert torch.equal(stats.largest, target)
    assert stats.correct.all()
    torch.testing.assert_close(stats.lse, (2 * h).detach().logsumexp(1))
    loss.backward()


def test_a_second_derivative_of_a_target_out_of_range_is_zero() -> None:
    x, target = torch.randn(3, 8, device=DEVICE, requires_grad=True), torch.tensor([8, -3, 2], device=DEVICE)
    losses = osm.cross_entropy(x, target, reduction="none", **HOW)
    (dx,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
    found = gradient((dx * dx).sum(), x, torch.tensor(1.0))
    assert (dx[:2] == 0).all()
    assert (found[:2] == 0).all()
    (dx,) = torch.autograd.grad(functional.cross_entropy(x[2:], target[2:]), x, create_graph=True)
    torch.testing.assert_close(found, gradient((dx * dx).sum(), x, torch.tensor(1.0)))


def test_a_gradient_for_each_row_by_vmap() -> None:
    x, target = torch.randn(3, 8, device=DEVICE), torch.tensor([1, 7, 2], device=DEVICE)
    weight = torch.rand(8, device=DEVICE)

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = osm.cross_entropy(x, target, weight, z_loss=0.1, scale=0.5, label_smoothing=0.1)
        return found

    each = torch.func.vmap(torch.func.grad(loss))(x, target)
    for row in range(3):
        torch.testing.assert_close(each[row], torch.func.grad(loss)(x[row : row + 1], target[row : row + 1])[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [1.0, -2.5])
def test_a_gradient_is_multiplied(dtype: torch.dtype, factor: float) -> None:
    wide_dtype = torch.promote_types(dtype, torch.float32)
    for count in (1, 15, 4097, 70001):
        x = torch.randn(count + 8, dtype=torch.float64, device=DEVICE).to(dtype)
        want, before = (factor * x[:count].to(wide_dtype)).to(dtype), x.clone()
        backends = ("cuda", "triton") if GPU else ("triton",)
        for backend, factor_dtype in itertools.product(backends, {wide_dtype, dtype}):
            bind = registry.small_kernels(backend, "multiply").bind
            y, number = before.clone(), torch.tensor(factor, dtype=factor_dtype, device=DEVICE)
            in_place = y[:count], number, y[:count]
            bind(*in_place)(*in_place)
            torch.testing.assert_close(y[:count], want)
            assert torch.equal(y[count:], before[count:])
            for other in {torch.float32} if dtype == torch.float64 else {torch.bfloat16, torch.float32} - {dtype}:
                out = torch.full_like(before, torch.nan, dtype=other)
                elsewhere = before[:count], number, out[:count]
                bind(*elsewhere)(*elsewhere)
                torch.testing.assert_close(out[:count], (factor * x[:count].to(wide_dtype)).to(other))
                assert out[count:].isnan().all()
