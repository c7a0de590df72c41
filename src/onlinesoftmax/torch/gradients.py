"""Forward and backward of a call by our kernels, and the gradients with respect to its input, bias and scale.

There are two steps.  The operation's gradient gives the gradient with respect to the scores; the chain rule then gives
the gradients with respect to the logits, the bias and the scale.  One kernel does both steps if neither the bias nor
the scale needs a gradient.  If the gradient itself is to be differentiated, PyTorch operations compute the formulas of
ops.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..core.call import Call, Settings
from ..core.options import ScoreOptions, causal_mask, softcap_slope
from ..ops import OPERATIONS
from . import eager, ops
from .check import check_first_derivative
from .prepare import aligned, run

Tensor = torch.Tensor


def forward(call: Call, outputs: tuple[str, ...] = ("y",)) -> Any:
    """The outputs of a forward call by our kernels; the call has been checked."""
    if call.settings.choice.batch_invariant:
        # The strides and the alignment of the input must not depend on the number of rows.
        call = call._replace(x=canonical(call.x, call.settings.dim))
    return run(call, outputs)


def outputs_of(call: Call, outputs: tuple[str, ...]) -> tuple[Tensor, ...]:
    """The outputs of a forward call, as `forward` computes them, in a tuple even if there is only one."""
    found = forward(call, outputs)
    return found if isinstance(found, tuple) else (found,)


class Kept(NamedTuple):
    """Tensors that a forward call keeps for its gradient; None for those that the gradient does not read.

    Attributes:
        y: Its result.
        x: Its input, which a softcap and the gradient with respect to a scale also read.
        lse: Logsumexp of every row in float32 or float64.
    """

    y: Tensor | None
    x: Tensor | None = None
    lse: Tensor | None = None


def forward_to_keep(call: Call) -> tuple[Tensor, Tensor | None]:
    """(result, lse): lse is None where the gradient does not read it."""
    if len(call.operation.kept_outputs) == 1:
        return forward(call), None
    outputs = outputs_to_keep(call)
    if len(outputs) == 1:
        y = forward(call)
        return y, lse_of(y, call.settings)
    y, lse = forward(call, outputs)
    return y, lse


def outputs_to_keep(call: Call) -> tuple[str, ...]:
    """Names of the outputs of a call with a gradient: the result, and lse where another tensor has to hold it."""
    operation, dtype = call.operation, call.settings.dtype or call.x.dtype
    # In the dtype of lse, the result of logsumexp is lse.
    same = dtype == accumulator_of(call.x.dtype, dtype)
    return operation.always if same else operation.kept_outputs


def lse_of(y: Tensor, settings: Settings) -> Tensor:
    """The logsumexp of each row from the result of logsumexp, without the dimension that `keepdim` keeps."""
    return y.squeeze(settings.dim) if settings.keepdim and y.dim() else y


def accumulator_of(dtype: torch.dtype, out_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which states are kept for an input and a result of these dtypes."""
    return torch.promote_types(torch.promote_types(dtype, out_dtype), torch.float32)


def keeps_x(call: Call, wants_scale: bool) -> bool:
    """True where the derivatives of the call read its input."""
    return "x" in call.operation.saved or call.scores.softcap is not None or wants_scale


def backward(call: Call, kept: Kept, dy: Tensor, dtype: torch.dtype, to_logits: bool = True) -> Tensor:
    """The gradient with respect to the logits or the scores, by a kernel.

    Args:
        call: The forward call; of its tensors only those of the score options are read.
        kept: The tensors that the forward call kept.
        dy: Gradient with respect to its result.
        dtype: Dtype of the gradient.
        to_logits: True for the gradient with respect to the logits, False for the gradient with respect to the scores.
            False is allowed only where logsumexp has no scale or softcap: its gradient kernel always applies them.
    """
    found: Tensor = run(gradient_call(call, kept, dy, dtype, to_logits))
    return found


def gradient_call(call: Call, kept: Kept, dy: Tensor, dtype: torch.dtype, to_logits: bool = True) -> Call:
    """The call of the gradient operation.  Arguments as for `backward`."""
    operation, settings = call.operation, call.settings
    gradient = OPERATIONS[operation.gradient_name]
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
        if not to_logits and not gradient.scores:
            options = options._replace(scale=1.0, softcap=None)
        if options.softcap is not None and to_logits:
            assert kept.x is not None
            beside["logits"] = kept.x
        options = None if options.plain else options
    settings = settings._replace(dtype=dtype, keepdim=False)
    if settings.choice.batch_invariant:
        beside = {
            name: canonical(t, settings.dim) if t.shape == x.shape and name not in gradient.row_operands else t
            for name, t in beside.items()
        }
        x = canonical(x, settings.dim)
    return Call(gradient, x, settings, options, None, beside)


