"""Every pair of options of the loss under every reduction, against the formulas in tests/loss_formula.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from ways import HOWS

import onlinesoftmax as osm
from contract import DEVICE
from loss_formula import expected_loss, pairs

COLS = 11

CHOICES: dict[str, tuple[Any, ...]] = {
    "rows": ((), (5,), (3, 4), (2, 2, 3)),
    "target": ("int64", "int32", "probabilities"),
    "reduction": ("mean", "sum", "none"),
    "weight": (None, 0.5, "random"),
    "label_smoothing": (0.0, 0.1),
    "z_loss": (0.0, 0.03),
    "scale": (1.0, -0.5, "rows"),
    "softcap": (None, 3.0),
    "ignore_index": (-100, 4),
    "mask": (None, "classes", "elements"),
    "return_stats": (False, True),
}
"""A weight of 0.5 is that of every class, with which a mean is the one without weights."""


def made(one: dict[str, Any], seed: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """(logits, target, options) in float64 of a combination."""
    options = dict(one)
    rows, kind = options.pop("rows"), options.pop("target")
    generator = torch.Generator().manual_seed(seed)
    shape = (rows[0], COLS, *rows[1:]) if rows else (COLS,)
    x = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "probabilities":
        # PyTorch refuses an index that could be a class.
        options["ignore_index"] = -100
        target = torch.rand(shape, generator=generator, dtype=torch.float64)
    else:
        target = torch.randint(COLS, rows, generator=generator, dtype=getattr(torch, kind))
        target.view(-1)[0] = 0
        if rows:
            target.view(-1)[1] = options["ignore_index"]
    if options["mask"] is not None:
        # Every target is kept: another has an infinite loss, which has a test of its own.
        classes = torch.arange(COLS).view(-1, *[1] * max(0, len(rows) - 1))
        kept = (
            (classes != 5) & (classes != 7)
            if one["mask"] == "classes"
            else torch.rand(shape, generator=generator) < 0.6
        )
        if kind == "probabilities":
            target = target * kept
        elif one["mask"] == "classes":
            target = target + ((target == 5) | (target == 7)).to(target.dtype)
        else:
            kept |= classes == target.unsqueeze(min(1, len(rows)))
        options["mask"] = kept
    if options["scale"] == "rows":
        of_rows = tuple(1 if i == min(1, len(rows)) else size for i, size in enumerate(shape)) if rows else (1,)
        options["scale"] = torch.rand(of_rows, generator=generator, dtype=torch.float64) - 0.5
    weight = options["weight"]
    if weight is not None:
        random_weight = torch.rand(COLS, generator=generator, dtype=torch.float64)
        options["weight"] = torch.full((COLS,), weight, dtype=torch.float64) if weight == 0.5 else random_weight
    return x, target, options


def assert_as_expected(one: dict[str, Any], dtype: torch.dtype, seed: int, **how: Any) -> None:
    x, target, options = made(one, seed)
    mask = options.pop("mask")
    stats = options.pop("return_stats")
    cast = lambda t: t.to(DEVICE, dtype) if t.is_floating_point() else t.to(DEVICE)  # noqa: E731  in three places
    leaf, weight, scale = cast(x).clone().requires_grad_(), options.pop("weight"), options.pop("scale")
    scale = cast(scale) if isinstance(scale, torch.Tensor) else scale
    y = osm.cross_entropy(
        leaf, cast(target), None if weight is None else cast(weight), mask=None if mask is None else mask.to(DEVICE),
        return_stats=stats, scale=scale, **options, **how,
    )  # fmt: skip
    y, more = y if stats else (y, None)
    dy = torch.rand(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5
    (dx,) = torch.autograd.grad(y, leaf, cast(dy))
    # The expected numbers are those of the rounded inputs.
    given = (cast(t).double().cpu().numpy() if t.is_floating_point() else t.numpy() for t in (x, target, dy))
    exact = expected_loss(
        *given, weight=None if weight is None else cast(weight).double().cpu().numpy(),
        mask=None if mask is None else mask.expand_as(x).numpy(),
        scale=scale.double().cpu().numpy() if isinstance(scale, torch.Tensor) else scale, **options,
    )  # fmt: skip
    eps = torch.finfo(dtype).eps
    named = {"loss": (y, exact.loss), "gradient": (dx, exact.gradient)}
    if more is not None:
        named |= {name: (getattr(more, name), getattr(exact, name)) for name in ("lse", "z_loss", "entropy")}
    for name, (ours, want) in named.items():
        # A rounding error of the scores, which are below 16 in magnitude, for each number or for its whole size.
        size = 16 * max(1.0, float(np.abs(want).max(initial=0)))
        found = ours.detach().double().cpu().numpy()
        np.testing.assert_allclose(found, want, 0, size * eps, err_msg=f"{name} of {one}")


def kernels_of(choices: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """The combinations that kernels take: no class probabilities, and no smoothing with a mask."""
    return [
        {**one, "label_smoothing": 0.0} if one["mask"] else one
        for one in pairs({**choices, "target": choices["target"][:2]}, seed=1)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("how", HOWS)
def test_every_pair_of_options_is_as_written_by_hand(how: dict[str, Any], dtype: torch.dtype) -> None:
    for seed, one in enumerate(pairs(CHOICES, seed=0) if not how else kernels_of(CHOICES)):
        assert_as_expected(one, dtype, seed, **how)


def test_the_mean_of_z_loss_is_over_the_rows_that_count(path: dict[str, str]) -> None:
    """Weights of mean 0.5 change nothing in a mean, with z_loss either."""
    torch.manual_seed(0)
    x, target = torch.randn(64, COLS, device=DEVICE), torch.randint(COLS, (64,), device=DEVICE)
    target[::3] = -100
    x[target == -100] *= 9
    weight = torch.full((COLS,), 0.5, device=DEVICE)
    with_weight, without = (osm.cross_entropy(x, target, w, z_loss=1e-2, **path) for w in (weight, None))
    torch.testing.assert_close(with_weight, without)
    lse = x.double().logsumexp(1)[target != -100]
    part = without.double() - osm.cross_entropy(x.double(), target)
    torch.testing.assert_close(part, 1e-2 * (lse**2).mean(), rtol=1e-5, atol=1e-6)
    # A mean over no rows has the gradient 0.
    x.requires_grad_()
    y = osm.cross_entropy(x, torch.full_like(target, -100), weight, z_loss=0.1, label_smoothing=0.1, **path)
    assert y.isnan()
    assert (torch.autograd.grad(y, x)[0] == 0).all()
    assert osm.cross_entropy(x, torch.full_like(target, 5), ignore_index=5, reduction="sum", **path) == 0


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_a_target_that_the_mask_excludes_is_as_a_logit_of_minus_infinity_in_pytorch(
    path: dict[str, str], reduction: str
) -> None:
    torch.manual_seed(0)
    x, target = torch.randn(4, COLS, device=DEVICE, requires_grad=True), torch.tensor([0, 3, -100, 6], device=DEVICE)
    mask = torch.ones(COLS, dtype=torch.bool, device=DEVICE)
    mask[3:5] = False
    y = osm.cross_entropy(x, target, mask=mask, reduction=reduction, **path)
    want = functional.cross_entropy(x.masked_fill(~mask, -torch.inf), target, reduction=reduction)
    torch.testing.assert_close(y, want)
    assert y.isinf().any()
    found, exact = (torch.autograd.grad(z.sum(), x)[0] for z in (y, want))
    torch.testing.assert_close(found, exact)
    # A row without a class is NaN, as PyTorch's, and its logits have the gradient 0.
    nothing = mask.expand(4, COLS).clone()
    nothing[3] = False
    y = osm.cross_entropy(x, target, mask=nothing, reduction="none", **path)
    assert y.isnan().tolist() == [False, False, False, True]
    assert (torch.autograd.grad(y.sum(), x)[0][3] == 0).all()


def test_the_smoothing_of_excluded_classes_is_spread_over_those_that_are_kept() -> None:
    """The loss is that of the logits without the excluded classes, as if the vocabulary had not been padded."""
    torch.manual_seed(0)
    x, target = torch.randn(6, COLS, device=DEVICE), torch.tensor([0, 1, -100, 6, 7, 2], device=DEVICE)
    mask, weight = torch.arange(COLS, device=DEVICE) < 8, torch.rand(COLS, device=DEVICE)
    for z_loss, w in ((0.0, None), (0.1, weight)):
        options: dict[str, Any] = {"label_smoothing": 0.3, "softcap": 4.0, "z_loss": z_loss}
        found = osm.cross_entropy(x, target, w, mask=mask, **options)
        torch.testing.assert_close(found, osm.cross_entropy(x[:, :8], target, None if w is None else w[:8], **options))


DTYPES_OF_LOSS = [
    (torch.bfloat16, torch.float32), (torch.float16, torch.float64), (torch.float32, torch.float64),
    (torch.float32, torch.float16),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "wanted"), DTYPES_OF_LOSS, ids=str)
@pytest.mark.parametrize("how", HOWS)
def test_the_dtype_of_the_loss(how: dict[str, Any], dtype: torch.dtype, wanted: torch.dtype) -> None:
    torch.manual_seed(0)
    x, target = torch.randn(6, COLS, device=DEVICE, dtype=dtype, requires_grad=True), torch.arange(6, device=DEVICE)
    weight = torch.rand(COLS, device=DEVICE, dtype=dtype)
    for reduction, options in (
        ("mean", {"z_loss": 0.01, "weight": weight}), ("sum", {}), ("none", {"weight": weight, "label_smoothing": 0.1}),
    ):  # fmt: skip
        y, stats = osm.cross_entropy(x, target, dtype=wanted, reduction=reduction, return_stats=True, **options, **how)
        without = osm.cross_entropy(x, target, dtype=wanted, reduction=reduction, **options, **how)
        plain = {name: t.double().cpu().numpy() if name == "weight" else t for name, t in options.items()}
        exact = expected_loss(x.detach().double().cpu().numpy(), target.cpu().numpy(), reduction=reduction, **plain)
        assert y.dtype == without.dtype == wanted
        # Nothing is rounded to the dtype of the logits, or to float32 if more is asked for.
        unit = torch.finfo(wanted).eps * max(1.0, float(np.abs(exact.loss).max()))
        unit += 8 * torch.finfo(torch.promote_types(wanted, torch.float32)).eps
        for found in (y, without):
            np.testing.assert_allclose(found.detach().double().cpu().numpy(), exact.loss, 0, unit)
        assert stats.lse.dtype == torch.promote_types(wanted, torch.float32)
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert dx.dtype == dtype
        size = float(np.abs(exact.gradient).max())
        np.testing.assert_allclose(dx.double().cpu().numpy(), exact.gradient, 0, 2 * torch.finfo(dtype).eps * size)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_numpy_arrays(dtype: type) -> None:
    def cast(t: Any, to: type = dtype) -> Any:
        t = t.numpy() if isinstance(t, torch.Tensor) else t
        return t.astype(to) if isinstance(t, np.ndarray) and t.dtype.kind == "f" else t

    of_rows = np.float64 if dtype is np.float64 else np.float32
    for seed, one in enumerate(pairs(CHOICES, seed=2)):
        x, target, options = made(one, seed)
        stats = options.pop("return_stats")
        given = [cast(x), cast(target)]
        options = {name: cast(value) for name, value in options.items()}
        y = osm.cross_entropy(*given, return_stats=stats, **options)
        y, more = y if stats else (y, None)
        options |= {"mask": None if options["mask"] is None else np.broadcast_to(options["mask"], x.shape)}
        exact = expected_loss(*(cast(t, np.float64) for t in given), **options)
        named = {"loss": (y, dtype)}
        if more is not None:
            named |= {name: (getattr(more, name), of_rows) for name in ("lse", "z_loss", "entropy")}
        for name, (ours, result) in named.items():
            want = getattr(exact, name)
            assert isinstance(ours, np.ndarray), name
            assert (ours.shape, ours.dtype) == (want.shape, result), name
            # One rounding, after rounding errors of float64.
            size = max(1.0, float(np.abs(want).max(initial=0)))
            np.testing.assert_allclose(ours, want, np.finfo(result).eps, 1e-14 * size, err_msg=f"{name} of {one}")


def test_the_module_takes_a_mask_and_a_dtype() -> None:
    x, target, mask = torch.randn(4, COLS).half(), torch.tensor([0, 1, 2, 3]), torch.arange(COLS) < 9
    module = osm.nn.CrossEntropyLoss(dtype=torch.float32, softcap=4.0)
    assert repr(module) == "CrossEntropyLoss(softcap=4.0, dtype=torch.float32)"
    want = osm.cross_entropy(x, target, softcap=4.0, mask=mask, dtype=torch.float32)
    assert want.dtype == torch.float32
    assert torch.equal(module(x, target, mask=mask), want)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_mask_that_changes_before_backward(reduction: str) -> None:
    """Forward has the gradient of a mean; that of each row is computed later, from a mask that must be the same."""
    x, target = torch.randn(4, COLS, device=DEVICE, requires_grad=True), torch.arange(4, device=DEVICE)
    mask = torch.arange(COLS, device=DEVICE) < 9
    y = osm.cross_entropy(x, target, mask=mask, reduction=reduction, backend="triton").sum()
    (dx,) = torch.autograd.grad(y, x, retain_graph=True)
    assert (dx[:, 9:] == 0).all()
    mask.fill_(True)
    if reduction == "mean":
        assert torch.equal(torch.autograd.grad(y, x)[0], dx)
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, x)
