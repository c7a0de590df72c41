"""The kernels as functions of tensors, forward and backward: no derivatives, no PyTorch semantics, no checks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..core.options import Fused
from .prepare import Place, aligned, beside, numbers_of, options_of, prepare, sides_of


class Call(NamedTuple):
    """What is asked for, beside tensors: hashable, and what a custom operator can be told.

    Attributes:
        operation: Name of a forward operation.
        dim: The softmax dimension.
        dtype: Dtype of the output; None for the input's.
        keepdim: Of logsumexp.
        batch_invariant, backend, strategy: As in the public functions.
    """

    operation: str
    dim: int
    dtype: torch.dtype | None = None
    keepdim: bool = False
    batch_invariant: bool = False
    backend: str | None = None
    strategy: str | None = None


def forward(
    call: Call, x: torch.Tensor, fused: Fused | None, out: torch.Tensor | None = None, place: Place | None = None
) -> torch.Tensor:
    """The operation on x; `place` describes `out`, which a batch-invariant call does not take."""
    operation, dim, dtype, keepdim, batch_invariant, backend, strategy = call
    if batch_invariant:
        return _batch_invariant(call, x, fused)
    sides = sides_of(fused, x.shape)
    prepared = prepare(
        operation, x.shape, x.stride(), x.dtype, x.device, aligned(x), dim, dtype, keepdim, place,
        options_of(fused, False, backend, strategy), sides,
    )  # fmt: skip
    return prepared(x, out, **numbers_of(fused))


def backward(
    call: Call, dy: torch.Tensor, saved: torch.Tensor, logits: torch.Tensor | None, fused: Fused | None,
    dtype: torch.dtype, through: bool = True,
) -> torch.Tensor:  # fmt: skip
    """The gradient in the input.

    Args:
        call: The call of the forward operation.
        dy: Gradient of its output.
        saved: Its output.
        logits: Its input: for logsumexp and for a softcap; may be None otherwise.
        fused: What it fused.
        dtype: Dtype of the input, and of the gradient.
        through: Whether through scale and softcap; the gradient is one in the scores if not.
    """
    operation, dim, _, keepdim, batch_invariant, backend, strategy = call
    options = options_of(fused, batch_invariant, backend, strategy)
    if operation == "logsumexp":
        assert logits is not None
        x, lse = logits, saved
        if not keepdim and x.dim():
            dy, lse = dy.unsqueeze(dim), lse.unsqueeze(dim)
        more = {"dy": dy, "lse": lse} | numbers_of(fused)
    else:
        x, more = saved, {"dy": dy} | numbers_of(fused)
        more.pop("bias", None)
        if operation == "softmax":
            # What was masked has y = 0, and so has its gradient.
            more.pop("mask", None)
            options = options._replace(causal=False)
    if not through and operation != "logsumexp":
        more.pop("scale", None), more.pop("softcap", None)
        options = options._replace(scale=None, softcap=False)
    elif fused is not None and fused.softcap is not None and through:
        assert logits is not None
        more["logits"] = logits
    if batch_invariant:
        x = _canonical(x, dim)
        more = {name: _canonical(t, dim) if name in ("dy", "logits") and t.shape == x.shape else t
                for name, t in more.items()}  # fmt: skip
    sides = tuple(beside(name, more[name], x.shape) for name in ("dy", "lse", "bias", "mask", "logits") if name in more)
    prepared = prepare(
        operation + "_backward", x.shape, x.stride(), x.dtype, x.device, aligned(x), dim, dtype, False, None,
        options, sides,
    )  # fmt: skip
    return prepared(x, None, **more)


def _batch_invariant(call: Call, x: torch.Tensor, fused: Fused | None) -> torch.Tensor:
    """Forward from memory that lies the same for any number of rows: one row after another, on 16 bytes."""
    x = _canonical(x, call.dim)
    prepared = prepare(
        call.operation, x.shape, x.stride(), x.dtype, x.device, True, call.dim, call.dtype, call.keepdim, None,
        options_of(fused, True, call.backend, call.strategy), sides_of(fused, x.shape),
    )  # fmt: skip
    return prepared(x, None, **numbers_of(fused))


def _canonical(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Give x with its rows one after another in memory; x itself where they are."""
    if not x.dim():
        return x
    last = x.movedim(dim, -1)
    if not (last.is_contiguous() and aligned(x)):
        last = last.clone(memory_format=torch.contiguous_format)
    return last.movedim(-1, dim)
