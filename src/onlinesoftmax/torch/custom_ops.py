"""The kernels as custom operators of PyTorch, for torch.compile and torch.export: opaque, with fake implementations.

Only tracers come this way.  An eager call does not pay for the dispatcher.
"""

from __future__ import annotations

from typing import Any

import torch

from ..core.options import Fused
from . import run as kernels
from .autograd import PLAIN, gradients, keep
from .run import Call

Tensor = torch.Tensor

SETTINGS = (
    "str operation, int dim, ScalarType? dtype, bool keepdim, bool batch_invariant, str? backend, str? strategy, "
    "float number, float? softcap, bool causal, bool zero"
)
"""A Call, then what of a Fused is no tensor, in the order of `_settings`."""


def forward(call: Call, x: Tensor, fused: Fused | None) -> Tensor:
    """`kernels.forward` as an operator, with derivatives."""
    fused = fused or PLAIN
    scale = fused.scale if isinstance(fused.scale, Tensor) else None
    y: Tensor = torch.ops.onlinesoftmax.forward(x, fused.bias, scale, fused.mask, *_flat(call, fused))
    return y


def _flat(call: Call, fused: Fused) -> tuple[Any, ...]:
    number = 1.0 if isinstance(fused.scale, Tensor) else fused.scale
    return (*call, number, fused.softcap, fused.causal, fused.zero)


def _settings(flat: tuple[Any, ...], bias: Any, scale: Any, mask: Any) -> tuple[Call, Fused]:
    *call, number, softcap, causal, zero = flat
    return Call(*call), Fused(number if scale is None else scale, softcap, bias, mask, causal, zero)


@torch.library.custom_op(
    "onlinesoftmax::forward", mutates_args=(),
    schema=f"(Tensor x, Tensor? bias, Tensor? scale, Tensor? mask, {SETTINGS}) -> Tensor",
)  # fmt: skip
def _forward(x: Tensor, bias: Any, scale: Any, mask: Any, *flat: Any) -> Tensor:
    call, fused = _settings(flat, bias, scale, mask)
    return kernels.forward(call, x, None if fused.plain else fused)


@_forward.register_fake
def _(x: Tensor, bias: Any, scale: Any, mask: Any, *flat: Any) -> Tensor:
    operation, dim, dtype, keepdim = flat[:4]
    shape = list(x.shape)
    if operation == "logsumexp" and shape:
        dim %= len(shape)
        shape[dim : dim + 1] = [1] if keepdim else []
    return x.new_empty(shape, dtype=dtype or x.dtype)


@torch.library.custom_op(
    "onlinesoftmax::backward", mutates_args=(),
    schema=(
        "(Tensor dy, Tensor saved, Tensor? logits, Tensor? bias, Tensor? scale, Tensor? mask, ScalarType x_dtype, "
        f"bool through, {SETTINGS}) -> Tensor"
    ),
)  # fmt: skip
def _backward(
    dy: Tensor, saved: Tensor, logits: Any, bias: Any, scale: Any, mask: Any, x_dtype: torch.dtype, through: bool,
    *flat: Any,
) -> Tensor:  # fmt: skip
    call, fused = _settings(flat, bias, scale, mask)
    return kernels.backward(call, dy, saved, logits, None if fused.plain else fused, x_dtype, through)


@_backward.register_fake
def _(
    dy: Tensor, saved: Tensor, logits: Any, bias: Any, scale: Any, mask: Any, x_dtype: torch.dtype, through: bool,
    *flat: Any,
) -> Tensor:  # fmt: skip
    like = logits if flat[0] == "logsumexp" else saved
    return like.new_empty(like.shape, dtype=x_dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, scale, mask, *flat = inputs
    ctx.flat = flat
    keep(ctx, (x, bias, scale, mask, _settings(tuple(flat), None, None, None)), output)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    y, logits, bias, scale, mask = ctx.saved_tensors

    def kernel(
        _: Any, dy: Tensor, saved: Tensor, logits: Any, __: Any, dtype: torch.dtype, through: bool = True
    ) -> Any:
        return torch.ops.onlinesoftmax.backward(dy, saved, logits, bias, scale, mask, dtype, through, *ctx.flat)

    dx, dbias, dscale = gradients(
        ctx.settings, dy, y, logits, bias, scale, mask, ctx.needs_input_grad[:3], ctx.dtype, ctx.bias_like, kernel
    )
    return dx, dbias, dscale, None, *(None for _ in ctx.flat)


_forward.register_autograd(_gradients, setup_context=_setup_context)
