"""Plans `columns` and `stored` of token log-probabilities, whose gradient is known only in the backward pass.

Forward merges the statistics of chunks of columns; backward makes each chunk again.  So each slice of the gradient of
the weight is one product, rounded once.  Where all logits fit, they are one chunk, which is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..core.options import ScoreOptions
from ..torch.formulas import accumulator_of
from ..torch.loss_arguments import is_class
from .arguments import check_gradients
from .plans import LinearPlan
from .products import add_product, logits_of, without
from .rows import Statistics, gradient, statistics
from .sharing import Sharing

Tensor = torch.Tensor

Inputs = tuple[Tensor, Tensor, Tensor | None]
"""Input, weight and bias of a head."""


class Way(NamedTuple):
    """How the log-probabilities of a head are computed.

    Attributes:
        plan: How the columns are cut.
        options: Scale and softcap.
        sharing: The other processes that have classes; None where this one has all.
    """

    plan: LinearPlan
    options: ScoreOptions | None
    sharing: Sharing | None = None


def merged(a: Statistics, b: Statistics, b_has_target: Tensor) -> Statistics:
    """The statistics of two slices of rows; the logarithm is that of the slice that has the target.

    With the parts w of the whole sum, the entropy is the sum of w · (entropy of the slice - log w).
    """
    lse = torch.logaddexp(a.lse, b.lse)
    entropy, logs = torch.zeros_like(lse), []
    for one in (a, b):
        log_w = torch.where(one.lse == lse, torch.zeros_like(lse), one.lse - lse)
        w = log_w.exp()
        # A slice of -inf has no entropy, and no part of the sum.
        entropy = entropy + torch.where(w == 0, 0.0, w * (one.entropy - log_w))
        logs.append(one.logprob + log_w)
    return Statistics(torch.where(b_has_target, logs[1], logs[0]), entropy, lse)


def _local(target: Tensor, first: int, end: int) -> Tensor:
    """The targets counted from the first column of a chunk; -1 where they are in none of its columns."""
    return torch.where((target >= first) & (target < end), target - first, -1)


def _columns_at_once(plan: LinearPlan, classes: int) -> int:
    return max(min(plan.chunk, classes) if plan.name == "columns" else classes, 1)


def _of_no_columns(target: Tensor, dtype: torch.dtype) -> Statistics:
    zeros = torch.zeros(target.shape, dtype=dtype, device=target.device)
    return Statistics(zeros + torch.nan, zeros, zeros.double() - torch.inf)


def statistics_of(way: Way, inputs: Inputs, target: Tensor) -> tuple[Statistics, Tensor]:
    """The statistics of each token, and the logits of the last chunk, which are all logits with the plan `stored`."""
    (plan, options, sharing), (x, weight, bias) = way, inputs
    classes, found, whole_target, wide = len(weight), None, target, accumulator_of(x.dtype, x.dtype)
    target = target if sharing is None else sharing.local(target)
    size = _columns_at_once(plan, classes)
    memory = torch.empty(len(x) * size, dtype=x.dtype, device=x.device)
    z = memory.view(len(x), size)
    for first in range(0, classes, size):
        end = min(first + size, classes)
        z = memory[: len(x) * (end - first)].view(len(x), end - first)
        logits_of(x, weight[first:end], None if bias is None else bias[first:end], z)
        local = _local(target, first, end)
        one = statistics(z, local, options)
        if size < classes or sharing is not None:
            # A slice of -inf has no softmax of its own, but its classes have the probability 0 in the whole row.
            one = one._replace(logprob=one.logprob.masked_fill((local >= 0) & (one.lse == -torch.inf), -torch.inf))
        found = one if found is None else merged(found, one, local >= 0)
    if found is None:
        found = _of_no_columns(target, wide)
    if sharing is not None:
        found = sharing.merged(found, whole_target)
    # Rounding can put a logarithm above 0.  A row whose sum is 0 or infinite has no probabilities.
    logprob = found.logprob.clamp(max=0.0).masked_fill(found.lse.isinf(), torch.nan)
    return Statistics(logprob.to(wide), found.entropy.to(wide), found.lse), z


def gradients_of(
    way: Way, inputs: Inputs, target: Tensor, known: Statistics, dys: tuple[Tensor | None, ...],
    wanted: tuple[bool, bool, bool], logits: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of input, weight and bias, from those of logprob, entropy and lse.

    Args:
        way, inputs, target: As in the forward pass.
        known: Its statistics.
        dys: Gradients of the statistics; None for no gradient.
        wanted: Whether the gradients of input, weight and bias are wanted.
        logits: All logits, if they are kept.  With the plan `stored` their gradient takes their place.
    """
    (plan, options, sharing), (x, weight, bias), (of_input, of_weight, of_bias) = way, inputs, wanted
    nothing = torch.zeros_like(known.logprob)
    dlogprob, dentropy, dlse = dys
    dlogprob, dlse = nothing if dlogprob is None else dlogprob, nothing if dlse is None else dlse
    # A target that is no class has no gradient of its logarithm.
    dlogprob = dlogprob.where(is_class(target, len(weight) if sharing is None else sharing.total), 0.0)
    target = target if sharing is None else sharing.local(target)
    # The logits of a token without gradients may be NaN, and so may its input: 0 · NaN would be NaN.
    skipped = (dlogprob == 0) & (dlse == 0) & (True if dentropy is None else dentropy == 0)
    # A row whose sum is 0 or infinite has no probabilities, in none of its slices.
    known = known._replace(lse=known.lse.masked_fill(known.lse.isinf(), torch.nan))
    wide, classes = accumulator_of(x.dtype, x.dtype), len(weight)
    one_product = plan.chunks == 1 and sharing is None
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device) if of_input and sharing is None else None
    apart = result is not None and not one_product and wide != x.dtype
    dx = torch.empty(x.shape, dtype=wide, device=x.device) if of_input and (apart or result is None) else result
    # The memory of the result is free until the last product of the weight's gradient, unless it is the sum.
    valid = without(x, skipped, result if one_product or apart else None) if of_weight else x
    dw = torch.empty_like(weight, memory_format=torch.contiguous_format) if of_weight else None
    db = torch.empty(classes, dtype=wide, device=x.device) if of_bias else None
    size, in_place = _columns_at_once(plan, classes), logits is not None and plan.name == "stored"
    memory = logits.view(-1) if logits is not None and in_place else x.new_empty(len(x) * size)
    finish = None if dx is None or classes else _in_dtype(dx.zero_(), x, sharing, result)
    for first in range(0, classes, size):
        end = min(first + size, classes)
        z = memory[: len(x) * (end - first)].view(len(x), end - first)
        if logits is None:
            logits_of(x, weight[first:end], None if bias is None else bias[first:end], z)
        elif not in_place:
            z.copy_(logits[:, first:end])
        local = _local(target, first, end)
        of_sum = torch.where(local < 0, dlse - dlogprob, dlse)
        dz = gradient(z, local, known, dlogprob, dentropy, of_sum, options)
        if dx is not None and not one_product:
            add_product(dx, dz, weight[first:end], first == 0)
        if dx is not None and end == classes:
            # A sum over processes travels during the last product.
            finish = _in_dtype(dx, x, sharing, result)
        if dw is not None:
            torch.mm(dz.t(), valid, out=dw[first:end])
        if dx is not None and one_product:
            torch.mm(dz, weight, out=dx)
        if db is not None:
            torch.sum(dz, 0, dtype=wide, out=db[first:end])
    return None if finish is None else finish(), dw, None if db is None else db.to(weight.dtype)


