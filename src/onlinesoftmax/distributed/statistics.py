"""The statistics of sharded rows, differentiable in the local logits: one collective forward, none backward.

Every process has the same statistics of every row, so that what is computed from them is the same everywhere.  Backward
needs no exchange: the incoming gradients are the same on all processes, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .local import Incoming, Shard, gradient, states
from .rows import RowStates, merge
from .shards import Shards

Tensor = torch.Tensor


class Request(NamedTuple):
    """What to compute of the rows.

    Attributes:
        shard: The local part without its tensors.
        group: Process group.
        shards: Position of the local columns in the whole row.
        entropy, spread: True where these statistics are asked for.
        weight_sum: Sum of the weights of all classes; the number of classes if no weights are given.
    """

    shard: Shard
    group: Any
    shards: Shards
    entropy: bool
    spread: bool
    weight_sum: Any

    def is_class(self, target: Tensor) -> Tensor:
        """True for the rows whose target, counted from the first local column, is a column of any process."""
        return (target >= -self.shards.first) & (target < self.shards.total - self.shards.first)


class Statistics(torch.autograd.Function):
    """Computes (logprob, lse, entropy, spread) of every row, in the accumulator's dtype.

    logprob is None without a target; entropy and spread are None unless they are requested.  spread is
    weight_sum * lse - sum(weight * z), the part of a smoothed loss that belongs to all classes.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mask: Tensor | None, target: Tensor | None, weight: Tensor | None, request: Request
    ) -> tuple[Tensor | None, ...]:
        shard = _filled(request.shard, x, mask, target, weight)
        local = states(shard, request.entropy, request.spread)
        whole = merge(local, request.group)
        ctx.request = request
        numbers = (whole.m, whole.l, *_statistics(whole, target, request))
        m, l, *found = (None if t is None else t.to(local.m.dtype) for t in numbers)
        ctx.save_for_backward(x, mask, target, weight, m, l, found[2])
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, dy: Tensor | None, dlse: Tensor | None, dentropy: Tensor | None, dspread: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, mask, target, weight, m, l, entropy = ctx.saved_tensors
        zero = torch.zeros_like(m)
        if dy is not None and target is not None:
            dy = dy.where(ctx.request.is_class(target), 0.0)
        incoming = Incoming(zero if dy is None else dy, zero if dlse is None else dlse, dentropy, dspread)
        shard = _filled(ctx.request.shard, x, mask, target, weight)
        dx = gradient(shard, RowStates(m, l), entropy, incoming, ctx.request.weight_sum)
        return dx, None, None, None, None


def _filled(bare: Shard, x: Tensor, mask: Tensor | None, target: Tensor | None, weight: Tensor | None) -> Shard:
    return bare._replace(x=x, target=target, weight=weight, options=bare.options._replace(mask=mask))


def _statistics(whole: RowStates, target: Tensor | None, request: Request) -> tuple[Tensor | None, ...]:
    """(logprob, lse, entropy, spread) from the states of whole rows, in float64."""
    log_l = whole.l.log()
    lse = whole.m + log_l
    logprob = entropy = spread = None
    if whole.chosen is not None and target is not None:
        defined = request.is_class(target) & _has_softmax(whole)
        logprob = (whole.chosen - whole.m - log_l).where(defined, torch.nan)
    if request.entropy:
        entropy = whole.entropy()
    if whole.weighted is not None:
        spread = request.weight_sum * lse - whole.weighted
    return logprob, lse, entropy, spread


def _has_softmax(whole: RowStates) -> Tensor:
    """False for a row of only -inf, or with +inf or NaN."""
    return (whole.l > 0) & ~whole.l.isinf()
