"""PyTorch's side: its own functions, cases written out in its elementary operations, and calls with a gradient.

A forward function takes the operands of the operation and returns its main output, with its statistics in a tuple
where a call returns statistics too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ...core.arrays import namespace
from ...core.options import Functions, causal_mask, scores
from ...ops.reference import evaluate
from .cases import STATISTIC_WEIGHT, Case

Function = Callable[..., Any]
"""From the tensors of a case, in the order of `Case.tensors`, to the result."""


def with_gradient(case: Case, forward: Function) -> Function:
    """The forward function; with its gradient, as a user calls them, where the case has one: (gradient, …, output, …).

    Autograd returns the gradients and adds them to nothing, so each call computes fresh ones.  The tensors that are
    differentiated must require a gradient.
    """
    if not case.with_gradient:
        return forward
    import torch

    count, wanted, grad = case.operands, case.differentiated, torch.autograd.grad

    def function(*tensors: Any) -> Any:
        found = forward(*tensors[:count])
        outputs = found if isinstance(found, tuple) else (found,)
        gradients = grad(outputs, tensors[:wanted], incoming(tensors[count:], len(outputs)))
        return (*gradients, *(y.detach() for y in outputs))

    return function


def incoming(given: tuple[Any, ...], outputs: int) -> Any:
    """The incoming gradient of each output; None for a scalar loss.  A single one is scaled for the statistics."""
    if len(given) in (0, outputs):
        return given or None
    return (given[0], *(STATISTIC_WEIGHT * given[0] for _ in range(outputs - 1)))


def own(case: Case) -> Function:
    """The function that PyTorch itself runs for the case; autograd runs only where the case has a gradient."""
    import torch

    if case.with_gradient:
        return with_gradient(case, own(case.without_gradient))
    if case.declaration.has_target:
        wide = getattr(torch, case.accumulator)
        if case.reduction:
            return partial(torch.nn.functional.cross_entropy, reduction=case.reduction)
        return lambda x, target: log_probabilities(x.to(wide), target, case.dim)

    dim, dtype = case.dim, getattr(torch, case.dtype)
    if is_written_out(case):
        return written_out(case)
    if not case.declaration.backward:
        forward = getattr(torch, case.operation)
        return lambda x: forward(x, dim)
    data = getattr(torch.ops.aten, f"_{case.operation}_data")
    return lambda y, dy: data(dy, y, dim, dtype)


def at_target(log_p: Any, target: Any, dim: int = -1) -> Any:
    """The logarithm of the probability of each row's target."""
    return log_p.gather(dim, target.unsqueeze(dim)).squeeze(dim)


def log_probabilities(logits: Any, target: Any, dim: int = -1) -> tuple[Any, Any]:
    """Logarithm of the target's probability, and entropy: by the logarithms of all, as libraries for RL do it."""
    import torch

    log_p = torch.log_softmax(logits, dim)
    return at_target(log_p, target, dim), -(log_p.exp() * log_p).sum(dim)


def is_written_out(case: Case) -> bool:
    """True where PyTorch has no function for the case and runs elementary operations, which round every step."""
    import torch

    return bool(case.fused) or (case.declaration.backward and not hasattr(torch.ops.aten, f"_{case.operation}_data"))


def written_out(case: Case, wide: bool = False) -> Function:
    """The case in elementary operations, for eager or torch.compile.

    Args:
        case: A gradient, or a forward operation with or without score options.
        wide: Compute every step in float32 at least, and round once.
    """
    return _gradient(case, wide) if case.declaration.backward else _forward(case, wide)


def _forward(case: Case, wide: bool) -> Function:
    import torch

    dtype = getattr(torch, case.dtype)
    up = torch.promote_types(dtype, torch.float32) if wide else dtype
    # masked_fill takes the inverse of the mask, which would be one operation more.
    functions, forward = Functions(torch.tanh, torch.where), getattr(torch, case.operation)

    def function(x: Any, *beside: Any) -> Any:
        options = case.score_options(dict(zip(case.option_tensors, beside, strict=True)))
        # The causal mask is made in the call: a small part of the time, and torch.compile makes nothing of it.
        seen = causal_mask(torch.arange, case.shape, case.dim, device=x.device) if options.causal else None
        return forward(scores(functions, x.to(up), options, seen), case.dim).to(dtype)

    return function


def _gradient(case: Case, wide: bool) -> Function:
    import torch

    dtype = getattr(torch, case.dtype)
    # PyTorch sums in float32; where nothing is summed it computes in the dtype of the input.
    up = torch.promote_types(dtype, torch.float32) if wide or case.declaration.reduces else dtype
    # Found before torch.compile traces the function.
    xp = namespace(torch.empty(0))
    return lambda *tensors: evaluated(case, xp, *(t.to(up) for t in tensors)).to(dtype)


def evaluated(case: Case, xp: Any, *arrays: Any) -> Any:
    """The formula of a gradient for arrays in the order of `Case.tensors`; `xp` has the functions of their library."""
    values = dict(zip(case.tensors, arrays, strict=True))
    size_1_at_dim = (*[slice(None)] * case.dim, None)
    values |= {name: values[name][size_1_at_dim] for name in case.declaration.row_operands}
    return evaluate(case.operation, xp, values, case.dim)
