"""Forward and backward of a call by our kernels, and the gradients in its input, bias and scale.

A gradient is taken in two steps: in the scores, by the operation's gradient, then from the scores to the logits, the
bias and the scale.  One kernel does both where no gradient in the bias or the scale is wanted.  Where the gradient
itself is to be differentiated, the formulas of ops.py run as PyTorch operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..core.call import Call, Settings
from ..core.operations import OPERATIONS
from ..core.options import ScoreOptions, causal_mask, softcap_slope
from . import eager, ops
from .prepare import aligned, run

Tensor = torch.Tensor


def forward(call: Call, outputs: tuple[str, ...] = ("y",)) -> Any:
    """The outputs of a forward call by our kernels; the call has been checked."""
    if call.settings.choice.batch_invariant:
        # From memory that lies the same for any number of rows: contiguous rows that begin on 16 bytes.
        call = call._replace(x=_canonical(call.x, call.settings.dim))
    return run(call, outputs)


class Kept(NamedTuple):
    """What a forward call keeps for its gradient.

    Attributes:
        y: Its result, where the gradient reads it.
        x: Its input, where the gradient, a softcap or the gradient of a scale reads it.
        lse: Logsumexp of every row in float32 or float64, where the gradient reads it.
    """

    y: Tensor | None
    x: Tensor | None = None
    lse: Tensor | None = None


def forward_to_keep(call: Call) -> tuple[Tensor, Tensor | None]:
    """(result, lse): lse is None where the gradient does not read it."""
    outputs = call.operation.kept_outputs
    if len(outputs) == 1:
        return forward(call), None
    x, dtype = call.x, call.settings.dtype or call.x.dtype
    if dtype == accumulator_of(x.dtype, dtype):
        # The result is the logsumexp already, with every digit of it.
        y = forward(call)
        return y, (y.squeeze(call.settings.dim) if call.settings.keepdim and x.dim() else y)
    y, lse = forward(call, outputs)
    return y, lse


def accumulator_of(dtype: torch.dtype, out_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which states are kept for an input and a result of these dtypes."""
    return torch.promote_types(torch.promote_types(dtype, out_dtype), torch.float32)


def keeps_x(call: Call, wants_scale: bool) -> bool:
    """True where the gradient reads the input of the forward call."""
    return "x" in call.operation.saved or call.scores.softcap is not None or wants_scale


def backward(call: Call, kept: Kept, dy: Tensor, dtype: torch.dtype, through: bool = True) -> Tensor:
    """The gradient in the input, by a kernel.

    Args:
        call: The forward call; of its tensors only those of the score options are read.
        kept: What it kept.
        dy: Gradient of its result.
        dtype: Dtype of the gradient.
        through: True for the gradient in the logits; False for that in the scores.
    """
    found: Tensor = run(gradient_call(call, kept, dy, dtype, through))
    return found


def gradient_call(call: Call, kept: Kept, dy: Tensor, dtype: torch.dtype, through: bool = True) -> Call:
    """The call of the gradient operation.  Arguments as for `backward`."""
    operation, settings = call.operation, call.settings
    gradient = OPERATIONS[operation.gradient]
    x = kept.x if gradient.scores else kept.y
    assert x is not None
    beside = {"dy": dy}
    if "lse" in gradient.row_operands:
        assert kept.lse is not None
        beside["lse"] = kept.lse
    if operation.per_row and x.dim():
        dim = settings.dim
        beside = {name: t if name == "dy" and settings.keepdim else t.unsqueeze(dim) for name, t in beside.items()}
    options = call.options
    if options is not None:
        options = options.of(gradient.options)
        if not through and not gradient.scores:
            options = options._replace(scale=1.0, softcap=None)
        if options.softcap is not None and through:
            assert kept.x is not None
            beside["logits"] = kept.x
        options = None if options.plain else options
    settings = Settings(settings.dim, dtype, False, settings.choice)
    if settings.choice.batch_invariant:
        beside = {
            name: _canonical(t, settings.dim) if t.shape == x.shape and name not in gradient.row_operands else t
            for name, t in beside.items()
        }
        x = _canonical(x, settings.dim)
    return Call(gradient, x, settings, options, None, beside)


