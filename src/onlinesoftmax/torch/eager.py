"""The `eager` backend: PyTorch's own operations, for a CPU and for every device that our kernels do not support.

The score options are computed by separate PyTorch operations, so PyTorch provides derivatives of every order.  The
kernels are tested against this backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..core.call import Call, Settings
from ..core.declaration import Operation
from ..core.options import Functions, ScoreOptions, causal_mask, scores
from . import formulas

Tensor = torch.Tensor

FUNCTIONS = Functions(torch.tanh, lambda condition, x, number: x.masked_fill(~condition, number), Tensor.to)
"""torch functions for the array formula of the scores (`core.options.scores`)."""


def call_plain(operation: Operation, x: Tensor, dim: Any, keepdim: bool) -> Tensor:
    """The operation on a torch tensor by PyTorch itself, if only a dimension and keepdim are given."""
    if torch._C._len_torch_function_stack() or not _has_function(operation, x, dim):
        return formulas.result(operation.name, x, dim, keepdim)
    function = getattr(torch, operation.name)
    return function(x, dim, keepdim) if operation.per_row else function(x, dim)


def call(operation: Operation, x: Tensor, settings: Settings, out: Tensor | None) -> Tensor:
    """The operation on a torch tensor by PyTorch itself, with its gradients and its errors."""
    name, dim, dtype, keepdim = operation.name, settings.dim, settings.dtype, settings.keepdim
    z = x if dtype is None else x.to(dtype)
    if not _has_function(operation, z, dim):
        return formulas.result(name, z, dim, keepdim)
    if operation.per_row:
        return formulas.by_pytorch(name, z, dim, keepdim, out=out)
    if out is None:
        return formulas.by_pytorch(name, x, dim, dtype)
    return formulas.by_pytorch(name, x, dim, dtype=dtype, out=out)


def _has_function(operation: Operation, z: Any, dim: Any) -> bool:
    """True where PyTorch has the operation as one function, whose arithmetic is right for this tensor."""
    if not operation.runs_on("eager") or formulas.is_rounded_early(operation.name, z):
        return False
    return not (formulas.is_narrow(z) if operation.per_row else formulas.is_long(z, dim))


def call_on_scores(call: Call) -> Tensor:
    """The operation on the scores of a call, computed in float32 or wider and rounded once."""
    operation, x, choice = call.operation, call.x, call.settings.choice
    dim, dtype, keepdim = call.settings.dim, call.settings.dtype or x.dtype, call.settings.keepdim
    z, fully_masked_rows = scores_of(x, dim, call.scores(), wide_of(x, dtype, choice.batch_invariant))
    # A tensor without dimensions, and a call that names none, have no rows beside each other.  A row without elements
    # has no maximum.
    names_none = isinstance(dim, (tuple, list)) and not dim
    if choice.batch_invariant and z.dim() and z.numel() and not names_none:
        y = _invariant_logsumexp(z, dim, keepdim) if operation.per_row else invariant(operation.name, z, dim)
    else:
        y = formulas.result(operation.name, z, dim, keepdim)
    if fully_masked_rows is not None:
        fully_masked_rows = fully_masked_rows.squeeze(dim) if operation.per_row and not keepdim else fully_masked_rows
        y = y.masked_fill(fully_masked_rows, formulas.masked_result(operation.name))
    return y.to(dtype)


def wide_of(x: Any, dtype: torch.dtype, batch_invariant: bool) -> torch.dtype:
    """The dtype of the arithmetic of a call: float64 where a row has the same bits beside any other rows.

    The order in which PyTorch adds depends on the number of rows, and so do the last bits of exp, log and tanh, which
    are other functions for the last elements of a tensor.  Rounding from float64 removes the differences.
    """
    if batch_invariant and x.device.type != "mps":
        return torch.float64
    return torch.promote_types(torch.promote_types(x.dtype, dtype), torch.float32)


def scores_of(x: Tensor, dim: Any, options: ScoreOptions, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """(scores, fully masked rows) of logits.

    The second is True for the rows whose scores are all -inf, and their scores are replaced by 0.  It is None unless
    such rows give zeros.
    """
    wide = x.to(torch.promote_types(torch.promote_types(x.dtype, dtype), torch.float32))
    seen = causal_mask(torch.arange, x.shape, dim, device=x.device) if options.causal else None
    z = scores(FUNCTIONS, wide, options, seen)
    if not options.zero:
        return z, None
    fully_masked_rows = (z.detach() == -torch.inf).all(dim, keepdim=True)
    return z.masked_fill(fully_masked_rows, 0.0), fully_masked_rows


def invariant(name: str, z: Tensor, dim: int) -> Tensor:
    """Softmax or log-softmax of float64 scores whose bits do not depend on the number of rows.

    PyTorch's functions sum in an order that does not depend on it along the last dimension, and there alone.
    """
    return formulas.result(name, z.movedim(dim, -1), -1, False).movedim(-1, dim).contiguous()


def row_sums(t: Tensor, dim: int, batch_invariant: bool) -> Tensor:
    """Sums along a dimension; if batch-invariant, in an order that does not depend on the number of rows.

    PyTorch adds the neighbouring elements of a row in one order, unless threads share the elements of a single row.
    """
    if not batch_invariant:
        return t.sum(dim)
    rows = t.movedim(dim, -1).contiguous()
    return torch.stack((rows, rows)).sum(-1)[0] if rows.numel() == rows.shape[-1] else rows.sum(-1)


def _invariant_logsumexp(z: Tensor, dim: Any, keepdim: bool) -> Tensor:
    """Logsumexp whose bits do not depend on the number of rows; the order of torch.logsumexp depends on it."""
    if isinstance(dim, (tuple, list)):
        y = _invariant_logsumexp(joined(z, dim, z.dim() - len(dim)), -1, False)
        return y.reshape(z.amax(dim, keepdim=True).shape) if keepdim else y
    return logsumexp_from(z, invariant("log_softmax", z, dim), dim, keepdim)


def logsumexp_from(z: Tensor, log_p: Tensor, dim: int, keepdim: bool, dtype: torch.dtype | None = None) -> Tensor:
    """Logsumexp of scores whose log_softmax is known, without computing the exponentials again.

    Where a score is the maximum m, log_softmax is m - lse.  Their difference is computed in `dtype`, if it is given.
    """
    if not z.shape[dim]:
        return z.logsumexp(dim, keepdim)
    # Both terms have the same element: the maxima of `z` and of `log_p` by themselves could be others where scores are
    # nearly equal, and the gradient would be wrong.
    m, at = z.max(dim, keepdim=True)
    m = m if dtype is None else m.to(dtype)
    y = torch.where(m.isinf(), m, m - log_p.gather(dim, at))
    return y if keepdim else y.squeeze(dim)


def joined(t: Tensor, dims: Sequence[int], at: int) -> Tensor:
    """A tensor whose dimension `at` is these dimensions, joined in this order; a view where the strides allow it."""
    places = range(at, at + len(dims))
    return t.movedim(tuple(dims), tuple(places)).flatten(places[0], places[-1])