def canonical(x: Tensor, dim: int) -> Tensor:
    """A copy of x with contiguous rows and its first element on 16 bytes; x itself if both already hold."""
    if not x.dim():
        return x
    last = x.movedim(dim, -1)
    if not (last.is_contiguous() and aligned(x)):
        last = last.clone(memory_format=torch.contiguous_format)
    return last.movedim(-1, dim)


class Wanted(NamedTuple):
    """The gradients that the caller wants.

    Attributes:
        x, bias, scale: True where the gradient with respect to this tensor is wanted.
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
    """Gradients with respect to the input, the bias and the scale; None for those that are not wanted.

    Args:
        call: The forward call; of its tensors only those of the score options are read.
        kept: The tensors that the forward call kept.
        dy: Gradient with respect to its result.
        wanted: The gradients to compute.
        kernel: Function like `backward`; None to use PyTorch operations, which have derivatives.
    """
    if not (wanted.x or wanted.bias or wanted.scale):
        return None, None, None
    if call.settings.part is not None:
        # PyTorch's operations would take the shard for a whole row.
        check_first_derivative("the gradient of a softmax of sharded rows")
    if kernel is not None and not wanted.bias and not wanted.scale:
        return kernel(call, kept, dy, wanted.dtype, True), None, None
    options = call.scores
    scaled = options.softcap is not None or isinstance(options.scale, Tensor) or options.scale != 1
    if kernel is None or (call.operation.per_row and scaled):
        dz = score_gradient(call, kept, dy)
    else:
        # The gradient with respect to the scores; the wanted gradients are computed from it.
        dz = kernel(call, kept, dy, torch.promote_types(wanted.dtype, dy.dtype), False)
    slope = slope_of(options, kept.x, dz.dtype)
    dx = (dz * (options.scale * slope)).to(wanted.dtype) if wanted.x else None
    dbias = dscale = None
    if wanted.bias and wanted.bias_like is not None:
        shape, dtype = wanted.bias_like
        dbias = dz.sum_to_size(shape).to(dtype)
    if wanted.scale:
        assert kept.x is not None
        dscale = (dz * slope * kept.x.to(dz.dtype)).sum_to_size(options.scale.shape).to(options.scale.dtype)
    return dx, dbias, dscale


def slope_of(options: ScoreOptions, x: Tensor | None, dtype: torch.dtype) -> Any:
    """The derivative of the scores with respect to scale * x, for a result of this dtype."""
    if options.softcap is None:
        return 1.0
    assert x is not None
    return softcap_slope(eager.FUNCTIONS, x.to(accumulator_of(x.dtype, dtype)), options)


def unmasked(options: ScoreOptions, x: Tensor, dim: int) -> Tensor | None:
    """True for the elements that are not masked, in a shape that broadcasts to x; None without a mask."""
    mask = options.mask
    if options.causal:
        seen = causal_mask(torch.arange, x.shape, dim, device=x.device)
        mask = seen if mask is None else mask & seen
    return mask


def score_gradient(call: Call, kept: Kept, dy: Tensor) -> Tensor:
    """The gradient with respect to the scores by PyTorch operations, whose autograd graph includes the kept tensors."""
    operation, (dim, _, keepdim, *_) = call.operation, call.settings
    like = kept.x if kept.y is None else kept.y
    assert like is not None
    wide = accumulator_of(like.dtype, dy.dtype)
    dy = dy.to(wide)
    if operation.per_row and not keepdim and like.dim():
        dy = dy.unsqueeze(dim)
    saved = saved_of(call, kept, wide)
    dz = ops.GRADIENTS[operation.name](saved, dy)
    # A masked element has no gradient, not even in a row that holds NaN.
    return dz if saved.unmasked is None else dz.masked_fill(~saved.unmasked, 0.0)


def saved_of(call: Call, kept: Kept, dtype: torch.dtype) -> ops.Saved:
    """The tensors and settings that the formulas of ops.py read."""
    operation, dim, options = call.operation, call.settings.dim, call.scores
    z = fully_masked_rows = None
    if "x" in operation.saved:
        assert kept.x is not None
        z, fully_masked_rows = eager.scores_of(kept.x, dim, options, dtype)
    y = kept.y if z is None else z
    assert y is not None
    mask = unmasked(options, y, dim)
    return ops.Saved(y.to(dtype), z, mask, fully_masked_rows, options.zero, dim)
