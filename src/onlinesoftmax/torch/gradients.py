"""Forward and backward of a call by our kernels, and the gradients with respect to its input, bias and scale.

There are two steps.  The operation's gradient gives the gradient with respect to the scores; the chain rule then gives
the gradients with respect to the logits, the bias and the scale.  One kernel does both steps if neither the bias nor
the scale needs a gradient.  If the gradient itself is to be differentiated, PyTorch operations compute the formulas of
formulas.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core.call import Call
from ..core.options import ScoreOptions, causal_mask, softcap_slope
from ..kernels import registry
from ..ops import OPERATIONS
from . import eager, formulas
from .arguments import TRACED_TYPES, check_first_derivative
from .fast_path import is_recorded
from .formulas import accumulator_of
from .prepare import aligned, run
from .recording import GradientTypes, Tensors, unread_statistics

Tensor = torch.Tensor


def is_traced(x: Tensor) -> bool:
    """True where a tracer must see an operator in place of a launch."""
    return torch.compiler.is_compiling() or type(x).__name__ in TRACED_TYPES or is_recorded()


def reads_cuda(x: Tensor) -> bool:
    """True for a tensor whose memory our CUDA kernels can read."""
    return x.is_cuda and registry.unavailable("cuda") is None and not x.is_neg()


def adjacent(rows: Tensor) -> Tensor:
    """Rows (rows, elements), copied if the elements of a row are not adjacent in memory."""
    return rows if rows.stride(1) == 1 else rows.contiguous()


def gradient_by_pytorch(x: Tensor, results: Callable[[Tensor], Sequence[Tensor]], dys: Sequence[Tensor]) -> Tensor:
    """The gradient with respect to x by PyTorch's operations, which have derivatives.

    Args:
        x: The input of a call.
        results: The function that computes results of the call from x.
        dys: Their gradients.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # The view has no hooks: those of x run once, after this function.
        x = x.view_as(x) if create_graph else x.detach().requires_grad_()
        ys = results(x)
    (dx,) = torch.autograd.grad(
        ys, x, [dy.to(y.dtype) for y, dy in zip(ys, dys, strict=True)], create_graph=create_graph
    )
    gradient: Tensor = dx
    return gradient


def outputs_of(call: Call, outputs: tuple[str, ...]) -> tuple[Tensor, ...]:
    """The outputs of a checked call by our kernels, in a tuple."""
    if call.settings.choice.batch_invariant:
        # The strides and the alignment of the input must not depend on the number of rows.
        call = call._replace(x=canonical(call.x, call.settings.dim))
    found = run(call, outputs)
    return found if isinstance(found, tuple) else (found,)


def with_states(call: Call, saved: Tensors, dys: Tensors, launch: Launch) -> Tensors:
    """The saved tensors with the outputs that the gradient reads, computed again where they are not saved."""
    unread = unread_statistics(call, dys)
    missing = tuple([name for name in call.operation.saved if name not in saved and name not in unread])
    if not missing:
        return saved
    y = saved.get(call.operation.result.name)
    if missing == ("lse",) and y is not None and y.dtype == accumulator_of(call.x.dtype, y.dtype):
        # The result of logsumexp, without the dimension that `keepdim` keeps.
        return {**saved, "lse": y.squeeze(call.settings.dim) if call.settings.keepdim and y.dim() else y}
    return {**saved, **dict(zip(missing, launch(call, missing), strict=True))}


def gradient_call(call: Call, saved: Tensors, dys: Tensors, dtype: torch.dtype, to_logits: bool = True) -> Call:
    """The call of the gradient operation.

    Args:
        call: The forward call, without an input that the gradient does not read.
        saved: The operands and outputs of the forward call that the gradient reads.
        dys: Gradients with respect to its outputs, by the names that the gradient operation has for them.
        dtype: Dtype of the gradient.
        to_logits: True for the gradient with respect to the logits, False for the gradient with respect to the scores.
            False is allowed only where logsumexp has no scale or softcap: its gradient kernel always applies them.
    """
    settings, gradient = call.settings, OPERATIONS[call.operation.gradient_name]
    x = saved["x"] if gradient.scores else saved["y"]
    known = {**call.beside, **saved, **dys}
    if "dy" not in dys:
        known["dy"] = torch.zeros_like(saved["m"])
    names = [operand.name for operand in gradient.operands[1:]]
    unread = unread_statistics(call, dys)
    beside = {name: known[name] for name in names if name in known and name not in unread}
    options = call.options
    if options is not None:
        of_scores = not to_logits and not gradient.scores
        options = options.of(tuple([n for n in gradient.options if not of_scores or n not in ("scale", "softcap")]))
        if options.softcap is not None and not gradient.scores:
            beside["logits"] = saved["x"]
        options = None if options.is_plain() else options
    settings = settings._replace(dtype=dtype, keepdim=False)
    if settings.choice.batch_invariant:
        beside = {
            name: canonical(t, settings.dim)
            if isinstance(t, Tensor) and t.shape == x.shape and name not in gradient.row_operands else t
            for name, t in beside.items()
        }  # fmt: skip
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


