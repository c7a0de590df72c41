"""Derivatives of a call for autograd: backward, double backward, forward mode, and torch.func.

Autograd finds tensors only among the arguments of `apply`, so `apply` takes the call without its tensors, then the
tensors one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..core.call import NOTHING, Call, Settings
from ..core.operations import Operation
from ..ops import OPERATIONS
from . import ops
from .check import is_batched
from .gradients import (
    Kept,
    Wanted,
    accumulator_of,
    backward,
    forward,
    forward_to_keep,
    gradients,
    keeps_x,
    saved_of,
    slope_of,
    unmasked,
)
from .launches import Launch, launch_of

Tensor = torch.Tensor


def apply(call: Call) -> Tensor:
    """The result by our kernels, with derivatives with respect to input, bias and a scale that is a tensor."""
    transformed = torch._C._are_functorch_transforms_active() or forward_mode()
    if call.options is None and not transformed:
        # Function.apply would check for transforms once more, which costs host time.
        result: Tensor = _apply_plain(call.x, call.operation, call.settings, None)
        return result
    bare, tensors = split_tensors(call)
    return (_Transformed if transformed else _Recorded).apply(bare, *tensors)


def split_tensors(call: Call) -> tuple[Call, tuple[Tensor | None, ...]]:
    """The call without its tensors, and (x, bias, scale, mask)."""
    options = call.scores
    scale = options.scale if isinstance(options.scale, Tensor) else None
    rest = options._replace(scale=1.0 if scale is not None else options.scale, bias=None, mask=None)
    return call._replace(x=None, options=rest), (call.x, options.bias, scale, options.mask)


def with_tensors(bare: Call, tensors: tuple[Any, ...]) -> Call:
    """The call that `split_tensors` was given."""
    x, bias, scale, mask = tensors
    options = bare.scores._replace(bias=bias, mask=mask)
    if scale is not None:
        options = options._replace(scale=scale)
    return bare._replace(x=x, options=None if options.plain else options)


def forward_mode() -> bool:
    """True inside torch.autograd.forward_ad.dual_level, and in torch.func.jvp: tensors may be dual numbers."""
    return torch.autograd.forward_ad._current_level >= 0


def _kernel_for(dy: Tensor) -> Any:
    """The function of the gradient kernels; None where PyTorch's operations compute the gradient.

    PyTorch's operations compute a gradient that is itself to be differentiated, and a batch of gradients.
    """
    return None if torch.is_grad_enabled() or is_batched(dy) else backward


class _Plain(torch.autograd.Function):
    """A call without score options in eager mode; it saves the host time that `_Recorded` spends on options."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, operation: Operation, settings: Settings, launch: Launch | None) -> Tensor:
        ctx.operation, ctx.settings, ctx.dtype = operation, settings, x.dtype
        y: Tensor
        if launch is not None and not launch.keeps_lse:
            y = launch.run(x, None, NOTHING)
            ctx.save_for_backward(y)
            return y
        y, lse = forward_to_keep(Call(operation, x, settings)) if launch is None else launch.run(x, None, NOTHING)
        if "x" in operation.saved:
            ctx.save_for_backward(x, lse)
        else:
            ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        call = Call(ctx.operation, None, ctx.settings)
        kept = Kept(None, *ctx.saved_tensors) if "x" in call.operation.saved else Kept(*ctx.saved_tensors)
        kernel = _kernel_for(dy)
        wanted = Wanted(True, False, False, ctx.dtype)
        return gradients(call, kept, dy, wanted, kernel)[0], None, None, None


_apply_plain = super(torch.autograd.Function, _Plain).apply
"""`_Plain.apply` of the base class in C++, without the check for transforms in torch.autograd.Function."""


def prepared_call(call: Call) -> Callable[[Tensor, Tensor | None], Tensor]:
    """The function (x, out) of cacheable calls like this one, whose arguments have been checked."""
    recorded = call.x.requires_grad and torch.is_grad_enabled()
    operation, settings, launch = call.operation, call.settings, launch_of(call, recorded)
    if recorded:
        return lambda x, _: _apply_plain(x, operation, settings, launch)
    return launch.run


def save_for_gradient(ctx: Any, call: Call, y: Tensor, lse: Tensor | None, wants_scale: bool) -> None:
    """Save in a context the tensors that the gradient reads, and no others."""
    ctx.bare, (x, bias, scale, mask) = split_tensors(call)
    ctx.dtype, ctx.bias_like = call.x.dtype, None if bias is None else (bias.shape, bias.dtype)
    x_is_saved = "x" in call.operation.saved
    gradient = OPERATIONS[call.operation.gradient_name]
    ctx.save_for_backward(
        None if x_is_saved else y,
        x if keeps_x(call, wants_scale) else None,
        lse,
        bias if "bias" in gradient.options else None,
        scale,
        mask if "mask" in gradient.options else None,
    )


