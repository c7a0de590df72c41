"""The statistics of rows if the softmax dimension is sharded, differentiable in the local logits.

Forward makes one collective.  Every process has the same statistics of every row, so that what is computed from them is
the same everywhere.  Backward needs no exchange: the incoming gradients are the same on all processes, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..torch.check import check_first_derivative
from .local import Incoming, Shard, Sharded, gradient, runs_kernels, states
from .rows import RowStates, merge
from .shards import Shards

Tensor = torch.Tensor


class StatisticsWanted(NamedTuple):
    """The statistics that a call asks for, without the tensors of the call.

    Attributes:
        dim: The softmax dimension.
        call: The arguments of the call; without its mask.
        shards: Position of the local columns in the whole row.
        entropy, spread: True where these statistics are asked for.
        weight_sum: Sum of the weights of all classes; the number of classes if no weights are given.
    """

    dim: int
    call: Sharded
    shards: Shards
    entropy: bool
    spread: bool
    weight_sum: Any

    def shard(self, x: Tensor, mask: Tensor | None, target: Tensor, weight: Tensor | None) -> Shard:
        """The local part with its tensors."""
        _, options, choice, *_ = self.call
        return Shard(x, self.dim, options._replace(mask=mask), target, weight, choice)

    def no_class(self, target: Tensor) -> Tensor:
        """True for the rows whose target, counted from the first local column, is no column of any process."""
        first, _, total = self.shards
        if not total:
            return torch.ones_like(target, dtype=torch.bool)
        return target.clamp(-first, total - first - 1) != target


class Statistics(torch.autograd.Function):
    """Computes (logprob, lse, entropy, spread) of every row, in the accumulator's dtype.

    entropy and spread are None unless they are requested.  spread is
    weight_sum * lse - sum(weight * z), the part of a smoothed loss that belongs to all classes.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mask: Tensor | None, target: Tensor, weight: Tensor | None, wanted: StatisticsWanted
    ) -> tuple[Tensor | None, ...]:
        shard = wanted.shard(x, mask, target, weight)
        ctx.kernels = runs_kernels(shard)
        local = states(shard, ctx.kernels, wanted.entropy, wanted.spread)
        whole = merge(local, wanted.call.groups)
        ctx.wanted = wanted
        numbers = (whole.m, whole.l, *_statistics(whole, target, wanted))
        m, l, *found = (None if t is None else t.to(local.m.dtype) for t in numbers)
        ctx.save_for_backward(x, mask, target, weight, m, l, found[2])
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor | None, dlse: Tensor | None, dentropy: Tensor | None, dspread: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        check_first_derivative("the gradient of numbers of sharded rows")
        x, mask, target, weight, m, l, entropy = ctx.saved_tensors
        dy = torch.zeros_like(m) if dy is None else dy.masked_fill(ctx.wanted.no_class(target), 0.0)
        incoming = Incoming(dy, dlse, dentropy, dspread)
        shard = ctx.wanted.shard(x, mask, target, weight)
        dx = gradient(shard, ctx.kernels, RowStates(m, l), entropy, incoming, ctx.wanted.weight_sum)
        return dx, None, None, None, None


def _statistics(whole: RowStates, target: Tensor, wanted: StatisticsWanted) -> tuple[Tensor | None, ...]:
    """(logprob, lse, entropy, spread) from the states of whole rows, in float64."""
    assert whole.logprob is not None
    # A row of only -inf gives NaN without more ado.  So does a row with NaN; one with +inf has an infinite l.
    logprob = whole.logprob.masked_fill(wanted.no_class(target), torch.nan)
    spread = None if whole.weighted is None else wanted.weight_sum * whole.lse - whole.weighted
    entropy = whole.entropy
    if entropy is not None and not wanted.shards.total:
        # The sum over no columns.  From its state, which is that of a row of only -inf, it would be NaN.
        entropy = torch.zeros_like(entropy)
    return logprob, whole.lse, entropy, spread