def _canonical(x: Tensor, dim: int) -> Tensor:
    """X with contiguous rows that begin on 16 bytes; x itself where they are."""
    if not x.dim():
        return x
    last = x.movedim(dim, -1)
    if not (last.is_contiguous() and aligned(x)):
        last = last.clone(memory_format=torch.contiguous_format)
    return last.movedim(-1, dim)


class Wanted(NamedTuple):
    """The gradients that are asked for.

    Attributes:
        x, bias, scale: True where the gradient in this tensor is wanted.
        dtype: Dtype of the input.
        bias_like: Shape and dtype of the bias; None without one.
    """

    x: bool
    bias: bool
    scale: bool
    dtype: torch.dtype
    bias_like: tuple[torch.Size, torch.dtype] | None = None


Kernel = Callable[[Call, Kept, Tensor, torch.dtype, bool], Tensor]
"""`backward`, or its custom operator."""


def gradients(
    call: Call, kept: Kept, dy: Tensor, wanted: Wanted, kernel: Kernel | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients in the input, the bias and the scale; None for those that are not wanted.

    Args:
        call: The forward call; of its tensors only those of the score options are read.
        kept: What it kept.
        dy: Gradient of its result.
        wanted: What is asked for.
        kernel: Computes the gradient in the input; None to use PyTorch operations, which have derivatives.
    """
    if not (wanted.x or wanted.bias or wanted.scale):
        return None, None, None
    if kernel is not None and not wanted.bias and not wanted.scale:
        return kernel(call, kept, dy, wanted.dtype, True), None, None
    options = call.scores
    scaled = options.softcap is not None or isinstance(options.scale, Tensor) or options.scale != 1
    if kernel is None or (call.operation.per_row and scaled):
        dz = score_gradient(call, kept, dy)
    else:
        # The gradient in the scores; what is asked for is made from it.
        dz = kernel(call, kept, dy, wanted.dtype, False)
    slope = slope_of(options, kept.x)
    dx = (dz * (options.scale * slope)).to(wanted.dtype) if wanted.x else None
    dbias = dscale = None
    if wanted.bias and wanted.bias_like is not None:
        shape, dtype = wanted.bias_like
        dbias = dz.sum_to_size(shape).to(dtype)
    if wanted.scale:
        assert kept.x is not None
        dscale = (dz * slope * kept.x.to(dz.dtype)).sum().to(options.scale.dtype).reshape(options.scale.shape)
    return dx, dbias, dscale


def slope_of(options: ScoreOptions, x: Tensor | None) -> Any:
    """The derivative of a score in scale * x."""
    if options.softcap is None:
        return 1.0
    assert x is not None
    return softcap_slope(eager.FUNCTIONS, x.to(torch.promote_types(x.dtype, torch.float32)), options)


def counted(options: ScoreOptions, x: Tensor, dim: int) -> Tensor | None:
    """The elements that count, of a shape that broadcasts to x; None where all do."""
    mask = options.mask
    if options.causal:
        seen = causal_mask(torch.arange, x.shape, dim, device=x.device)
        mask = seen if mask is None else mask & seen
    return mask


def score_gradient(call: Call, kept: Kept, dy: Tensor) -> Tensor:
    """The gradient in the scores by PyTorch operations; what was kept is part of their graph."""
    operation, (dim, _, keepdim, _) = call.operation, call.settings
    like = kept.x if kept.y is None else kept.y
    assert like is not None
    wide = torch.promote_types(torch.promote_types(like.dtype, dy.dtype), torch.float32)
    dy = dy.to(wide)
    if operation.per_row and not keepdim and like.dim():
        dy = dy.unsqueeze(dim)
    return ops.GRADIENTS[operation.name](saved_of(call, kept, wide), dy)


def saved_of(call: Call, kept: Kept, dtype: torch.dtype) -> ops.Saved:
    """What the formulas of ops.py read."""
    operation, dim, options = call.operation, call.settings.dim, call.scores
    z = dead = None
    if "x" in operation.saved:
        assert kept.x is not None
        z, dead = eager.scores_of(kept.x, dim, options, dtype)
    y = kept.y if z is None else z
    assert y is not None
    mask = counted(options, y, dim)
    return ops.Saved(y.to(dtype), z, mask, dead, options.zero, dim)
