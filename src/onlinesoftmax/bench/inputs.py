"""The tensors of a case, the same every time: logits with outliers, gradients, masks, biases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .cases import Case

SCALE, SOFTCAP = 0.125, 30.0
"""1 / sqrt(64), as attention has it, and a bound that the outliers reach."""

KEPT = 0.75
"""Part of a mask that is True."""

Inputs = tuple[Any, ...]
"""Torch tensors, the first of the case's shape.

Forward: x, then the bias and the mask where they are fused.  Of softmax's and log_softmax's gradient: y, dy.
Of logsumexp's: x, lse, dlse.
"""


def make_inputs(case: Case, device: Any) -> Inputs:
    """What the functions compared take, on a torch device."""
    import torch

    x = make_input(case, device)
    if not case.backward:
        return (x, *_beside(case, device))
    # What a forward pass saves: rounded once, from float32.
    wide = torch.promote_types(x.dtype, torch.float32)
    if case.forward == "logsumexp":
        lse = torch.logsumexp(x.to(wide), case.dim).to(x.dtype)
        return x, lse, _filled(lse.shape, x.dtype, device, case.elements + 1, torch.randn)
    y = getattr(torch, case.forward)(x, case.dim, dtype=wide).to(x.dtype)
    return y, _filled(case.shape, x.dtype, device, case.elements + 1, torch.randn)


def make_input(case: Case, device: Any) -> Any:
    """The logits: normal numbers, one in a hundred of them times 20.

    With normal numbers alone every output would be small and an error in the maximum would not show.
    """
    import torch

    def with_outliers(count: int, **where: Any) -> Any:
        fresh = torch.randn(count, **where)
        return fresh.mul_(torch.where(torch.rand(count, **where) < 0.01, 20.0, 1.0))

    return _filled(case.shape, getattr(torch, case.dtype), device, case.elements, with_outliers)


def _beside(case: Case, device: Any) -> Inputs:
    import torch

    found = []
    if "bias" in case.fused:
        # One number for each column, of a shape that broadcasts to the case's.
        shape = (case.shape[case.dim], *[1] * (len(case.shape) - 1 - case.dim))
        found.append(_filled(shape, getattr(torch, case.dtype), device, case.elements + 2, torch.randn))
    if "mask" in case.fused:
        mask = _filled(case.shape, torch.bool, device, case.elements + 3, lambda n, **where: _kept(torch, n, **where))
        # No row without a score: its NaN would hide every error.  Causality leaves the first key too.
        mask.select(case.dim, 0).fill_(True)
        found.append(mask)
    return tuple(found)


def _kept(torch: Any, count: int, **where: Any) -> Any:
    return torch.rand(count, **where) < KEPT


def _filled(shape: Any, dtype: Any, device: Any, seed: int, make: Callable[..., Any]) -> Any:
    """A tensor filled by pieces, so that the float32 scratch stays small beside a row of 2^28."""
    import torch

    t = torch.empty(shape, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for piece in t.view(-1).split(1 << 24):
        piece.copy_(make(piece.numel(), device=device, generator=generator))
    return t
