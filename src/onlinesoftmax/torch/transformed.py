"""Derivatives of a call under torch.func, under vmap and in forward mode."""

from __future__ import annotations

from typing import Any

import torch

from ..core.call import Call
from . import ops
from .check import is_batched
from .gradients import (
    Wanted,
    accumulator_of,
    forward,
    gradients,
    outputs_of,
    saved_names,
    saved_of,
    slope_of,
    split_tensors,
    unmasked,
    with_tensors,
)

Tensor = torch.Tensor


def is_active() -> bool:
    """True under torch.func, and in forward mode, where tensors may be dual numbers."""
    return torch._C._are_functorch_transforms_active() or forward_mode()


def forward_mode() -> bool:
    """True inside torch.autograd.forward_ad.dual_level, and in torch.func.jvp: tensors may be dual numbers."""
    return torch.autograd.forward_ad._current_level >= 0


def apply(call: Call) -> Tensor:
    """The result by our kernels, with derivatives with respect to input, bias and a scale that is a tensor."""
    bare, tensors = split_tensors(call)
    y: Tensor = Transformed.apply(bare, tuple(tensors), *tensors.values())
    return y


class Transformed(torch.autograd.Function):
    """A call under torch.func or in forward mode."""

    @staticmethod
    def forward(bare: Call, names: tuple[str, ...], *tensors: Any) -> Any:
        found: Tensor = forward(with_tensors(bare, dict(zip(names, tensors, strict=True))))
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        bare, names, *tensors = inputs
        named = dict(zip(names, tensors, strict=True))
        needed = dict(zip(names, ctx.needs_input_grad[2:], strict=True))
        ctx.bare, ctx.names, ctx.wanted = bare, names, Wanted.of(named)
        ctx.saved = saved_names(with_tensors(bare, named), named, ("y",), needed.get("scale", False))
        named["y"] = output
        ctx.save_for_backward(*[named[name] for name in ctx.saved])
        if forward_mode():
            # jvp runs right after forward, so saving these tensors does not prolong their lives.
            ctx.save_for_forward(output, *tensors)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        saved = dict(zip(ctx.saved, ctx.saved_tensors, strict=True))
        call = with_tensors(ctx.bare, saved)
        again = torch.is_grad_enabled() or is_batched(dy)
        if not again and "lse" in call.operation.saved:
            # setup_context sees only the inputs and the result, so forward could not save lse; compute it here.
            wide = call.settings._replace(dtype=accumulator_of(call.x.dtype, call.x.dtype), keepdim=False)
            saved["lse"] = forward(call._replace(settings=wide))
        needs = zip(ctx.names, ctx.needs_input_grad[2:], strict=True)
        wanted = ctx.wanted._replace(names=tuple(name for name, needed in needs if needed))
        found = gradients(call, saved, {"dy": dy}, wanted, None if again else outputs_of)
        return None, None, *(found.get(name) for name in ctx.names)

    @staticmethod
    def jvp(ctx: Any, _bare: Any, _names: Any, *tangents: Any) -> Tensor:
        y, *tensors = ctx.saved_tensors
        call = with_tensors(ctx.bare, dict(zip(ctx.names, tensors, strict=True)))
        given = {name: t for name, t in zip(ctx.names, tangents, strict=True) if t is not None}
        x, options, dim = call.x, call.scores, call.settings.dim
        wide = accumulator_of(x.dtype, y.dtype)
        slope = slope_of(options, x, wide)
        dz: Any = 0.0
        if "x" in given:
            dz = given["x"].to(wide) * options.scale * slope
        if "scale" in given:
            dz = dz + given["scale"] * x.to(wide) * slope
        if "bias" in given:
            dz = dz + given["bias"]
        dz = dz.expand(x.shape)
        mask = unmasked(options, x, dim)
        if mask is not None:
            dz = dz.masked_fill(~mask, 0.0)
        tangent = ops.tangent(call.operation.name, saved_of(call, {"x": x, "y": y}, wide), dz)
        if call.operation.per_row and not call.settings.keepdim and x.dim():
            tangent = tangent.squeeze(dim)
        return tangent.to(y.dtype)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], bare: Call, names: tuple[str, ...], *tensors: Any) -> Any:
        (x, *others), (_, _, x_dim, *dims) = tensors, in_dims
        x = x.unsqueeze(0).expand(info.batch_size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
        # A 0-d sample becomes a row of one element.
        lone = x.dim() == 1
        x = x.unsqueeze(1) if lone else x
        others = [_batch_first(t, dim, x.dim()) for t, dim in zip(others, dims, strict=True)]
        settings = bare.settings._replace(dim=bare.settings.dim % (x.dim() - 1) + 1)
        y = Transformed.apply(bare._replace(settings=settings), names, x, *others)
        return (y.reshape(info.batch_size) if lone else y), 0


def _batch_first(t: Tensor, dim: int | None, ndim: int) -> Tensor:
    """A batch of tensors that broadcast to one sample, as one tensor that broadcasts to the batch of samples."""
    if dim is None:
        return t
    t = t.movedim(dim, 0)
    return t.reshape(t.shape[0], *[1] * (ndim - t.dim()), *t.shape[1:])
