"""Results on a CPU by default where PyTorch's own sums are wrong: 16 bits, long rows, strided rows, mixed dtypes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import onlinesoftmax as osm
from loss_formula import expected_loss
from onlinesoftmax.torch import formulas
from pairs import rest_exhaustive

NARROW = [torch.float16, torch.bfloat16]


def rows(kind: str, shape: tuple[int, ...], dim: int) -> torch.Tensor:
    """One score of 0 among many of -16.7, whose sum float32 terms lose one by one; or uniform or normal scores."""
    generator = torch.Generator().manual_seed(0)
    if kind == "needle":
        x = torch.full(shape, -16.7)
        x.select(dim, 0).fill_(0.0)
        return x
    return (torch.rand if kind == "uniform" else torch.randn)(shape, generator=generator)


def roundings_of(n: int) -> float:
    """Roundings by which a float32 sum of n positive terms is off: torch.sum adds in four levels of n^(1/4) terms."""
    return 2 * n**0.25


def assert_exact(ours: torch.Tensor, exact: torch.Tensor, terms: Any, relative: bool = False) -> None:
    """An error of at most `terms` roundings of float32, of numbers of the size of 1 or relative to each number."""
    error = (ours.double() - exact).abs()
    allowed = terms * torch.finfo(torch.float32).eps * (exact.abs() if relative else exact.abs().clamp_min(1.0))
    assert (error <= allowed).all(), f"{error.max():.2e}"


LONG = [((2, 151936), 1), ((1, 1 << 20), 1), ((1 << 20, 2), 0), ((50257, 1), 0), ((2, 8192, 3), 1), ((1 << 17,), 0)]


@pytest.mark.parametrize("kind", ["needle", "uniform"])
@pytest.mark.parametrize(("shape", "dim"), LONG, ids=str)
def test_long_rows_are_summed_with_small_errors(shape: tuple[int, ...], dim: int, kind: str) -> None:
    x = rows(kind, shape, dim)
    wide = x.double()
    dy = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    # The difference to the maximum is rounded before the exponential.
    of_sum = roundings_of(shape[dim])
    roundings = 4 + (wide - wide.amax(dim, keepdim=True)).abs() / 2 + of_sum
    y = osm.softmax(x, dim)
    assert_exact(y, wide.softmax(dim), roundings, relative=True)
    assert_exact(y.double().sum(dim), torch.ones((), dtype=torch.float64), of_sum)
    assert_exact(osm.log_softmax(x, dim), wide.log_softmax(dim), 2 + of_sum)
    assert_exact(osm.softmax(x, dim, scale=0.5), (0.5 * wide).softmax(dim), roundings, relative=True)
    assert_exact(osm.softmax(x, dim, out=torch.empty_like(x)), wide.softmax(dim), roundings, relative=True)
    for function, size in ((osm.softmax, wide.softmax(dim)), (osm.log_softmax, dy.double())):
        leaf, exact_leaf = x.clone().requires_grad_(), wide.clone().requires_grad_()
        (ours,) = torch.autograd.grad(function(leaf, dim), leaf, dy)
        exact = getattr(torch, function.__name__)(exact_leaf, dim)
        (want,) = torch.autograd.grad(exact, exact_leaf, dy.double())
        total = dy.double().sum(dim, keepdim=True) * wide.softmax(dim)
        error = (ours.double() - want).abs()
        allowed = 2 * roundings * torch.finfo(torch.float32).eps * (size + total * (function is osm.log_softmax))
        assert (error <= allowed).all(), function


@pytest.mark.parametrize("dtype", NARROW)
def test_long_rows_of_16_bits(dtype: torch.dtype) -> None:
    x = rows("needle", (1 << 20, 1, 2), 0).to(dtype)
    want = x.double().softmax(0)
    for y in (osm.softmax(x, 0), osm.softmax(x, 0, dtype=torch.float32)):
        assert y.dtype in (dtype, torch.float32)
        unit = torch.finfo(y.dtype).eps * (1 + roundings_of(1 << 20) * (y.dtype == torch.float32))
        assert ((y.double() - want).abs() <= unit * want + 2.0**-25).all()


def test_losses_of_long_rows() -> None:
    x, target = rows("needle", (3, 151936), 1), torch.tensor([0, 5, -100])
    weight = torch.linspace(0.5, 1.5, 151936)
    probabilities = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) / 75000
    for given, options in itertools.product(
        (target, probabilities), ({}, {"label_smoothing": 0.1}, {"weight": weight}, {"z_loss": 0.1})
    ):
        leaf = x.clone().requires_grad_()
        y = osm.cross_entropy(leaf, given, **options)
        (dx,) = torch.autograd.grad(y, leaf)
        wide = {name: t.double().numpy() if isinstance(t, torch.Tensor) else t for name, t in options.items()}
        wide_target = given.double() if given.is_floating_point() else given
        want = expected_loss(x.double().numpy(), wide_target.numpy(), **wide)
        np.testing.assert_allclose(y.item(), want.loss, 4e-7, 4e-7)
        np.testing.assert_allclose(dx.numpy(), want.gradient, 2e-6, 2e-7)


def test_statistics_of_a_long_row_are_as_exact_as_torch_logsumexp() -> None:
    x = rows("needle", (1, 50257), 1)
    exact = x.double().log_softmax(1)
    lse, entropy = x.double().logsumexp(1), -(exact.exp() * exact).sum(1)
    index = torch.tensor([0])
    found = osm.token_logprobs(x, index)
    _, stats = osm.cross_entropy(x, index, return_stats=True)
    assert_exact(found.logprob, exact[:, 0], 4)
    assert_exact(osm.logsumexp(x, batch_invariant=True), lse, 1)
    for ours in (found, stats, osm.token_logprobs(x, index, batch_invariant=True)):
        assert_exact(ours.lse, lse, 4)
        assert_exact(ours.entropy, entropy, 4)


@pytest.mark.parametrize("dtype", NARROW)
def test_logsumexp_of_16_bits_is_rounded_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for x in (
        torch.zeros(1, 65520), torch.zeros(1, 200000), torch.tensor([[0.0, -3.0], [7.0, -1.0], [-0.3, -1.35]]),
        torch.randn(50, 300, generator=generator),
    ):  # fmt: skip
        x = x.to(dtype).requires_grad_()
        wide = x.detach().double().requires_grad_()
        unit = torch.finfo(dtype).eps
        for y, exact in (
            (osm.logsumexp(x, 1), wide.logsumexp(1)), (osm.logsumexp(x, (0, 1)), wide.logsumexp((0, 1))),
        ):  # fmt: skip
            assert y.dtype == dtype
            assert ((y.double() - exact).abs() <= 0.51 * unit * exact.abs() + 2e-7).all()
            (dx,), (want,) = torch.autograd.grad(y.sum(), x), torch.autograd.grad(exact.sum(), wide)
            assert ((dx.double() - want).abs() <= 0.51 * unit * want + 1e-7).all()
        out = torch.empty(0, dtype=dtype)
        assert osm.logsumexp(x.detach(), 1, out=out) is out
        assert torch.equal(out, osm.logsumexp(x.detach(), 1))


@pytest.mark.parametrize(
    ("cached", "options", "dtype"),
    rest_exhaustive(
        itertools.product(
            (formulas.ELEMENTS_IN_CACHE, 1 << 14), ({}, {"label_smoothing": 0.1}, {"z_loss": 0.01}), NARROW
        )
    ),
)
def test_losses_of_16_bits_are_rounded_once(
    dtype: torch.dtype, options: dict[str, Any], cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formulas, "ELEMENTS_IN_CACHE", cached)
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(10000, 100, generator=generator).to(dtype), torch.randint(100, (10000,))
    weight = torch.rand(100, generator=generator)
    for w, reduction in itertools.product((None, weight, weight.to(dtype)), ("mean", "none")):
        y = osm.cross_entropy(x, target, w, reduction=reduction, **options)
        w64 = None if w is None else w.double().numpy()
        want = expected_loss(x.double().numpy(), target.numpy(), weight=w64, reduction=reduction, **options).loss
        assert y.dtype == dtype
        np.testing.assert_allclose(y.double().numpy(), want, 0.51 * torch.finfo(dtype).eps, 2e-6)
    probabilities = torch.rand(10000, 100, generator=generator) / 50
    loss = osm.cross_entropy(x, probabilities, weight, **options)
    want = expected_loss(x.double().numpy(), probabilities.double().numpy(), weight=weight.double().numpy(), **options)
    assert loss.dtype == torch.float32
    np.testing.assert_allclose(loss.item(), want.loss, 1e-6)


def test_a_slice_that_is_larger_than_the_cache_is_converted_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(3, 5, 8, 8, generator=generator).bfloat16(), torch.randint(5, (3, 8, 8))
    of_slice = x[0].numel()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for in_cache, rows in ((2 * of_slice, 2), (of_slice, 1), (of_slice - 1, 1), (1, 0), (3 * of_slice, 0)):
        monkeypatch.setattr(formulas, "ELEMENTS_IN_CACHE", in_cache)
        assert formulas.rows_at_a_time(x, torch.float32) == rows
        want = functional.cross_entropy(x.double(), target)
        torch.testing.assert_close(osm.cross_entropy(x, target), want.bfloat16(), rtol=torch.finfo(x.dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("classes", [2, 1000])
def test_the_gradient_of_a_probable_class_of_16_bits(classes: int, dtype: torch.dtype) -> None:
    """PyTorch rounds the probability 0.999 to 16 bits, and loses the gradient p - 1."""
    for logit, options in itertools.product((7.0, 14.0), ({}, {"z_loss": 0.001}, {"reduction": "sum"})):
        x = torch.zeros(3, classes, dtype=dtype)
        x[:, 1] = logit
        leaf, target = x.clone().requires_grad_(), torch.tensor([1, 0, -100])
        osm.cross_entropy(leaf, target, **options).backward()
        want = expected_loss(x.double().numpy(), target.numpy(), **options).gradient
        assert leaf.grad is not None
        # p is exp(x - lse), with an error of its last place, and of lse, which is rounded to float32; float16 has its
        # smallest number at 6e-8.
        least = 2e-7 + float(np.spacing(np.float32(logit))) / 2
        np.testing.assert_allclose(leaf.grad.double().numpy(), want, 0.51 * torch.finfo(dtype).eps, least)


@pytest.mark.parametrize("dtype", NARROW)
def test_log_softmax_of_16_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch rounds maximum + log(sum) to 16 bits: the log-probability -0.001 and its gradient are 0 in bfloat16."""
    x = torch.randn(40, 3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[:, :, 1] = 9.0
    half = 0.51 * torch.finfo(dtype).eps
    for cached, dim in itertools.product((4, 1 << 20), (-1, 0, 1)):
        monkeypatch.setattr(formulas, "ELEMENTS_IN_CACHE", cached)
        leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
        exact = torch.log_softmax(wide, dim)
        (want,) = torch.autograd.grad(exact.select(dim, 1).sum(), wide, create_graph=True)
        (of_want,) = torch.autograd.grad(want.square().sum(), wide)
        out = torch.empty_like(x)
        for y in (osm.log_softmax(leaf, dim), osm.log_softmax(x, dim), osm.log_softmax(x, dim, out=out)):
            assert y.dtype == dtype
            assert ((y.double() - exact).abs() <= half * exact.abs() + 1e-6).all()
        (dx,) = torch.autograd.grad(osm.log_softmax(leaf, dim).select(dim, 1).sum(), leaf, create_graph=True)
        # The gradient reads the rounded result: the error of y is a relative one of exp(y).
        error = (dx.double() - want).abs()
        assert (error <= half * (want.abs() + exact.exp() * exact.abs()) + 2e-7).all()
        (second,) = torch.autograd.grad(dx.square().sum(), leaf)
        torch.testing.assert_close(second.double(), of_want, rtol=8 * half, atol=8 * half)


def test_operands_of_other_dtypes() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 257, dtype=torch.float64, generator=generator)
    target, weight = torch.arange(6), torch.rand(257, generator=generator)
    for options in ({}, {"label_smoothing": 0.1}, {"label_smoothing": 0.1, "z_loss": 0.01}):
        want = expected_loss(x.numpy(), target.numpy(), weight=weight.double().numpy(), **options).loss
        np.testing.assert_allclose(osm.cross_entropy(x, target, weight, **options).numpy(), want, 1e-15)
        rounded = osm.cross_entropy(x.float(), target, weight.double(), **options)
        np.testing.assert_allclose(rounded.double().numpy(), want, 1e-6)
    probabilities = torch.rand(6, 257, dtype=torch.float64, generator=generator)
    for dtypes in itertools.product((torch.float32, torch.float64, torch.bfloat16), repeat=2):
        one, other = x.to(dtypes[0]), probabilities.to(dtypes[1])
        assert osm.cross_entropy(one, other).dtype == functional.cross_entropy(one, other).dtype