def _in_dtype(dx: Tensor, x: Tensor, sharing: Sharing | None, result: Tensor | None) -> Callable[[], Tensor]:
    """The function that returns the gradient of the input in its dtype, added up over the processes."""
    if sharing is None:
        return lambda: dx if result is None or dx is result else result.copy_(dx)
    return sharing.summed(dx, torch.empty_like(x))


class LogProbabilities(torch.autograd.Function):
    """(logprob, entropy, lse) of each token, each with derivatives in input, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, plan: LinearPlan,
        options: ScoreOptions | None, sharing: Sharing | None = None,
    ) -> Any:  # fmt: skip
        ctx.way = Way(plan, options, sharing)
        found, logits = statistics_of(ctx.way, (x, weight, bias), target)
        ctx.logits = logits if plan.name == "stored" and any(ctx.needs_input_grad) else None
        ctx.save_for_backward(x, weight, bias, target, *found)
        ctx.set_materialize_grads(False)
        return found.logprob, found.entropy, found.lse.to(found.logprob.dtype)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> Any:
        check_gradients(*dys)
        nothing = (None,) * 4
        if all(dy is None for dy in dys):
            return (None, None, None, *nothing)
        x, weight, bias, target, *known = ctx.saved_tensors
        logits, ctx.logits = ctx.logits, None
        wanted: Any = ctx.needs_input_grad[:3]
        found = gradients_of(ctx.way, (x, weight, bias), target, Statistics(*known), dys, wanted, logits)
        return (*found, *nothing)
