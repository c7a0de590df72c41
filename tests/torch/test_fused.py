"""Scale, softcap, bias, masks and causality: every strategy against the same thing written out in PyTorch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import onlinesoftmax as osm
from contract import DEVICE, GPU, OPERATIONS, PLANS, ROW_PLANS, assert_near, forced, outliers, wide
from onlinesoftmax.core.call import Call, Settings
from onlinesoftmax.core.options import ScoreOptions, checked_options
from onlinesoftmax.lab import verify as verification
from onlinesoftmax.ops import OPERATIONS as DECLARED
from onlinesoftmax.torch import eager

SHAPE = (2, 9, 37)


def _mask(shape: tuple[int, ...], *, fully_masked: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    mask = torch.rand(shape, generator=generator) > 0.4
    mask[..., 0] |= ~mask.any(-1)
    if fully_masked:
        mask[0, 0] = False
    return mask


def _scales(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Scales from -1 to 2, none of them 0."""
    return torch.linspace(-1, 1.9, math.prod(shape)).reshape(shape).to(dtype)


def options(dtype: torch.dtype, shape: tuple[int, ...] = SHAPE) -> dict[str, dict[str, Any]]:
    """Named sets of keyword arguments, their tensors on the CPU."""
    cols = shape[-1]
    bias = outliers(shape[-2], cols, dtype=dtype, device="cpu")
    return {
        "scale": {"scale": -0.7},
        "scale=0": {"scale": 0},
        "scale tensor": {"scale": torch.tensor(0.3, dtype=dtype)},
        "scale of a row": {"scale": _scales(*shape[:-1], 1, dtype=dtype)},
        "scale of a batch": {"scale": _scales(shape[0], 1, 1, dtype=dtype)},
        "softcap": {"softcap": 5.0},
        "bias": {"bias": bias},
        "bias of a row": {"bias": bias[0]},
        "bias of a column": {"bias": outliers(shape[0], 1, 1, dtype=dtype, device="cpu")},
        "mask": {"mask": _mask(shape, fully_masked=False)},
        "mask of a row": {"mask": _mask((shape[-2], cols), fully_masked=False)[0]},
        "causal": {"causal": True},
        "zero": {"mask": _mask(shape, fully_masked=True), "fully_masked": "zero"},
        "all": {
            "scale": 1.5, "softcap": 8.0, "bias": bias, "mask": _mask(shape, fully_masked=True), "causal": True,
            "fully_masked": "zero",
        },
    }  # fmt: skip


NAMES = tuple(options(torch.float32))


def moved(given: dict[str, Any], last: Callable[[torch.Tensor], torch.Tensor] = lambda t: t) -> dict[str, Any]:
    """The arguments on the device, their tensors seen through `last`."""
    return {k: last(v.to(DEVICE)) if isinstance(v, torch.Tensor) else v for k, v in given.items()}


def as_options(given: dict[str, Any]) -> ScoreOptions:
    """The arguments as the library has them inside."""
    defaults = {"scale": 1.0, "softcap": None, "bias": None, "mask": None, "causal": False, "fully_masked": "nan"}
    given = defaults | given
    names = ("scale", "softcap", "bias", "mask", "causal", "fully_masked")
    return checked_options("softmax", *(given[name] for name in names)) or ScoreOptions()


def _cells() -> list[tuple[str, str, str, torch.dtype]]:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    product = list(itertools.product(PLANS, NAMES, OPERATIONS, dtypes))
    # The interpreter runs every eleventh cell, which meets each plan, option, operation and dtype: 11 is coprime to
    # their numbers.
    return product if GPU else product[::11]


@pytest.mark.parametrize(("plan", "name", "operation", "dtype"), _cells(), ids=str)
def test_forward(plan: str, name: str, operation: str, dtype: torch.dtype) -> None:
    given = options(dtype)[name]
    x = outliers(*SHAPE, dtype=dtype, device=DEVICE)
    if plan == "triton/column":
        # The same numbers, lying so that rows are neighbours; causality then has no queries to count.
        given = {k: v for k, v in given.items() if k != "causal"}
        x = x.movedim(-1, 0).contiguous().movedim(0, -1)
    given = moved(given)
    ours = OPERATIONS[operation](x, **forced(plan), **given)
    widened = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in given.items()}
    theirs, exact = (
        eager.call_on_scores(Call(DECLARED[operation], t, Settings(-1), as_options(options)))
        for t, options in ((x, given), (x.double(), widened))
    )
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    # The interpreter's conversion to bfloat16 cuts off instead of rounding.
    slack = 2 if dtype == torch.bfloat16 and not GPU else 1
    assert_near(operation, wide(ours), wide(exact), wide(theirs), slack * verification.ulp(wide(exact), dtype))


