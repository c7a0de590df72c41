"""Plans `columns` and `stored` of token log-probabilities, whose gradient is known only in the backward pass.

Forward merges the statistics of chunks of columns; backward makes each chunk again.  So each slice of the gradient of
the weight is one product, rounded once.  Where all logits fit, they are one chunk, which is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..core.options import ScoreOptions
from ..torch.arguments import check_first_derivative
from ..torch.formulas import accumulator_of
from .plans import LinearPlan
from .products import add_product, logits_of
from .rows import Statistics, gradient, statistics
from .sharing import Sharing

Tensor = torch.Tensor


def merged(a: Statistics, b: Statistics) -> Statistics:
    """The statistics of two slices of rows; the logarithm is that of the slice that has the target, NaN if none has it.

    With the parts w of the whole sum, the entropy is the sum of w · (entropy of the slice - log w).
    """
    lse = torch.logaddexp(a.lse, b.lse)
    entropy = torch.zeros_like(lse)
    logprob = torch.full_like(lse, torch.nan)
    for one in (a, b):
        log_w = torch.where(one.lse == lse, torch.zeros_like(lse), one.lse - lse)
        w = log_w.exp()
        # A slice of -inf has no entropy, and no part of the sum.
        entropy = entropy + torch.where(w == 0, 0.0, w * (one.entropy - log_w))
        logprob = torch.where(torch.isnan(one.logprob), logprob, one.logprob + log_w)
    return Statistics(logprob, entropy, lse)


def _local(target: Tensor, first: int, end: int) -> Tensor:
    """The targets counted from the first column of a chunk; -1 where they are in none of its columns."""
    return torch.where((target >= first) & (target < end), target - first, -1)


def _columns_at_once(plan: LinearPlan, classes: int) -> int:
    return max(min(plan.chunk, classes) if plan.name == "columns" else classes, 1)


def _of_no_columns(target: Tensor, dtype: torch.dtype) -> Statistics:
    zeros = torch.zeros(target.shape, dtype=dtype, device=target.device)
    return Statistics(zeros + torch.nan, zeros, zeros - torch.inf)


class LogProbabilities(torch.autograd.Function):
    """(logprob, entropy, lse) of each token, each with derivatives in input, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, plan: LinearPlan,
        options: ScoreOptions | None, sharing: Sharing | None = None,
    ) -> Any:  # fmt: skip
        classes, found, whole_target = len(weight), None, target
        target = target if sharing is None else sharing.local(target)
        size = _columns_at_once(plan, classes)
        memory = torch.empty(len(x) * size, dtype=x.dtype, device=x.device)
        for first in range(0, classes, size):
            end = min(first + size, classes)
            z = memory[: len(x) * (end - first)].view(len(x), end - first)
            logits_of(x, weight[first:end], None if bias is None else bias[first:end], z)
            one = statistics(z, _local(target, first, end), options)
            found = one if found is None else merged(found, one)
        if found is None:
            found = _of_no_columns(target, accumulator_of(x.dtype, x.dtype))
        if sharing is not None:
            found = sharing.merged(found, whole_target)
        # Rounding can put a logarithm above 0.
        found = found._replace(logprob=found.logprob.clamp(max=0.0))
        ctx.plan, ctx.options, ctx.sharing = plan, options, sharing
        ctx.logits = memory.view(len(x), classes) if plan.name == "stored" and any(ctx.needs_input_grad) else None
        ctx.save_for_backward(x, weight, target, *found, *(() if bias is None else (bias,)))
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, dlogprob: Tensor | None, dentropy: Tensor | None, dlse: Tensor | None) -> Any:
        check_first_derivative("the gradient of a head without logits")
        if dlogprob is None and dentropy is None and dlse is None:
            return (None,) * 7
        x, weight, target, logprob, entropy, lse, *bias = ctx.saved_tensors
        known, (of_input, of_weight, of_bias) = Statistics(logprob, entropy, lse), ctx.needs_input_grad[:3]
        sharing: Sharing | None = ctx.sharing
        nothing = torch.zeros_like(lse)
        dlogprob, dlse = nothing if dlogprob is None else dlogprob, nothing if dlse is None else dlse
        # A target that is no class has no gradient of its logarithm.
        before, total = (0, len(weight)) if sharing is None else (sharing.first, sharing.total)
        dlogprob = dlogprob.masked_fill((target < -before) | (target >= total - before), 0.0)
        # The logits of a token without gradients may be NaN, and so may its input: 0 · NaN would be NaN.
        skipped = (dlogprob == 0) & (dlse == 0) & (True if dentropy is None else dentropy == 0)
        valid = x.masked_fill(skipped.unsqueeze(1), 0.0) if of_weight else x
        wide, classes = accumulator_of(x.dtype, x.dtype), len(weight)
        one_product = ctx.plan.chunks == 1 and sharing is None
        dx = torch.empty(x.shape, dtype=x.dtype if one_product else wide, device=x.device) if of_input else None
        dw = torch.empty_like(weight, memory_format=torch.contiguous_format) if of_weight else None
        db = torch.empty(classes, dtype=wide, device=x.device) if of_bias else None
        size, kept = _columns_at_once(ctx.plan, classes), ctx.logits
        ctx.logits = None
        memory = torch.empty(len(x) * size, dtype=x.dtype, device=x.device) if kept is None else kept.view(-1)
        finish = None if dx is None or classes else _in_dtype(dx.zero_(), x, sharing)
        for first in range(0, classes, size):
            end = min(first + size, classes)
            z = memory[: len(x) * (end - first)].view(len(x), end - first)
            if kept is None:
                logits_of(x, weight[first:end], bias[0][first:end] if bias else None, z)
            local = _local(target, first, end)
            of_sum = torch.where(local < 0, dlse - dlogprob, dlse)
            dz = gradient(z, local, known, dlogprob, dentropy, of_sum, ctx.options)
            if dx is not None and one_product:
                torch.mm(dz, weight, out=dx)
            elif dx is not None:
                add_product(dx, dz, weight[first:end], first == 0)
            if dx is not None and end == classes:
                # A sum over processes travels during the last product.
                finish = _in_dtype(dx, x, sharing)
            if dw is not None:
                torch.mm(dz.t(), valid, out=dw[first:end])
            if db is not None:
                torch.sum(dz, 0, dtype=wide, out=db[first:end])
        dx = None if finish is None else finish()
        return dx, dw, None if db is None else db.to(bias[0].dtype), None, None, None, None


def _in_dtype(dx: Tensor, x: Tensor, sharing: Sharing | None) -> Callable[[], Tensor]:
    """The function that returns the gradient of the input in its dtype, added up over the processes."""
    if sharing is None:
        return lambda: dx.to(x.dtype)
    return sharing.summed(dx, torch.empty_like(x))
