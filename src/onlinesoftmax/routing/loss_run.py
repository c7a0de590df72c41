"""The losses of torch tensors on a GPU by one kernel each, recorded by autograd.

PyTorch's operations would be a dozen launches, which take longer than to route the tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from ..kernels import registry
from ..torch.fast_path import is_transformed
from ..torch.formulas import PLAIN_TYPES

Tensor = torch.Tensor


def fused(values: Tensor, counts: Tensor, factor: float, z_loss: bool) -> Tensor | None:
    """A loss by a kernel, or None where none takes it; as `Fused` in losses.py."""
    if torch.compiler.is_compiling() or is_transformed() or type(values) not in PLAIN_TYPES or not values.is_cuda:
        return None
    if registry.unavailable("cuda") is not None or not (values.is_contiguous() and counts.is_contiguous()):
        return None
    # PyTorch's sums of counts are int64.
    counts = counts.int()
    from .kernels import losses_launch

    if not losses_launch.takes(counts, values):
        return None
    found: Tensor = _Loss.apply(values, counts, factor, z_loss)
    return found


class _Loss(torch.autograd.Function):
    """A loss by a kernel, which also writes its derivative."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, counts: Tensor, factor: float, z_loss: bool) -> Tensor:
        from .kernels import losses_launch

        found, slopes = losses_launch.loss(counts, values, factor, z_loss)
        ctx.z_loss = z_loss
        ctx.save_for_backward(slopes, *([values] if z_loss else []))
        return found

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:
        slopes, *values = ctx.saved_tensors
        # Of the z-loss, slopes is one number.
        dx = slopes * dys[0]
        return values[0] * dx if ctx.z_loss else dx, None, None, None