Launch = Callable[[Call, tuple[str, ...]], tuple[Tensor, ...]]
"""The function (call, outputs) that runs a call of a gradient operation: `outputs_of`, or one that makes operators."""


def gradients(
    wanted: tuple[str, ...], call: Call, saved: Tensors, dys: Tensors, types: GradientTypes, launch: Launch | None
) -> dict[str, Tensor]:  # fmt: skip
    """Gradients with respect to the tensors that are wanted, by name.

    Args:
        wanted: Names of the tensors: x, bias, scale.
        call, saved, dys: As for `gradient_call`.
        types: The types of the gradients.
        launch: Runs the gradient operation; None to use PyTorch operations, which have derivatives.
    """
    if not wanted:
        return {}
    if call.settings.part is not None:
        # PyTorch's operations would take the shard for a whole row.
        check_first_derivative("the gradient of a softmax of sharded rows")
    if launch is not None:
        saved = with_states(call, saved, dys, launch)
    if launch is not None and wanted == ("x",):
        return {"x": launch(gradient_call(call, saved, dys, types.dtype), ("y",))[0]}
    options, x = call.scores(), saved.get("x")
    scaled = options.softcap is not None or isinstance(options.scale, Tensor) or options.scale != 1
    if launch is None or (call.operation.per_row and scaled):
        dz = score_gradient(call, saved, dys["dy"])
    else:
        # The gradient with respect to the scores; the wanted gradients are computed from it.
        dtype = torch.promote_types(types.dtype, dys["dy"].dtype)
        dz = launch(gradient_call(call, saved, dys, dtype, to_logits=False), ("y",))[0]
    slope = slope_of(options, x, dz.dtype)
    found = {}
    if "x" in wanted:
        found["x"] = (dz * (options.scale * slope)).to(types.dtype)
    if "bias" in wanted:
        assert types.bias_like is not None
        shape, dtype = types.bias_like
        found["bias"] = dz.sum_to_size(shape).to(dtype)
    if "scale" in wanted:
        assert x is not None
        found["scale"] = (dz * slope * x.to(dz.dtype)).sum_to_size(options.scale.shape).to(options.scale.dtype)
    return found


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


def score_gradient(call: Call, saved: Tensors, dy: Tensor) -> Tensor:
    """The gradient with respect to the scores by PyTorch operations; autograd follows them to the saved tensors."""
    operation, dim = call.operation, call.settings.dim
    like = saved["x"] if "x" in operation.saved else saved["y"]
    wide = accumulator_of(like.dtype, dy.dtype)
    dy = dy.to(wide)
    if operation.per_row and not call.settings.keepdim and like.dim():
        dy = dy.unsqueeze(dim)
    formula = saved_of(call, saved, wide)
    dz = formulas.score_gradient(operation.name, formula, dy)
    # A masked element has no gradient, not even in a row that holds NaN.
    return dz if formula.unmasked is None else dz.masked_fill(~formula.unmasked, 0.0)


def saved_of(call: Call, saved: Tensors, dtype: torch.dtype) -> formulas.Saved:
    """The tensors and settings that the formulas of formulas.py read."""
    operation, dim, options = call.operation, call.settings.dim, call.scores()
    z = fully_masked_rows = None
    if "x" in operation.saved:
        z, fully_masked_rows = eager.scores_of(saved["x"], dim, options, dtype)
    y = saved["y"] if z is None else z
    mask = unmasked(options, y, dim)
    return formulas.Saved(y.to(dtype), z, mask, fully_masked_rows, options.zero, dim)
