"""Every pair of options of the loss under every reduction, against the formulas in tests/loss_formula.py."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from loss_accuracy import DEVICE, GPU

import onlinesoftmax as osm
from loss_formula import expected_loss

COLS = 11

CHOICES: dict[str, tuple[Any, ...]] = {
    "rows": ((), (5,), (3, 4), (2, 2, 3)),
    "target": ("int64", "int32", "probabilities"),
    "reduction": ("mean", "sum", "none"),
    "weight": (None, 0.5, "random"),
    "label_smoothing": (0.0, 0.1),
    "z_loss": (0.0, 0.03),
    "scale": (1.0, -0.5),
    "softcap": (None, 3.0),
    "ignore_index": (-100, 4),
    "return_stats": (False, True),
}
"""A weight of 0.5 is that of every class, with which a mean is the one without weights."""


def pairs(choices: dict[str, tuple[Any, ...]], seed: int) -> list[dict[str, Any]]:
    """Combinations in which every pair of values of two options occurs with every reduction."""
    generator = random.Random(seed)
    wanted = {
        frozenset({("reduction", reduction), (a, i), (b, j)})
        for a, b in itertools.combinations(choices, 2)
        for i, j in itertools.product(range(len(choices[a])), range(len(choices[b])))
        for reduction in range(len(choices["reduction"]))
        if "reduction" not in (a, b)
    }
    found = []
    while wanted:
        one = dict(generator.choice(sorted(map(sorted, wanted))))
        one = {name: one.get(name, generator.randrange(len(values))) for name, values in choices.items()}
        wanted -= {
            frozenset({("reduction", one["reduction"]), (a, one[a]), (b, one[b])})
            for a, b in itertools.combinations(choices, 2)
        }
        found.append({name: values[one[name]] for name, values in choices.items()})
    return found


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
    weight = options["weight"]
    if weight is not None:
        random_weight = torch.rand(COLS, generator=generator, dtype=torch.float64)
        options["weight"] = torch.full((COLS,), weight, dtype=torch.float64) if weight == 0.5 else random_weight
    return x, target, options


def assert_as_expected(one: dict[str, Any], dtype: torch.dtype, seed: int, **how: Any) -> None:
    x, target, options = made(one, seed)
    stats = options.pop("return_stats")
    cast = lambda t: t.to(DEVICE, dtype) if t.is_floating_point() else t.to(DEVICE)  # noqa: E731  in three places
    leaf, weight = cast(x).clone().requires_grad_(), options.pop("weight")
    y = osm.cross_entropy(
        leaf, cast(target), None if weight is None else cast(weight), return_stats=stats, **options, **how
    )
    y, more = y if stats else (y, None)
    dy = torch.rand(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5
    (dx,) = torch.autograd.grad(y, leaf, cast(dy))
    # The expected numbers are those of the rounded inputs.
    given = (cast(t).double().cpu().numpy() if t.is_floating_point() else t.numpy() for t in (x, target, dy))
    exact = expected_loss(*given, weight=None if weight is None else cast(weight).double().cpu().numpy(), **options)
    eps = torch.finfo(dtype).eps
    named = {"loss": (y, exact.loss), "gradient": (dx, exact.gradient)}
    if more is not None:
        named |= {name: (getattr(more, name), getattr(exact, name)) for name in ("lse", "z_loss", "entropy")}
    for name, (ours, want) in named.items():
        # A rounding error of the scores, which are below 16 in magnitude, for each number or for its whole size.
        size = 16 * max(1.0, float(np.abs(want).max(initial=0)))
        found = ours.detach().double().cpu().numpy()
        np.testing.assert_allclose(found, want, 0, size * eps, err_msg=f"{name} of {one}")


HOWS: dict[str, dict[str, Any]] = {"default": {}, "triton": {"backend": "triton"}, "cuda": {"backend": "cuda"}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("how", HOWS)
def test_every_pair_of_options_is_as_written_by_hand(how: str, dtype: torch.dtype) -> None:
    if how == "cuda" and not GPU:
        pytest.skip("needs an NVIDIA GPU")
    choices = dict(CHOICES)
    if how != "default":
        # Kernels take no class probabilities.
        choices["target"] = choices["target"][:2]
    for seed, one in enumerate(pairs(choices, seed=len(how))):
        assert_as_expected(one, dtype, seed, **HOWS[how])


@pytest.mark.parametrize("how", ["default", "triton"])
def test_the_mean_of_z_loss_is_over_the_rows_that_count(how: str) -> None:
    """Weights of mean 0.5 change nothing in a mean, with z_loss either."""
    torch.manual_seed(0)
    x, target = torch.randn(64, COLS, device=DEVICE), torch.randint(COLS, (64,), device=DEVICE)
    target[::3] = -100
    x[target == -100] *= 9
    weight = torch.full((COLS,), 0.5, device=DEVICE)
    with_weight, without = (osm.cross_entropy(x, target, w, z_loss=1e-2, **HOWS[how]) for w in (weight, None))
    torch.testing.assert_close(with_weight, without)
    lse = x.double().logsumexp(1)[target != -100]
    part = without.double() - osm.cross_entropy(x.double(), target)
    torch.testing.assert_close(part, 1e-2 * (lse**2).mean(), rtol=1e-5, atol=1e-6)
    # A mean over no rows has the gradient 0.
    x.requires_grad_()
    y = osm.cross_entropy(x, torch.full_like(target, -100), weight, z_loss=0.1, label_smoothing=0.1, **HOWS[how])
    assert y.isnan()
    assert (torch.autograd.grad(y, x)[0] == 0).all()