TRANSFORMS: dict[str, Callable[[Callable[..., Any], torch.Tensor], Any]] = {
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "vmap of a gradient": lambda f, x: torch.func.vmap(torch.func.grad(lambda row: (f(row) ** 2).sum()))(x),
    "jacobians": lambda f, x: torch.func.jacfwd(torch.func.jacrev(f))(x[0]),
    "tangent": lambda f, x: torch.func.jvp(f, (x,), (x.sin(),)),
    "batch of gradients": lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True),
}


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "cross_entropy"])
def test_derivatives_of_long_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows of float64 take the way of long ones here."""
    x, target = torch.randn(3, 20, dtype=torch.float64), torch.tensor(4)

    def ours(x: torch.Tensor) -> Any:
        if name == "cross_entropy":
            return osm.cross_entropy(x, target.expand(x.shape[:-1]), reduction="none", label_smoothing=0.1)
        return getattr(osm, name)(x, -1)

    want = {way: transform(ours, x) for way, transform in TRANSFORMS.items()}
    monkeypatch.setattr(formulas, "MOST_TERMS", {torch.float64: 1})
    assert formulas.is_long(x, -1)
    leaf = x.clone().requires_grad_()
    assert torch.autograd.gradcheck(ours, leaf, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(ours, leaf)
    for way, transform in TRANSFORMS.items():
        torch.testing.assert_close(transform(ours, x), want[way], msg=lambda text, way=way: f"{way}: {text}")


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "strided": lambda x: x.mT.contiguous().mT,
    "unaligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "part of wider rows": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
}

INVARIANT: dict[str, Callable[..., Any]] = {
    "loss": lambda x, t, **how: osm.cross_entropy(x, t, reduction="none", z_loss=0.1, **how),
    "smoothed": lambda x, t, **how: osm.cross_entropy(x, t, reduction="none", label_smoothing=0.1, **how),
    "probabilities": lambda x, t, **how: osm.cross_entropy(x, (x > 0).to(x) / 64, reduction="none", softcap=5.0, **how),
    "masked": lambda x, t, **how: osm.cross_entropy(
        x, t, torch.linspace(1, 2, 77), reduction="none", label_smoothing=0.1, mask=torch.arange(77)[:, None] > 1, **how
    ),
    "statistics": lambda x, t, **how: osm.cross_entropy(x, t, return_stats=True, **how)[1][:3],
    "token": lambda x, t, **how: osm.token_logprobs(x, t, 1, **how),
    "logsumexp": lambda x, t, **how: osm.logsumexp(x, 1, softcap=5.0, **how),
    "softmax": lambda x, t, **how: osm.softmax(x, 1, scale=0.3, **how).movedim(1, -1),
    "log_softmax": lambda x, t, **how: osm.log_softmax(x, 1, **how).movedim(1, -1),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", INVARIANT)
def test_a_row_has_the_same_bits_beside_any_other_rows(name: str, dtype: torch.dtype) -> None:
    """Rows along the dimension 1 of (batch, classes, positions), for batches of any strides and alignments."""
    function, how = INVARIANT[name], {"batch_invariant": True}
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(4, 77, 109, generator=generator).to(dtype)
    target = torch.randint(77, (4, 109), generator=generator)
    every = lambda found: found if isinstance(found, tuple) else (found,)  # noqa: E731  in two places
    whole = every(function(x, target, **how))
    others = [(x[:, :, k : k + 1].clone(), slice(k, k + 1)) for k in range(0, 109, 12)]
    others += [(lay(x), slice(None)) for lay in LAYOUTS.values()] + [(x[:, :, 3:77].clone(), slice(3, 77))]
    for part, at in others:
        for y, want in zip(every(function(part, target[:, at], **how)), whole, strict=True):
            assert torch.equal(y, want[:, at])
    assert "softmax" not in name or function(x, target, **how).movedim(-1, 1).is_contiguous()