def saved_call(ctx: Any) -> tuple[Call, Kept]:
    """(call, kept) from a context; the call's input is not among its tensors."""
    y, x, lse, bias, scale, mask = ctx.saved_tensors
    return with_tensors(ctx.bare, (None, bias, scale, mask)), Kept(y, x, lse)


def _wanted(ctx: Any) -> Wanted:
    """The gradients that autograd asks `_Recorded` and `_Transformed` for."""
    _, x, bias, scale, _ = ctx.needs_input_grad
    return Wanted(x, bias, scale, ctx.dtype, ctx.bias_like)


class _Recorded(torch.autograd.Function):
    """A call with score options in eager mode."""

    @staticmethod
    def forward(ctx: Any, bare: Call, *tensors: Any) -> Tensor:
        call = with_tensors(bare, tensors)
        y, lse = forward_to_keep(call)
        save_for_gradient(ctx, call, y, lse, ctx.needs_input_grad[3])
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        call, kept = saved_call(ctx)
        wanted = _wanted(ctx)
        kernel = _kernel_for(dy)
        return None, *gradients(call, kept, dy, wanted, kernel), None


class _Transformed(torch.autograd.Function):
    """A call under torch.func or in forward mode."""

    @staticmethod
    def forward(bare: Call, *tensors: Any) -> Any:
        found: Tensor = forward(with_tensors(bare, tensors))
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        bare, *tensors = inputs
        save_for_gradient(ctx, with_tensors(bare, tuple(tensors)), output, None, ctx.needs_input_grad[3])
        if forward_mode():
            # jvp runs right after forward, so saving these tensors does not prolong their lives.
            ctx.save_for_forward(output, *tensors)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        call, kept = saved_call(ctx)
        kernel = _kernel_for(dy)
        if kernel is not None and "lse" in call.operation.saved:
            # setup_context sees only the inputs and the result, so forward could not save lse; compute it here.
            assert kept.x is not None
            wide = call.settings._replace(dtype=accumulator_of(kept.x.dtype, kept.x.dtype), keepdim=False)
            kept = kept._replace(lse=forward(call._replace(x=kept.x, settings=wide)))
        wanted = _wanted(ctx)
        return None, *gradients(call, kept, dy, wanted, kernel), None

    @staticmethod
    def jvp(ctx: Any, _bare: Any, dx: Any, dbias: Any, dscale: Any, _mask: Any) -> Tensor:
        y, *tensors = ctx.saved_tensors
        call = with_tensors(ctx.bare, tuple(tensors))
        x, options, (dim, _, keepdim, *_) = call.x, call.scores, call.settings
        wide = accumulator_of(x.dtype, y.dtype)
        slope = slope_of(options, x, wide)
        dz: Any = 0.0
        if dx is not None:
            dz = dx.to(wide) * options.scale * slope
        if dscale is not None:
            dz = dz + dscale * x.to(wide) * slope
        if dbias is not None:
            dz = dz + dbias
        dz = dz.expand(x.shape)
        mask = unmasked(options, x, dim)
        if mask is not None:
            dz = dz.masked_fill(~mask, 0.0)
        kept = Kept(None if "x" in call.operation.saved else y, x)
        tangent = ops.TANGENTS[call.operation.name](saved_of(call, kept, wide), dz)
        if call.operation.per_row and not keepdim and x.dim():
            tangent = tangent.squeeze(dim)
        return tangent.to(y.dtype)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], bare: Call, *tensors: Any) -> Any:
        (x, bias, scale, mask), (_, x_dim, bias_dim, scale_dim, mask_dim) = tensors, in_dims
        x = x.unsqueeze(0).expand(info.batch_size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
        # A 0-d sample becomes a row of one element.
        lone = x.dim() == 1
        x = x.unsqueeze(1) if lone else x
        scale, bias, mask = (
            _batch_first(t, dim, x.dim()) for t, dim in ((scale, scale_dim), (bias, bias_dim), (mask, mask_dim))
        )
        settings = bare.settings._replace(dim=bare.settings.dim % (x.dim() - 1) + 1)
        y = _Transformed.apply(bare._replace(settings=settings), x, bias, scale, mask)
        return (y.reshape(info.batch_size) if lone else y), 0


def _batch_first(t: Tensor | None, dim: int | None, ndim: int) -> Tensor | None:
    """A batch of tensors that broadcast to one sample, as one tensor that broadcasts to the batch of samples."""
    if t is None or dim is None:
        return t
    t = t.movedim(dim, 0)
    return t.reshape(t.shape[0], *[1] * (ndim - t.dim()), *t.shape[1:])
