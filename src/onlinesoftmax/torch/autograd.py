"""Derivatives of the kernels: backward, double backward, forward mode, and torch.func.

A gradient is taken in two steps: in the scores, by the formulas of `reference.py`, then from the scores
to the logits, the bias and the scale.  One kernel does both where the bias and the scale want nothing.
Where the gradient itself is to be differentiated, the same formulas run as PyTorch operations.
"""

from __future__ import annotations

from typing import Any

import torch

from ..core.options import Fused
from . import eager
from . import run as kernels
from .run import Call

Tensor = torch.Tensor


def apply(call: Call, x: Tensor, fused: Fused | None) -> Tensor:
    """The operation by our kernels, with derivatives in x, the bias and a scale that is a tensor."""
    transformed = torch._C._are_functorch_transforms_active() or forward_mode()
    if fused is None:
        # PyTorch's own apply looks once more for transforms, for as long as all the rest takes.
        return _Transformed.apply(x, None, None, None, (call, PLAIN)) if transformed else _record(x, call)
    scale = fused.scale if isinstance(fused.scale, Tensor) else None
    rest = fused._replace(scale=None if scale is not None else fused.scale, bias=None, mask=None)
    return (_Transformed if transformed else _Recorded).apply(x, fused.bias, scale, fused.mask, (call, rest))


def reassemble(settings: tuple[Call, Fused], bias: Tensor | None, scale: Tensor | None, mask: Tensor | None) -> Any:
    """(call, fused) as `apply` was given them; fused is None where it asks for nothing."""
    call, fused = settings
    if bias is None and scale is None and mask is None:
        return call, None if fused.plain else fused
    return call, fused._replace(bias=bias, mask=mask, scale=fused.scale if scale is None else scale)


def keep(ctx: Any, inputs: tuple[Any, ...], y: Tensor) -> None:
    """Keep for the gradient no more than the output, unless it depends on the input itself."""
    x, bias, scale, mask, settings = inputs
    call, fused = settings
    ctx.settings, ctx.dtype = settings, x.dtype
    ctx.bias_like = None if bias is None else (bias.shape, bias.dtype)
    logsumexp, wants_scale = call.operation == "logsumexp", scale is not None and ctx.needs_input_grad[2]
    ctx.save_for_backward(
        y,
        x if logsumexp or fused.softcap is not None or wants_scale else None,
        bias if logsumexp else None,
        scale,
        mask if call.operation != "softmax" else None,
    )


def backward(ctx: Any, dy: Tensor) -> Any:
    """The gradients in what `apply` was given."""
    # Where the gradient is to be differentiated itself, by operations that can be.
    kernel = None if torch.is_grad_enabled() else kernels.backward
    y, logits, bias, scale, mask = ctx.saved_tensors
    needs = ctx.needs_input_grad
    dx, dbias, dscale = gradients(
        ctx.settings, dy, y, logits, bias, scale, mask, needs[:3], ctx.dtype, ctx.bias_like, kernel
    )
    return dx, dbias, dscale, None, None


class _Plain(torch.autograd.Function):
    """For eager mode with nothing fused: forward and context in one, which PyTorch calls in a third of the time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call) -> Tensor:
        y = kernels.forward(call, x, None)
        ctx.call, ctx.dtype = call, x.dtype
        if call.operation == "logsumexp":
            ctx.save_for_backward(y, x)
        else:
            ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        y, *saved = ctx.saved_tensors
        logits = saved[0] if saved else None
        if torch.is_grad_enabled():
            return _score_gradient(ctx.call, PLAIN, dy, y, logits).to(ctx.dtype), None
        return kernels.backward(ctx.call, dy, y, logits, None, ctx.dtype), None


_record = super(torch.autograd.Function, _Plain).apply


def _forward(x: Tensor, bias: Any, scale: Any, mask: Any, settings: tuple[Call, Fused]) -> Tensor:
    call, fused = reassemble(settings, bias, scale, mask)
    return kernels.forward(call, x, fused)


class _Recorded(torch.autograd.Function):
    """The same with something fused."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        y = _forward(*inputs)
        keep(ctx, inputs, y)
        return y

    backward = staticmethod(backward)


