"""Forward and backward of a call by our kernels, and the gradients with respect to its input, bias and scale.

There are two steps.  The operation's gradient gives the gradient with respect to the scores; the chain rule then gives
the gradients with respect to the logits, the bias and the scale.  One kernel does both steps if neither the bias nor
the scale needs a gradient.  If the gradient itself is to be differentiated, PyTorch operations compute the formulas of
ops.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..core.call import Call, Settings
from ..core.options import PLAIN, ScoreOptions, causal_mask, softcap_slope
from ..ops import OPERATIONS
from . import eager, ops
from .check import TRACED_TYPES, check_first_derivative
from .prepare import aligned, run

Tensor = torch.Tensor

Tensors = Mapping[str, Tensor]
"""Tensors by name: operands and outputs of an operation."""


OPTION_TENSORS = ("scale", "bias", "mask")
"""Names of the score options that may be tensors."""


def split_tensors(call: Call) -> tuple[Call, dict[str, Tensor]]:
    """The call without its tensors, and its tensors by name, the input first."""
    options, tensors, numbers = call.options, {"x": call.x}, {}
    if options is not None:
        for name in OPTION_TENSORS:
            if isinstance(getattr(options, name), Tensor):
                tensors[name] = getattr(options, name)
                options = options._replace(**{name: getattr(PLAIN, name)})
    for name, value in call.beside.items():
        if isinstance(value, Tensor):
            tensors[name] = value
        else:
            numbers[name] = value
    return call._replace(x=None, options=options, beside=numbers), tensors


def with_tensors(bare: Call, tensors: Mapping[str, Tensor | None]) -> Call:
    """The call that `split_tensors` was given; tensors that are None, and outputs, are left out."""
    options, operation = bare.options, bare.operation
    given = {name: t for name, t in tensors.items() if t is not None}
    of_options: dict[str, Any] = {name: given[name] for name in OPTION_TENSORS if name in given}
    if of_options:
        options = (options or PLAIN)._replace(**of_options)
    if options is not None and options.plain:
        options = None
    others = ["x", *OPTION_TENSORS, *[output.name for output in operation.outputs]]
    beside = {**bare.beside, **{name: t for name, t in given.items() if name not in others}}
    return bare._replace(x=given.get("x"), options=options, beside=beside)


def is_traced(x: Tensor) -> bool:
    """True where a tracer must see an operator in place of a launch."""
    return torch.compiler.is_compiling() or type(x).__name__ in TRACED_TYPES


def outputs_of(call: Call, outputs: tuple[str, ...]) -> tuple[Tensor, ...]:
    """The outputs of a checked call by our kernels, in a tuple."""
    found = forward(call, outputs)
    return found if isinstance(found, tuple) else (found,)


def forward(call: Call, outputs: tuple[str, ...] = ("y",)) -> Any:
    """The outputs of a checked call by our kernels; a tuple where several are asked for."""
    if call.settings.choice.batch_invariant:
        # The strides and the alignment of the input must not depend on the number of rows.
        call = call._replace(x=canonical(call.x, call.settings.dim))
    return run(call, outputs)


def outputs_to_keep(call: Call) -> tuple[str, ...]:
    """Names of the outputs of a call with a gradient: the result, and what the gradient reads besides.

    In the dtype of lse, the result of logsumexp is lse.
    """
    operation, dtype = call.operation, call.settings.dtype or call.x.dtype
    kept = operation.kept_outputs
    if operation.result.dtype != "result" or dtype != accumulator_of(call.x.dtype, dtype):
        return kept
    return tuple(name for name in kept if name != "lse")


def lse_of(y: Tensor, settings: Settings) -> Tensor:
    """The logsumexp of each row from the result of logsumexp, without the dimension that `keepdim` keeps."""
    return y.squeeze(settings.dim) if settings.keepdim and y.dim() else y


def accumulator_of(dtype: torch.dtype, out_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which states are kept for an input and a result of these dtypes."""
    return torch.promote_types(torch.promote_types(dtype, out_dtype), torch.float32)


def keeps_x(call: Call, wants_scale: bool) -> bool:
    """True where the derivatives of the call read its input."""
    return "x" in call.operation.saved or call.scores.softcap is not None or wants_scale