@pytest.mark.parametrize("plan", ROW_PLANS)
@pytest.mark.parametrize("cols", [1, 130, 1025, 4100])
def test_long_masks_and_biases(plan: str, cols: int) -> None:
    """Rows that are cut at both ends, in several tiles; masks and biases that are not cut where they are."""
    x = outliers(5, cols, dtype=torch.float32, device=DEVICE)
    given = moved(
        {"mask": _mask((5, cols), fully_masked=False), "bias": outliers(cols, dtype=torch.float32, device="cpu")}
    )
    ours = osm.softmax(x, **forced(plan), scale=0.5, **given)
    z = (x.double() * 0.5 + given["bias"]).masked_fill(~given["mask"], -torch.inf)
    torch.testing.assert_close(ours.double(), torch.softmax(z, -1), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (3, 7), (7, 3), (1, 5)])
def test_causal_lets_the_last_query_see_everything(path: dict[str, str], queries: int, keys: int) -> None:
    x = torch.zeros(2, queries, keys, device=DEVICE)
    y = osm.softmax(x, causal=True, fully_masked="zero", **path)
    seen = torch.ones(queries, keys).tril(keys - queries).to(DEVICE)
    expected = seen / seen.sum(-1, keepdim=True).clamp_min(1)
    torch.testing.assert_close(y, expected.expand(2, -1, -1))
    # Another dim: its queries are the dimension before it.
    turned = osm.softmax(x.movedim(0, -1), 1, causal=True, fully_masked="zero", **path)
    torch.testing.assert_close(turned, expected[:, :, None].expand(-1, -1, 2))


SCALES: list[tuple[tuple[int, ...], tuple[int, ...], int]] = [
    ((4, 33), (4, 1), -1), ((4, 33), (1, 1), 1), ((4, 33), (1,), -1), ((33,), (1,), 0), ((33, 8), (8,), 0),
    ((2, 3, 5, 33), (3, 1, 1), -1), ((2, 3, 5, 33), (2, 1, 5, 1), 3), ((3, 17, 9), (3, 1, 9), 1), ((4, 1), (4, 1), 1),
    ((2, 4, 33), (1, 4, 1), -1),
]  # fmt: skip
"""Shapes of the input and of a scale per row, and the softmax dimension."""


@pytest.mark.parametrize(("shape", "rows", "dim"), SCALES, ids=str)
def test_a_scale_for_each_row(shape: tuple[int, ...], rows: tuple[int, ...], dim: int, path: dict[str, str]) -> None:
    """Values, and gradients in the input and in the scale, whose gradient has its shape."""
    x = outliers(*shape, dtype=torch.float32, device="cpu").to(DEVICE)
    scale = _scales(*rows, dtype=torch.float32).to(DEVICE)
    for i, (operation, call) in enumerate(OPERATIONS.items()):
        results = []
        for in_float64, function in (
            (False, lambda x, s: call(x, dim, scale=s, softcap=4.0, **path)),  # noqa: B023  called at once
            (True, lambda x, s: getattr(torch, operation)(4 * torch.tanh(x * s / 4), dim)),  # noqa: B023  called at once
        ):
            leaves = [(t.double() if in_float64 else t).clone().requires_grad_() for t in (x, scale)]
            y = function(*leaves)
            dy = torch.linspace(-1, 1 + i, y.numel(), device=DEVICE).view(y.shape)
            gradients = torch.autograd.grad(y, leaves, dy.to(y.dtype))
            assert [g.shape for g in gradients] == [x.shape, scale.shape]
            results.append([t.double() for t in (y, *gradients)])
        torch.testing.assert_close(*results, rtol=2e-5, atol=2e-5)


def test_a_scale_for_each_row_in_transforms(path: dict[str, str]) -> None:
    """In vmap, with a scale that is in the batch or not, and in forward mode."""
    x = outliers(4, 3, 33, dtype=torch.float32, device="cpu").to(DEVICE)
    scale = _scales(4, 3, 1, dtype=torch.float32).to(DEVICE)
    function = lambda x, s: osm.softmax(x, scale=s, **path)  # noqa: E731  one use
    for s, at in ((scale, 0), (scale[0], None), (scale.movedim(0, 2), 2)):
        expected = torch.softmax(x * (s.movedim(at, 0) if at is not None else s), -1)
        torch.testing.assert_close(torch.func.vmap(function, (0, at))(x, s), expected)
    tangents = torch.ones_like(x), torch.linspace(0, 1, 12, device=DEVICE).view(4, 3, 1)
    found = torch.func.jvp(function, (x, scale), tangents)
    expected = torch.func.jvp(lambda x, s: torch.softmax(x * s, -1), (x, scale), tangents)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def test_numpy() -> None:
    x = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    for name, operation in itertools.product(NAMES, OPERATIONS):
        given = options(torch.float32)[name]
        arrays = {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
        ours, theirs = OPERATIONS[operation](x, **arrays), OPERATIONS[operation](torch.from_numpy(x), **given)
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=2e-6, atol=1e-6)
        assert ours.dtype == x.dtype