class _Transformed(torch.autograd.Function):
    """For torch.func and forward mode."""

    forward = staticmethod(_forward)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        keep(ctx, inputs, output)
        if forward_mode():
            # It runs at once, and keeps nothing alive for longer.
            ctx.save_for_forward(output, *inputs[:4])

    backward = staticmethod(backward)

    @staticmethod
    def jvp(ctx: Any, dx: Any, dbias: Any, dscale: Any, _mask: Any, _settings: Any) -> Tensor:
        y, x, bias, scale, mask = ctx.saved_tensors
        call, fused = reassemble(ctx.settings, bias, scale, mask)
        fused = fused or PLAIN
        factor, slope = _chain(fused, x)
        dz: Any = 0.0
        if dx is not None:
            dz = dx * factor * slope
        if dscale is not None:
            dz = dz + dscale * x * slope
        if dbias is not None:
            dz = dz + dbias
        dz = dz.expand(x.shape)
        counts = _counts(call, fused, x.shape, x.device)
        if counts is not None:
            dz = dz.masked_fill(~counts, 0.0)
        if call.operation == "softmax":
            return (y * (dz - (dz * y).sum(call.dim, keepdim=True))).to(y.dtype)
        if call.operation == "log_softmax":
            return (dz - (dz * y.exp()).sum(call.dim, keepdim=True)).to(y.dtype)
        z, _ = eager.torch_scores(call.operation, x, call.dim, fused, y.dtype)
        return (dz * torch.softmax(z, call.dim)).sum(call.dim, keepdim=call.keepdim).to(y.dtype)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, bias: Any, scale: Any, mask: Any, settings: tuple[Call, Fused]
    ) -> Any:
        x_dim, bias_dim, scale_dim, mask_dim, _ = in_dims
        call, fused = settings
        x = x.unsqueeze(0).expand(info.batch_size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
        # Each sample a number: a row of one.
        lone = x.dim() == 1
        x = x.unsqueeze(1) if lone else x
        if scale_dim is not None:
            # A kernel takes one scale: here they go to the logits.
            x, scale = x * scale.movedim(scale_dim, 0).reshape(-1, *[1] * (x.dim() - 1)), None
            fused = fused._replace(scale=1.0)
        bias, mask = (_batch_first(t, dim, x.dim()) for t, dim in ((bias, bias_dim), (mask, mask_dim)))
        dim = call.dim % (x.dim() - 1) + 1
        y = _Transformed.apply(x, bias, scale, mask, (call._replace(dim=dim), fused))
        return (y.reshape(info.batch_size) if lone else y), 0


PLAIN = Fused()


def forward_mode() -> bool:
    """Whether dual numbers may be about: inside torch.autograd.forward_ad.dual_level, or torch.func.jvp."""
    return torch.autograd.forward_ad._current_level >= 0


def _batch_first(t: Tensor | None, dim: int | None, ndim: int) -> Tensor | None:
    """A tensor that broadcasts to the input as it is for one sample, for a batch of them in dimension 0."""
    if t is None or dim is None:
        return t
    t = t.movedim(dim, 0)
    return t.reshape(t.shape[0], *[1] * (ndim - t.dim()), *t.shape[1:])


def gradients(
    settings: tuple[Call, Fused], dy: Tensor, y: Tensor, logits: Tensor | None, bias: Tensor | None,
    scale: Tensor | None, mask: Tensor | None, needs: tuple[bool, ...], dtype: torch.dtype,
    bias_like: tuple[torch.Size, torch.dtype] | None, kernel: Any,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients in the logits, the bias and the scale, those that are needed.

    Args:
        kernel: `kernels.backward` or its custom operator; None to use PyTorch operations, which have derivatives.
    """
    call, fused = reassemble(settings, bias, scale, mask)
    if not any(needs):
        return None, None, None
    if kernel is not None and not needs[1] and not needs[2]:
        return kernel(call, dy, y, logits, fused, dtype), None, None
    fused = fused or PLAIN
    scaled = fused.softcap is not None or isinstance(fused.scale, Tensor) or fused.scale != 1
    if kernel is None or (call.operation == "logsumexp" and scaled):
        dz = _score_gradient(call, fused, dy, y, logits)
    else:
        # The gradient in the scores; what is asked for is made from it.
        dz = kernel(call, dy, y, logits, fused, dtype, through=False)
    factor, slope = _chain(fused, logits)
    dx = (dz * (factor * slope)).to(dtype) if needs[0] else None
    dbias = dz.sum_to_size(bias_like[0]).to(bias_like[1]) if needs[1] and bias_like is not None else None
    dscale = None
    if needs[2]:
        assert logits is not None
        assert scale is not None
        dscale = (dz * slope * logits.to(dz.dtype)).sum().to(scale.dtype).reshape(scale.shape)
    return dx, dbias, dscale


def _chain(fused: Fused, logits: Tensor | None) -> tuple[Any, Any]:
    """(scale, slope of the softcap): the derivative of a score in its logit is their product."""
    slope: Any = 1.0
    if fused.softcap is not None:
        assert logits is not None
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        slope = 1 - torch.tanh(wide * fused.scale / fused.softcap) ** 2
    return fused.scale, slope


def _counts(call: Call, fused: Fused, shape: torch.Size, device: torch.device) -> Tensor | None:
    """Where scores count, of a shape that broadcasts; None where all do."""
    counts = fused.mask
    if fused.causal:
        causal = eager.causal_mask(torch.arange, call.operation, shape, call.dim, device=device)
        counts = causal if counts is None else counts & causal
    return counts


def _score_gradient(call: Call, fused: Fused, dy: Tensor, y: Tensor, logits: Tensor | None) -> Tensor:
    """The gradient in the scores, by operations that can be differentiated themselves; y is part of the graph."""
    dim = call.dim
    wide = torch.promote_types(torch.promote_types(y.dtype, dy.dtype), torch.float32)
    y, dy = y.to(wide), dy.to(wide)
    if call.operation == "softmax":
        return y * (dy - (dy * y).sum(dim, keepdim=True))
    if call.operation == "log_softmax":
        dz = dy - y.exp() * dy.sum(dim, keepdim=True)
        if fused.zero and y.dim() and y.shape[dim] > 1:
            dz = dz.masked_fill((y == 0).all(dim, keepdim=True), 0.0)
        counts = _counts(call, fused, y.shape, y.device)
        return dz if counts is None else dz.masked_fill(~counts, 0.0)
    assert logits is not None
    z, dead = eager.torch_scores("logsumexp", logits, dim, fused, y.dtype)
    if not call.keepdim and logits.dim():
        y, dy = y.unsqueeze(dim), dy.unsqueeze(dim)
    dz = dy * (z - y).exp()
    return dz if dead is None else torch.where(dead, 0.0, dz)
