"""The ways of the calls of linear/__init__.py on torch tensors.

An eager call runs the functions of tokens.py and columns.py, a traced one those of traced.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..core.arguments import check_flags
from ..core.call import LossStatistics, Settings, TokenLogprobs
from ..ops.cross_entropy.arguments import checked_numbers
from ..torch.arguments import TORCH, check_dtype, check_weight, checked_ignore_index
from ..torch.formulas import accumulator_of
from ..torch.gradients import is_traced
from ..torch.loss_arguments import (
    Loss,
    count_of,
    equals,
    ignored,
    is_class,
    scaled_weight,
    scales_weight,
)
from ..torch.loss_run import statistics_of
from . import rows, traced
from .arguments import (
    check_token_loss,
    checked_acc_dtype,
    checked_head,
    checked_memory,
    checked_options_of,
    checked_per_token,
    is_autocast,
    noted,
    plan_for,
    records,
)
from .columns import LogProbabilities, Way
from .columns import run as run_columns
from .formulas import (
    LossCall,
    checked_losses,
    divided,
    loss_of,
    loss_of_statistics,
    loss_rows,
    needs_whole_rows,
    with_divisor,
)
from .sharing import Sharing
from .tokens import Compute, KnownFactor, LaterFactor, Rows, Work
from .tokens import run as run_tokens

Tensor = torch.Tensor

Tensors = tuple[Any, Any, Any, Any]
"""The arguments input, linear_weight, target and linear_bias."""


def checked_loss(
    tensors: Tensors, numbers: tuple[Any, ...], weight: Any, token_weight: Any, dtype: torch.dtype | None, memory: Any,
    acc_dtype: Any, total: int | None = None,
) -> LossCall:  # fmt: skip
    """Check the arguments of `linear_cross_entropy`.

    Args:
        tensors, weight, token_weight, dtype, memory, acc_dtype: The arguments.
        numbers: reduction, ignore_index, label_smoothing, z_loss, scale and softcap.
        total: Number of classes on all processes; None where this one has all.
    """
    name, (reduction, *given, scale, softcap), whole = "linear_cross_entropy", numbers, total is None
    head = checked_head(name, *tensors, soft=whole, part=not whole)
    options = checked_options_of(name, scale, softcap, head if whole else None)
    ignore_index, smoothing, z_loss = checked_numbers(TORCH, reduction, tuple(given), name)
    check_weight(f"{name}()", weight, head.input, len(head.weight) if total is None else total)
    check_dtype(f"{name}()", dtype)
    wide = accumulator_of(head.input.dtype, head.input.dtype)
    dtype = dtype or (wide if is_autocast(head.input) else head.input.dtype)
    of_rows = dtype if dtype.itemsize < wide.itemsize else wide
    loss = Loss(Settings(1, of_rows), ignore_index, reduction, smoothing, z_loss, options)
    factor = torch.ones(head.input.shape[:1], dtype=wide, device=head.input.device)
    if token_weight is not None:
        factor = checked_per_token(name, "token_weight", token_weight, head).detach().to(wide)
    bounds = checked_memory(name, memory), checked_acc_dtype(name, acc_dtype, head.input.dtype)
    return LossCall(head, loss, factor, dtype, *bounds)


def cross_entropy(
    tensors: Tensors, numbers: tuple[Any, ...], weight: Any, token_weight: Any, dtype: torch.dtype | None,
    return_stats: bool, memory: Any, acc_dtype: Any,
) -> Any:  # fmt: skip
    """Compute `linear_cross_entropy` of arguments that are not checked; `numbers` has those of `checked_loss`."""
    check_flags("linear_cross_entropy()", return_stats=return_stats)
    call = checked_loss(tensors, numbers, weight, token_weight, dtype, memory, acc_dtype)
    (head, loss, factor, dtype, *_), divisor = call, None
    if weight is not None and scales_weight(head.target, weight, loss):
        weight = scaled_weight(head.target, weight, loss, factor.dtype)
    if loss.reduction == "mean":
        soft = head.target.is_floating_point()
        divisor = torch.ones_like(factor).sum() if soft else count_of(head.target, weight, loss, factor.dtype)
    factor, divisor = with_divisor(factor, divisor, head.input.dtype)
    way = traced.losses if is_traced(head.input) else _losses
    y, stats = way(call._replace(factor=factor), weight, return_stats)
    y = divided(y, divisor)
    if loss.reduction == "mean" and not head.input.shape[0]:
        # The mean of no tokens, whose gradients are 0.
        y = y + torch.nan
    y = (y.reshape(head.shape) if loss.reduction == "none" else y).to(dtype)
    if not return_stats:
        return y
    return y, LossStatistics(*[t.reshape(head.shape) for t in statistics_of(head.target, loss, *stats)])


def _losses(call: LossCall, weight: Tensor | None, stats: bool) -> tuple[Tensor, Any]:
    """As `losses`, with all classes here; with `stats`, the further results are lse, entropy and the largest class."""
    target, loss = call.head.target, call.loss
    of_chunk = loss_rows(target, weight, loss._replace(reduction="none"), stats)
    return losses(call, weight, of_chunk, needs_whole_rows(loss, target, weight, stats))


def losses(
    call: LossCall, weight: Tensor | None, of_chunk: Rows, whole_rows: bool, sharing: Sharing | None = None
) -> tuple[Tensor, Any]:
    """The losses, each times its factor, or their sum; and the further results of `of_chunk` for each token.

    Args:
        call: The call.
        weight: Weight of each class, or None.
        of_chunk: The function of the logits of a chunk.
        whole_rows: As for `problem_of`.
        sharing: The other processes that have classes; None where this one has all.
    """
    head, loss, factor, each = call.head, call.loss, call.factor, call.loss.reduction == "none"
    inputs, target = (head.input, head.weight, head.bias), head.target
    in_place = call.sum_dtype.itemsize < factor.itemsize
    how = "linear_cross_entropy", head, call.memory, each, whole_rows, sharing, in_place
    plan = plan_for(*how, in_two=sharing is None)
    if plan.apart and plan.name != "columns" and not rows.are_in_two(*inputs[:2], target, weight, loss):
        plan = plan_for(*how)
    noted("linear_cross_entropy", *inputs[:2], plan)
    way = Way(plan, loss.options, sharing, entropy=sharing is not None)
    # The gradient of a mean over many tokens is too small for float16, so there it waits for the factor of a scaler.
    later = each or sharing is not None or head.input.dtype == torch.float16
    if plan.keeps or (plan.name == "columns" and later):
        y = loss_of(LogProbabilities.apply(*inputs, target, way), target, loss) * factor
        return y if each else y.sum(), ()
    if plan.name == "columns":
        compute = partial(run_columns, way, target, loss_of_statistics(target, loss))
        return KnownFactor.apply(*inputs, factor, compute, records(head))[0], ()
    skipped = None if target.is_floating_point() else ignored(target, loss)
    work = Work(plan, of_chunk, skipped, sharing, call.sum_dtype, (target, weight))
    if each:
        y, *more = LaterFactor.apply(*inputs, work)
        return y * factor, more
    y, _, *more = KnownFactor.apply(*inputs, factor, partial(run_tokens, work), records(head))
    return y, more


def token_logprobs(
    tensors: Tensors, ignore_index: int | None, scale: Any, softcap: Any, memory: Any, sharing: Sharing | None = None,
    support: Any = None,
) -> TokenLogprobs:  # fmt: skip
    """Run `linear_token_logprobs`; with `sharing`, other processes have the other classes, and there is no support."""
    name = "linear_token_logprobs"
    head = checked_head(name, *tensors, soft=False, part=sharing is not None)
    options, memory = checked_options_of(name, scale, softcap, head), checked_memory(name, memory)
    if support is not None:
        # `torch.compiler.disable`, with which the module decorates, imports the compiler.
        from .support import truncated_logprobs

        plan = noted(name, head.input, head.weight, plan_for(name, head, memory))
        logprob, entropy, lse = truncated_logprobs(name, head, options, support, plan)
    elif sharing is None and is_traced(head.input):
        logprob, entropy, lse = traced.statistics(head, options, memory)
    else:
        inputs = head.input, head.weight, head.bias
        plan = noted(name, *inputs[:2], plan_for(name, head, memory, sharing=sharing))
        logprob, entropy, lse = LogProbabilities.apply(*inputs, head.target, Way(plan, options, sharing))
    if ignore_index is not None:
        logprob = logprob.masked_fill(equals(head.target, checked_ignore_index(name, ignore_index)), 0.0)
    return TokenLogprobs(logprob.reshape(head.shape), entropy.reshape(head.shape), lse.reshape(head.shape))


def token_loss(
    tensors: Tensors, loss: Callable[..., Any], per_token: tuple[Any, ...], numbers: tuple[Any, ...], memory: Any,
    sharing: Sharing | None = None, acc_dtype: Any = None,
) -> Tensor:  # fmt: skip
    """As `linear_token_loss`; `numbers` has reduction, ignore_index, scale and softcap.

    With `sharing`, other processes have the other classes, or further tokens.
    """
    name, (reduction, ignore_index, scale, softcap) = "linear_token_loss", numbers
    head = checked_head(name, *tensors, soft=False, part=sharing is not None)
    options, of_target = checked_options_of(name, scale, softcap, head), head.target
    check_token_loss(name, loss, len(per_token), reduction)
    beside = [checked_per_token(name, f"per_token[{i}]", t, head).detach() for i, t in enumerate(per_token)]
    ignored = equals(of_target, checked_ignore_index(name, ignore_index))
    counts = (~ignored).to(accumulator_of(head.input.dtype, head.input.dtype))
    whole: Callable[[Tensor], Tensor] = _itself if sharing is None else sharing.over_tokens
    count = whole(counts.sum()) if reduction == "mean" else None
    factor, divisor = with_divisor(counts, count, head.input.dtype)
    memory, sum_dtype = checked_memory(name, memory), checked_acc_dtype(name, acc_dtype, head.input.dtype)
    if sharing is None and is_traced(head.input):
        y = divided(traced.token_loss(head, options, (memory, sum_dtype), factor, loss, beside, ignored), divisor)
        return y if count is None else y.masked_fill(count == 0, torch.nan)
    in_place = sum_dtype.itemsize < counts.itemsize
    plan = noted(name, *head[:2], plan_for(name, head, memory, sharing=sharing, in_place=in_place))
    own_target = of_target if sharing is None else sharing.local(of_target)

    def of_chunk(z: Tensor, part: slice, dy: Tensor | None) -> tuple[tuple[Tensor, ...], Any]:
        local = own_target[part]
        local = local.where((local >= 0) & (local < z.shape[1]), -1)
        of_tokens = rows.of_part(options, part)
        known = rows.statistics(z, local, of_tokens)
        if sharing is not None:
            known = sharing.merged(known, of_target[part])
        losses, dys = _evaluated(loss, known, [t[part] for t in beside], ignored[part], dy)
        if dy is None:
            return (losses,), None
        zeros, (dlogprob, dentropy, dlse) = torch.zeros_like(known.logprob), dys
        classes = z.shape[1] if sharing is None else sharing.total
        dlogprob = zeros if dlogprob is None else dlogprob.where(is_class(of_target[part], classes), 0.0)
        dlse = zeros if dlse is None else dlse
        # Where another process has the target, the gradient of its logarithm is one of the sum alone.
        dlse = torch.where(local < 0, dlse - dlogprob, dlse)
        return (losses,), rows.gradient(z, local, dlse, rows.incoming(known, dlogprob, dentropy), of_tokens)

    def of_all(known: rows.Statistics, dy: Tensor | None) -> Any:
        return _evaluated(loss, known, beside, ignored, dy)

    compute: Compute = partial(run_tokens, Work(plan, of_chunk, ignored, sharing, sum_dtype))
    if plan.name == "columns":
        compute = partial(run_columns, Way(plan, options), of_target, of_all)
    total = KnownFactor.apply(head.input, head.weight, head.bias, factor, compute, records(head))[0]
    total = divided(whole(total), divisor)
    return total if count is None else total.masked_fill(count == 0, torch.nan)


def _evaluated(
    loss: Callable[..., Any], known: rows.Statistics, beside: list[Tensor], ignored: Tensor, dy: Tensor | None
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The losses of some tokens, and with dy the gradients of the sum of dy · loss in logprob, entropy and lse.

    An ignored token has no loss and no gradient, whatever the function makes of it.
    """
    wide = known.logprob.dtype
    known = known._replace(logprob=known.logprob.clamp(max=0.0).masked_fill(ignored, 0.0))
    leaves = [t.detach().to(wide).requires_grad_(dy is not None) for t in known if t is not None]
    with torch.set_grad_enabled(dy is not None):
        y = loss(*leaves, *beside)
    losses = checked_losses("linear_token_loss", y, *leaves).detach().masked_fill(ignored, 0.0).to(wide)
    if dy is None:
        return losses, ()
    found: Any = [None, None, None]
    if y.requires_grad:
        found = torch.autograd.grad(y, leaves, dy.to(y.dtype), allow_unused=True)
    return losses, tuple(None if g is None else g.masked_fill(ignored, 0.0) for g in found)


def _itself(t: Tensor) -> Tensor:
    return t
