"""PyTorch's side: its own functions, and cases written out in its elementary operations, compiled or not."""

from __future__ import annotations

from typing import Any

from ...core.arrays import namespace
from ...core.options import Functions, causal_mask, scores
from ...ops.reference import evaluate
from . import losses
from .cases import Case
from .losses import Function
from .options import score_options

__all__ = ["Function", "is_written_out", "own", "written_out"]


def own(case: Case) -> Function:
    """The function that PyTorch itself runs for the case; autograd runs only where the case has a gradient."""
    import torch

    if case.with_gradient:
        return losses.with_gradient(case, own(case.without_gradient))
    if case.declaration.has_target:
        return losses.by_pytorch(case)

    dim, dtype = case.dim, getattr(torch, case.dtype)
    if is_written_out(case):
        return written_out(case)
    if not case.backward:
        forward = getattr(torch, case.operation)
        return lambda x: forward(x, dim)
    data = getattr(torch.ops.aten, f"_{case.operation}_data")
    return lambda y, dy: data(dy, y, dim, dtype)


def is_written_out(case: Case) -> bool:
    """True where PyTorch has no function for the case and runs elementary operations, which round every step."""
    import torch

    return bool(case.fused) or (case.backward and not hasattr(torch.ops.aten, f"_{case.operation}_data"))


def written_out(case: Case, wide: bool = False) -> Function:
    """The case in elementary operations, for eager or torch.compile.

    Args:
        case: A gradient, or a forward operation with or without score options.
        wide: Compute every step in float32 at least, and round once.
    """
    return _gradient(case, wide) if case.backward else _forward(case, wide)


def _forward(case: Case, wide: bool) -> Function:
    import torch

    dtype = getattr(torch, case.dtype)
    up = torch.promote_types(dtype, torch.float32) if wide else dtype
    # masked_fill takes the inverse of the mask, which would be one operation more.
    functions, forward = Functions(torch.tanh, torch.where), getattr(torch, case.operation)

    def function(x: Any, *beside: Any) -> Any:
        options = score_options(case, dict(zip(case.option_tensors, beside, strict=True)))
        # The causal mask is made in the call: a small part of the time, and torch.compile makes nothing of it.
        seen = causal_mask(torch.arange, case.shape, case.dim, device=x.device) if options.causal else None
        return forward(scores(functions, x.to(up), options, seen), case.dim).to(dtype)

    return function


def _gradient(case: Case, wide: bool) -> Function:
    import torch

    dtype, row_operands = getattr(torch, case.dtype), case.declaration.row_operands
    # PyTorch sums in float32; where nothing is summed it computes in the dtype of the input.
    up = torch.promote_types(dtype, torch.float32) if wide or case.declaration.reduces else dtype
    xp = namespace(torch.empty(0))

    def function(*tensors: Any) -> Any:
        values = {name: t.to(up) for name, t in zip(case.tensors, tensors, strict=True)}
        values |= {name: values[name].unsqueeze(case.dim) for name in row_operands}
        return evaluate(case.operation, xp, values, case.dim).to(dtype)

    return function
