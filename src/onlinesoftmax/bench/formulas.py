"""PyTorch's side: its own gradients, and everything written out in its operations, to be compiled or run as it is."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from .cases import Case
from .inputs import SCALE, SOFTCAP

Function = Callable[..., Any]
"""From the tensors of a case, in the order of `make_inputs`, to the output."""


def own(case: Case) -> Function:
    """What PyTorch itself runs for the case, without autograd."""
    import torch

    dim, dtype = case.dim, getattr(torch, case.dtype)
    if case.fused or case.operation == "logsumexp_backward":
        # Its autograd writes out the gradient of logsumexp too.
        return written_out(case)
    if not case.backward:
        forward = getattr(torch, case.operation)
        return lambda x: forward(x, dim)
    data = getattr(torch.ops.aten, f"_{case.operation}_data")
    return lambda y, dy: data(dy, y, dim, dtype)


def written_out(case: Case, wide: bool = False) -> Function:
    """The case in elementary operations, for eager or torch.compile.

    Args:
        case: A gradient, or a softmax with or without something fused.
        wide: Compute a softmax's scores in float32 at least, and round once.
    """
    import torch

    if case.backward:
        return _gradient(case)
    dtype = getattr(torch, case.dtype)
    up = torch.promote_types(dtype, torch.float32) if wide else dtype
    forward = getattr(torch, case.operation)
    return lambda x, *beside: forward(_scores(case, x.to(up), beside), case.dim).to(dtype)


def _gradient(case: Case) -> Function:
    import torch

    dim, dtype = case.dim, getattr(torch, case.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    if case.forward == "logsumexp":
        return lambda x, lse, dlse: dlse.unsqueeze(dim) * (x - lse.unsqueeze(dim)).exp()

    def softmax(y: Any, dy: Any) -> Any:
        y, dy = y.to(wide), dy.to(wide)
        return (y * (dy - (dy * y).sum(dim, keepdim=True))).to(dtype)

    def log_softmax(y: Any, dy: Any) -> Any:
        y, dy = y.to(wide), dy.to(wide)
        return (dy - y.exp() * dy.sum(dim, keepdim=True)).to(dtype)

    return softmax if case.forward == "softmax" else log_softmax


def _scores(case: Case, x: Any, beside: tuple[Any, ...]) -> Any:
    import torch

    more = iter(beside)
    if "scale" in case.fused:
        x = x * SCALE
    if "softcap" in case.fused:
        x = SOFTCAP * torch.tanh(x / SOFTCAP)
    if "bias" in case.fused:
        x = x + next(more)
    if "mask" in case.fused:
        # masked_fill with the mask as it is: it would have to be inverted first.
        x = torch.where(next(more), x, -inf)
    if "causal" in case.fused:
        queries, keys = case.shape[case.dim - 1 : case.dim + 1]
        # Made in the call: a small part of the time, and torch.compile makes nothing of it.
        last = torch.arange(keys - queries, keys, device=x.device).unsqueeze(1)
        seen = torch.arange(keys, device=x.device) <= last
        x = torch.where(seen.view(queries, keys, *[1] * (len(case.shape) - 1 - case.dim)), x, -inf)
    return x