@pytest.mark.parametrize("number", [int, np.float32])
def test_numbers_of_numpy(number: type) -> None:
    x = outliers(3, 40, dtype=torch.float32, device=DEVICE)
    for path in ({}, {"backend": "triton"}):
        assert torch.equal(osm.softmax(x, scale=number(1), **path), osm.softmax(x, **path))
        ours = osm.softmax(x, scale=number(2), softcap=number(3), **path)
        assert torch.equal(ours, osm.softmax(x, scale=2.0, softcap=3.0, **path))


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "mask of integers": ({"mask": torch.ones(3, 4, dtype=torch.int64)}, RuntimeError, "mask must be boolean"),
    "mask too wide": ({"mask": torch.ones(3, 5, dtype=torch.bool)}, RuntimeError, r"mask of shape \(3, 5\)"),
    "mask of more dims": ({"mask": torch.ones(2, 3, 4, dtype=torch.bool)}, RuntimeError, r"mask of shape \(2, 3, 4\)"),
    "mask no tensor": ({"mask": [[True] * 4] * 3}, TypeError, "mask must be a tensor"),
    "mask of NumPy": ({"mask": np.ones((3, 4), bool)}, TypeError, "mask must be Tensor"),
    "bias of integers": ({"bias": torch.ones(4, dtype=torch.int32)}, RuntimeError, "bias must be floating point"),
    "bias too long": ({"bias": torch.ones(5)}, RuntimeError, r"bias of shape \(5,\)"),
    "bias elsewhere": ({"bias": torch.ones(4, device="meta")}, RuntimeError, "bias is on meta"),
    "scale of columns": ({"scale": torch.ones(4)}, RuntimeError, r"scale must .* one number per row.* shape \(4,\)"),
    "scale of elements": ({"scale": torch.ones(3, 4)}, RuntimeError, "scale must .* one number per row"),
    "scale of other rows": ({"scale": torch.ones(2, 1)}, RuntimeError, r"scale of shape \(2, 1\) does not broadcast"),
    "scale of integers": ({"scale": torch.ones(3, 1).long()}, RuntimeError, "scale must be floating point"),
    "scale along dim 0": ({"scale": torch.ones(3, 1), "dim": 0}, RuntimeError, "scale must .* one number per row"),
    "scale along dims": ({"scale": torch.ones(3, 1), "dim": (0, 1)}, RuntimeError, "scale must .* one number per row"),
    "scale a word": ({"scale": "1"}, TypeError, "scale must be a number"),
    "softcap of 0": ({"softcap": 0.0}, ValueError, "softcap must be positive"),
    "softcap a word": ({"softcap": "5"}, TypeError, "softcap must be a number"),
    "causal a number": ({"causal": 1}, TypeError, "causal must be a bool"),
    "causal dim 0": ({"causal": True, "dim": 0}, ValueError, "causal needs a dimension of queries"),
    "an unknown word": ({"fully_masked": "one"}, ValueError, "fully_masked must be 'nan' or 'zero', got 'one'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str, path: dict[str, str]) -> None:
    given, error, message = BAD[name]
    given = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) and v.device.type == "cpu" else v for k, v in given.items()}
    x = torch.randn(3, 4, device=DEVICE)
    before = x.clone()
    with pytest.raises(error, match=message):
        osm.softmax(x, **given, **path)
    assert torch.equal(x, before)


def test_out_that_overlaps_a_bias_or_a_scale() -> None:
    x, out = torch.randn(3, 4, device=DEVICE), torch.randn(3, 4, device=DEVICE)
    for name, t in (("bias", out), ("scale", out[:, :1])):
        with pytest.raises(RuntimeError, match=f"out overlaps {name}"):
            osm.softmax(x, **{name: t}, out=out, backend="triton")


@pytest.mark.parametrize("given", [{"scale": 0.5}, {"batch_invariant": True}], ids=str)
def test_out_must_fit(given: dict[str, Any], path: dict[str, str]) -> None:
    x = torch.randn(3, 4, device=DEVICE)
    fits, empty = torch.empty(3, 4, device=DEVICE), torch.empty(0, device=DEVICE)
    for out in (fits, empty):
        assert osm.logsumexp(x, keepdim=True, out=empty[:0].clone(), **given, **path).shape == (3, 1)
        assert osm.softmax(x, out=out, **given, **path) is out
        torch.testing.assert_close(out, osm.softmax(x, **given, **path))