def saved_names(call: Call, tensors: Tensors, outputs: tuple[str, ...], wants_scale: bool) -> tuple[str, ...]:
    """Names of the tensors and outputs that the gradient of a call reads."""
    gradient, known = OPERATIONS[call.operation.gradient_name], {*tensors, *outputs}
    operands = {operand.name for operand in gradient.operands[1:]}
    names = [name for name in call.operation.saved if name in known]
    names += [name for name in tensors if (name in operands or name in gradient.options) and name not in names]
    if keeps_x(call, wants_scale) and "x" not in names:
        names.append("x")
    return tuple(names)


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
    # A statistic is read only where there is a gradient with respect to it.
    unread = [name for name in names if f"d{name}" in names and f"d{name}" not in dys]
    beside = {name: known[name] for name in names if name in known and name not in unread}
    options = call.options
    if options is not None:
        options = options.of(gradient.options)
        if not to_logits and not gradient.scores:
            options = options._replace(scale=1.0, softcap=None)
        if options.softcap is not None and not gradient.scores:
            beside["logits"] = saved["x"]
        options = None if options.plain else options
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


class Wanted(NamedTuple):
    """The gradients that the caller wants.

    Attributes:
        names: Names of the tensors with respect to which gradients are wanted: x, bias, scale.
        dtype: Dtype of the input.
        bias_like: Shape and dtype of the bias; None without one.
    """

    names: tuple[str, ...]
    dtype: torch.dtype
    bias_like: tuple[torch.Size, torch.dtype] | None = None

    @classmethod
    def of(cls, tensors: Tensors) -> Wanted:
        """The gradient with respect to the input alone, for a call with these tensors."""
        bias = tensors.get("bias")
        return cls(("x",), tensors["x"].dtype, None if bias is None else (bias.shape, bias.dtype))


Launch = Callable[[Call, tuple[str, ...]], tuple[Tensor, ...]]
"""The function (call, outputs) that runs a call of a gradient operation: `outputs_of`, or one that makes operators."""


def gradients(call: Call, saved: Tensors, dys: Tensors, wanted: Wanted, launch: Launch | None) -> dict[str, Tensor]:
    """Gradients with respect to the tensors that are wanted, by name.

    Args:
        call, saved, dys: As for `gradient_call`.
        wanted: The gradients to compute.
        launch: Runs the gradient operation; None to use PyTorch operations, which have derivatives.
    """
    if not wanted.names:
        return {}
    if call.settings.part is not None:
        # PyTorch's operations would take the shard for a whole row.
        check_first_derivative("the gradient of a softmax of sharded rows")
    if launch is not None and wanted.names == ("x",):
        return {"x": launch(gradient_call(call, saved, dys, wanted.dtype), ("y",))[0]}
    options, x = call.scores, saved.get("x")
    scaled = options.softcap is not None or isinstance(options.scale, Tensor) or options.scale != 1
    if launch is None or (call.operation.per_row and scaled):
        dz = score_gradient(call, saved, dys["dy"])
    else:
        # The gradient with respect to the scores; the wanted gradients are computed from it.
        dtype = torch.promote_types(wanted.dtype, dys["dy"].dtype)
        dz = launch(gradient_call(call, saved, dys, dtype, to_logits=False), ("y",))[0]
    slope = slope_of(options, x, dz.dtype)
    found = {}
    if "x" in wanted.names:
        found["x"] = (dz * (options.scale * slope)).to(wanted.dtype)
    if "bias" in wanted.names:
        assert wanted.bias_like is not None
        shape, dtype = wanted.bias_like
        found["bias"] = dz.sum_to_size(shape).to(dtype)
    if "scale" in wanted.names:
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
    dz = ops.score_gradient(operation.name, formula, dy)
    # A masked element has no gradient, not even in a row that holds NaN.
    return dz if formula.unmasked is None else dz.masked_fill(~formula.unmasked, 0.0)


def saved_of(call: Call, saved: Tensors, dtype: torch.dtype) -> ops.Saved:
    """The tensors and settings that the formulas of ops.py read."""
    operation, dim, options = call.operation, call.settings.dim, call.scores
    z = fully_masked_rows = None
    if "x" in operation.saved:
        z, fully_masked_rows = eager.scores_of(saved["x"], dim, options, dtype)
    y = saved["y"] if z is None else z
    mask = unmasked(options, y, dim)
    return ops.Saved(y.to(dtype), z, mask, fully_masked_rows, options.zero, dim)
