"""Derivatives of a call under torch.func, under vmap and in forward mode."""

from __future__ import annotations

from typing import Any

import torch

from ..core.call import Call
from . import formulas
from .autograd import Recorded
from .formulas import accumulator_of
from .gradients import outputs_of, saved_of, slope_of, unmasked
from .recording import Recording, recording_of, save, split_tensors, with_tensors

Tensor = torch.Tensor


def apply(call: Call) -> Tensor:
    """The result by our kernels, with derivatives with respect to input, bias and a scale that is a tensor."""
    y: Tensor = Transformed.apply(recording_of(call, RESULT, RESULT), *split_tensors(call)[1].values())
    return y


RESULT = ("y",)
"""The one output that `setup_context` sees; the gradient computes again what else it reads."""


class Transformed(Recorded):
    """A call under torch.func or in forward mode; its gradient is that of Recorded."""

    @staticmethod
    def forward(recording: Recording, *tensors: Any) -> Any:  # type: ignore[override]  # there is a setup_context
        named = dict(zip(recording.names, tensors, strict=True))
        return outputs_of(with_tensors(recording.call, named), RESULT)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        recording, *tensors = inputs
        call = with_tensors(recording.call, dict(zip(recording.names, tensors, strict=True)))
        needed = dict(zip(recording.names, ctx.needs_input_grad[1:], strict=True))
        save(ctx, recording_of(call, RESULT, RESULT, needed.get("scale", False)), (*tensors, output))
        if torch.autograd.forward_ad._current_level >= 0:
            # jvp runs right after forward, so saving these tensors does not prolong their lives.
            ctx.save_for_forward(output, *tensors)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Tensor:
        y, *tensors = ctx.saved_tensors
        names = ctx.recording.names
        call = with_tensors(ctx.recording.call, dict(zip(names, tensors, strict=True)))
        given = {name: t for name, t in zip(names, tangents, strict=True) if t is not None}
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
        tangent = formulas.tangent(call.operation.name, saved_of(call, {"x": x, "y": y}, wide), dz)
        if call.operation.per_row and not call.settings.keepdim and x.dim():
            tangent = tangent.squeeze(dim)
        return tangent.to(y.dtype)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], recording: Recording, *tensors: Any) -> Any:
        (x, *others), (_, x_dim, *dims) = tensors, in_dims
        x = x.unsqueeze(0).expand(info.batch_size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
        # A 0-d sample becomes a row of one element.
        lone = x.dim() == 1
        x = x.unsqueeze(1) if lone else x
        others = [_batch_first(t, dim, x.dim()) for t, dim in zip(others, dims, strict=True)]
        settings = recording.call.settings
        settings = settings._replace(dim=settings.dim % (x.dim() - 1) + 1)
        y = Transformed.apply(recording._replace(call=recording.call._replace(settings=settings)), x, *others)
        return (y.reshape(info.batch_size) if lone else y), 0


def _batch_first(t: Tensor, dim: int | None, ndim: int) -> Tensor:
    """A batch of tensors that broadcast to one sample, as one tensor that broadcasts to the batch of samples."""
    if dim is None:
        return t
    t = t.movedim(dim, 0)
    return t.reshape(t.shape[0], *[1] * (ndim - t.dim()), *t.shape[1:])
