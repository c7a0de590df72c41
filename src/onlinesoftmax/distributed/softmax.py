"""Softmax and log-softmax if the softmax dimension is sharded.

Forward exchanges one state per row, and backward one number per row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..core.arguments import checked_dim
from ..core.call import Call, Settings
from ..core.processes import gathered
from ..ops import OPERATIONS
from ..torch import autograd, eager
from ..torch.arguments import check_first_derivative
from ..torch.fast_path import PREPARED_CALLS, keep
from ..torch.formulas import accumulator_of
from .exchange import RowStates, merge
from .fast_path import public_key
from .local import Shard, autocast_dtype, probabilities, runs_kernels, states
from .mailboxes import columns_of, with_a_column
from .shards import ShardedInput, shards_of

Tensor = torch.Tensor

LOGARITHM = {"softmax": False, "log_softmax": True}
"""True for the operation whose result is the logarithm of the softmax."""

PIECE = 1 << 22
"""Elements that PyTorch's operations compute at once: 16 MB in float32, beside the shard."""


class Softmax(torch.autograd.Function):
    """Softmax or log-softmax if the softmax dimension is sharded.  The caller applies all score options but `zero`."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, dim: int, call: ShardedInput, logarithm: bool) -> Tensor:
        shard = Shard(z.detach(), dim, choice=call.choice)
        kernels = runs_kernels(shard)
        whole = merge(states(shard, kernels), call.groups)
        if kernels and not logarithm:
            wide = accumulator_of(z.dtype, z.dtype)
            # A row with +inf has no softmax, and its l is infinite.
            l = whole.l.masked_fill(whole.l.isinf(), torch.nan)
            y = probabilities(shard, whole.m.to(wide), l.to(wide))
        else:
            y = _by_pytorch(shard, whole, logarithm)
        fully_masked_rows = (whole.l == 0).unsqueeze(dim) if call.options.zero else None
        if fully_masked_rows is not None:
            y.masked_fill_(fully_masked_rows, 0.0)
        ctx.save_for_backward(y, fully_masked_rows)
        ctx.where = dim, call.groups, logarithm
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative("the gradient of a softmax of sharded rows")
        y, fully_masked_rows = ctx.saved_tensors
        dim, groups, logarithm = ctx.where
        wide = accumulator_of(y.dtype, y.dtype)
        dots = torch.zeros([*y.shape[:dim], 1, *y.shape[dim + 1 :]], dtype=torch.float64, device=y.device)
        for part, out, dot in _pieces(dim, y, dy, dots):
            dot.add_((out if logarithm else part.to(wide) * out).sum(dim, keepdim=True, dtype=torch.float64))
        total = gathered(dots, *groups).sum(0).to(wide)
        dx = torch.empty_like(y)
        for part, out, dot, found in _pieces(dim, y, dy, total, dx):
            p = part.to(wide)
            found.copy_(out - p.exp() * dot if logarithm else p * (out - dot))
        return dx if fully_masked_rows is None else dx.masked_fill_(fully_masked_rows, 0.0), None, None, None


def _by_pytorch(shard: Shard, whole: RowStates, logarithm: bool) -> Tensor:
    """The local softmax or log-softmax by PyTorch's operations, in pieces."""
    z, dim = shard.x, shard.dim
    shift = whole.lse.where(whole.has_softmax, torch.nan)
    y = torch.empty_like(z)
    wide = accumulator_of(z.dtype, z.dtype)
    for part, out, lse in _pieces(dim, z, y, shift.unsqueeze(dim)):
        below = _below(part.to(wide), lse)
        out.copy_(below if logarithm else below.exp())
    return y


def _below(z: Tensor, lse: Tensor) -> Tensor:
    """Difference of z and a float64 lse in the dtype of z, with the rounding error of lse taken out."""
    high = lse.to(z.dtype)
    return (z - high) - (lse - high.double()).to(z.dtype)


def _pieces(dim: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Matching pieces of tensors: slices of their first dimension that is not `dim`, and of `dim` in long rows.

    A tensor with one value per row has size 1 in `dim`; its pieces come again for each slice of the rows.
    """
    x = tensors[0]
    outer = next((axis for axis in range(x.dim()) if axis != dim), None)
    rows, cols = 1 if outer is None else x.shape[outer], x.shape[dim]
    each = max(1, x.numel() // max(1, rows))
    step, width = max(1, PIECE // each), max(1, cols * PIECE // max(each, PIECE))
    for row in range(0, rows, step):
        here = tensors if outer is None else [t.narrow(outer, row, min(step, rows - row)) for t in tensors]
        for col in range(0, max(1, cols), width):
            count = min(width, cols - col)
            yield tuple(t.narrow(dim, col, count) if t.shape[dim] == cols else t for t in here)


def softmax(name: str, x: Tensor, dim: Any, call: ShardedInput) -> Tensor:
    """Softmax or log-softmax of the local shard of each row."""
    dim = checked_dim(name, dim, x.dim())
    # With a collective, softmax needs no position: the call then only checks that the shards form whole rows.
    shards = shards_of(name, x, dim, call)
    dtype = autocast_dtype(name, x)
    # A bias that is broadcast along the row, and a scale that is a tensor, have gradients that sum over the whole row.
    tensors = call.options.bias is not None or isinstance(call.options.scale, Tensor)
    choice = call.choice._replace(backend="eager") if tensors else call.choice
    columns = columns_of(call.groups, x, dim, shards.first, shards.total, call.exchange, choice)
    if columns is not None:
        settings = Settings(dim, dtype, choice=call.choice, part=columns)
        options = call.options if x.shape[dim] else call.options._replace(mask=None)
        shard = with_a_column(x.resolve_neg(), dim)
        local = Call(OPERATIONS[name], shard, settings, None if options.is_plain() else options)
        key = public_key(call, columns) if x.shape[dim] and options.is_plain() and dtype == x.dtype else ()
        if key:
            prepared_call = autograd.prepared_call(local)
            keep(PREPARED_CALLS, key, lambda operands, _: (prepared_call(operands.x, None),))
        found = autograd.apply(local)
        # `narrow` of all columns would copy the gradient.
        return found if x.shape[dim] else found.narrow(dim, 0, 0)
    x = x.to(torch.promote_types(x.dtype, dtype))
    scores = call.options._replace(zero=False)
    z = x if scores.is_plain() else eager.scores_of(x, dim, scores, accumulator_of(x.dtype, x.dtype))[0]
    y: Tensor = Softmax.apply(z, dim, call, LOGARITHM[name])
    return y.to(dtype)
