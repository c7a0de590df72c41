"""The losses of torch tensors on a GPU by one kernel each, recorded by autograd.

PyTorch's operations would be a dozen launches, which take longer than to route the tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from ..core.processes import has_processes
from ..kernels import registry
from ..torch.fast_path import is_transformed
from ..torch.formulas import PLAIN_TYPES
from ..torch.gradients import is_traced
from ..torch.small_kernels import scale_gradient
from .results import Routed, WithLosses

Tensor = torch.Tensor


def own_loss(routed: Routed, values: Tensor, counts: Tensor, factor: float, z_loss: bool) -> Tensor | None:
    """The loss that the kernel of `route` has computed, while it is that of the results; else as `fused`.

    values, counts and factor are those of `routed` for its tokens alone.
    """
    name = "z_loss" if z_loss else "balance"
    if not isinstance(routed, WithLosses) or torch.compiler.is_compiling() or is_transformed():
        return fused(values, counts, factor, z_loss)
    found: Tensor | None = getattr(routed.losses, name)
    # Autograd recorded it, so it is not for no_grad; and the results may have changed since.
    if found is None or not torch.is_grad_enabled() or _may_have_changed(routed):
        return fused(values, counts, factor, z_loss)
    # The caller may change it in place, so no other caller gets it.
    routed.losses = routed.losses._replace(**{name: None})
    return found


def _may_have_changed(routed: Routed) -> bool:
    """True where results were changed in place, or may have been by a collective, which PyTorch does not count."""
    return has_processes() or any(t is not None and t._version for t in (routed.counts, routed.prob_sums, routed.lse))


def fused(values: Tensor, counts: Tensor, factor: float, z_loss: bool) -> Tensor | None:
    """A loss by a kernel, or None where none takes it; as `Fused` in losses.py."""
    if is_traced(values) or is_transformed() or type(values) not in PLAIN_TYPES or not values.is_cuda:
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
        ctx.factor, ctx.z_loss = factor, z_loss
        ctx.save_for_backward(slopes, values, counts)
        return found

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:
        slopes, values, counts = ctx.saved_tensors
        dy = dys[0]
        if torch.is_grad_enabled() and ctx.z_loss:
            # Autograd takes the slopes as constants, so the derivative of this gradient comes from the values.
            number = counts.sum()
            return values * (dy * (2 * ctx.factor / (number + (number == 0)))), None, None, None
        if torch.is_grad_enabled():
            return slopes * dy, None, None, None
        # This launch may begin while the kernel before it ends, and waits for it before it reads and writes.
        return scale_gradient(slopes, dy, in_place=False), None, None, None
