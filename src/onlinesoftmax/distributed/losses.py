"""Cross-entropy and log-probabilities if the softmax dimension is sharded, from the statistics of the rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..core.agreement import kind_of
from ..core.arguments import checked_dim
from ..core.call import Settings, TokenLogprobs
from ..core.options import PLAIN
from ..core.processes import gathered
from ..ops import CROSS_ENTROPY, TOKEN_LOGPROBS
from ..torch import eager
from ..torch.arguments import check_first_derivative, check_index, check_weight
from ..torch.formulas import accumulator_of
from ..torch.loss_arguments import UNSIGNED, Loss, count_of, ignored, is_class, scaled, scales_weight, signed
from ..torch.loss_run import result_dtype
from .collective_eager import statistics
from .fast_path import run_if_possible
from .local import autocast_dtype
from .shards import Operands, ShardedInput, Shards, ShardSignature, shards_of

Tensor = torch.Tensor


def cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss, call: ShardedInput, row_groups: tuple[Any, ...] = ()
) -> Tensor:
    """The loss if the softmax dimension is sharded, the same on every process; float32 under autocast, as PyTorch's.

    Args:
        x, target, weight, loss, call: The arguments of the call.
        row_groups: Process groups over which a row dimension is sharded.
    """
    dim = 1 if x.dim() > 1 else 0

    def more() -> dict[str, Any]:
        return {
            "target": kind_of(target), "weight": kind_of(weight), "ignore_index": int(loss.ignore_index),
            "reduction": loss.reduction, "label_smoothing": float(loss.smoothing), "z_loss": float(loss.z_loss),
            "dtype": str(loss.settings.dtype),
        }  # fmt: skip

    shards = shards_of(CROSS_ENTROPY.name, x, dim, call, more)
    _check_target("cross_entropy()", "target", x, target, dim)
    target, call = _signed(target, call)
    check_weight("cross_entropy()", weight, x, shards.total)
    if scales_weight(target, weight, loss):
        # The launches under the key of the public function would take the weights as they are.
        weight, call = weight_of_mean(x, target, weight, loss, row_groups), call.without_key
    dtype = loss.settings.dtype or result_dtype(x)
    # The losses of the rows of several groups are reduced together.
    wide = accumulator_of(x.dtype, x.dtype) if row_groups else dtype
    settings, reduction = Settings(dim, wide, choice=call.choice), "none" if row_groups else loss.reduction
    each = loss._replace(settings=settings, reduction=reduction)
    signature = ShardSignature(dim, shards, call.options, call.choice, each, ("y",), wide)
    operands = Operands(x, None, target, weight)
    found = run_if_possible(signature, operands, call)
    if found is not None and not row_groups:
        return found[0]
    if found is None:
        rows = loss_rows(statistics(signature, operands, call.groups), target, weight, loss, shards)
    else:
        rows = found[0]
    return reduced(rows, target, weight, loss, row_groups).to(dtype)


def weight_of_mean(
    x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss, row_groups: tuple[Any, ...]
) -> Tensor | None:
    """The weights of the rows of all groups, as `scaled_weight` of torch has them for those of one process."""
    if weight is None or not scales_weight(target, weight, loss):
        return weight
    wide = accumulator_of(x.dtype, weight.dtype)
    sums = torch.stack([count_of(target, each, loss, wide) for each in (None, weight)])
    if row_groups:
        sums = gathered(sums, *row_groups).sum(0)
    return scaled(weight, sums[0], sums[1])


def loss_rows(numbers: Mapping[str, Any], target: Tensor, weight: Tensor | None, loss: Loss, shards: Shards) -> Tensor:
    """The loss of each row: 0 where it is ignored, NaN where its target is no class."""
    logprob, lse, spread = numbers["y"], numbers["lse"], numbers["spread"]
    own: Any = 1 - loss.smoothing
    inside = is_class(target, shards.total)
    if weight is not None:
        own = own * weight.to(lse.dtype)[target.where(inside, 0).long()]
    out = ignored(target, loss)
    # The log-probability is NaN where the target is no class.
    rows = -own * logprob
    if spread is not None or loss.z_loss:
        # The gradient of NaN * NaN would be NaN even where a row does not count.
        more = torch.zeros_like(rows) if spread is None else loss.smoothing / shards.total * spread
        if loss.z_loss:
            lse = lse.masked_fill(out, 0.0)
            more = more + loss.z_loss * lse * lse
        # A row whose target is no class has no gradient.
        rows = rows + more.masked_fill(~inside, torch.nan)
    return rows.masked_fill(out, 0.0)


def reduced(
    rows: Tensor, target: Tensor, weight: Tensor | None, loss: Loss, row_groups: tuple[Any, ...] = ()
) -> Tensor:
    """The losses of all rows, reduced as asked for.

    Args:
        rows: The loss of each row of this process.
        target, weight, loss: The other arguments of the call.
        row_groups: Process groups over which a row dimension is sharded.
    """
    if loss.reduction == "none":
        return rows
    total, count = rows.sum(), None
    if loss.reduction == "mean":
        probabilities = target.is_floating_point()
        count = total.new_tensor(rows.numel()) if probabilities else count_of(target, weight, loss, rows.dtype)
    if row_groups:
        y: Tensor = OverRows.apply(total, count, row_groups)
        return y
    return total if count is None else total / count


class OverRows(torch.autograd.Function):
    """The sum of all processes' totals, divided by the sum of their counts if there are counts: one collective."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor | None, groups: tuple[Any, ...]) -> Tensor:
        packed = torch.stack([total] if count is None else [total, count])
        found: Tensor = gathered(packed, *groups).sum(0)
        if count is None:
            return found[0]
        ctx.save_for_backward(found[1])
        return found[0] / found[1]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if dy.requires_grad:
            # The derivative in dy is a sum over all processes.
            check_first_derivative("the gradient of a function of a loss over rows of several processes")
        return dy / ctx.saved_tensors[0] if ctx.saved_tensors else dy, None, None


def log_probabilities(x: Tensor, index: Tensor, dim: Any, entropy: bool, call: ShardedInput) -> tuple[Tensor, ...]:
    """(logprob, lse), and the entropy if it is asked for; the same on every process."""
    dim = checked_dim(TOKEN_LOGPROBS.name, dim, x.dim())
    shards = shards_of(TOKEN_LOGPROBS.name, x, dim, call, lambda: {"index": kind_of(index), "entropy": bool(entropy)})
    _check_target(f"{TOKEN_LOGPROBS}()", "index", x, index, dim)
    index, call = _signed(index, call)
    outputs = ("y", "lse", *(("entropy",) if entropy else ()))
    return _statistics(x, index, dim, shards, call, outputs, accumulator_of(x.dtype, x.dtype))


def named(numbers: tuple[Tensor, ...]) -> TokenLogprobs:
    """The named results of (logprob, lse) or (logprob, lse, entropy)."""
    logprob, lse, *entropy = numbers
    return TokenLogprobs(logprob, entropy[0] if entropy else None, lse)


def logsumexp(x: Tensor, dim: Any, call: ShardedInput) -> Tensor:
    """The logsumexp if the softmax dimension is sharded, without this dimension; the same on every process."""
    dim = checked_dim("logsumexp", dim, x.dim())
    shards = shards_of("logsumexp", x, dim, call)
    dtype = autocast_dtype("logsumexp", x)
    # A target that is no column anywhere has no gradient.
    (lse,) = _statistics(x, Operands(x).with_target(dim).target, dim, shards, call, ("lse",), dtype)
    return lse.to(dtype)


def _statistics(
    x: Tensor, target: Tensor, dim: int, shards: Shards, call: ShardedInput, outputs: tuple[str, ...],
    result: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The statistics of each row that are named in `outputs`, in this order; by kernels alone if possible.

    Kernels alone return "y" and "lse" in the dtype `result`; otherwise all statistics have the accumulator's dtype.
    """
    options = call.options
    if options.bias is not None or isinstance(options.scale, Tensor):
        x, options = eager.scores_of(x, dim, options, x.dtype)[0], PLAIN
    signature = ShardSignature(dim, shards, options._replace(mask=None), call.choice, None, outputs, result)
    operands = Operands(x, options.mask, target)
    found = run_if_possible(signature, operands, call)
    if found is not None:
        return found
    by_name = statistics(signature, operands, call.groups)
    return tuple(by_name[name] for name in outputs)


def _signed(target: Tensor, call: ShardedInput) -> tuple[Tensor, ShardedInput]:
    """The targets in a dtype that kernels take; launches for it do not fit the key of a call that has another dtype."""
    return (signed(target), call.without_key) if target.dtype in UNSIGNED else (target, call)


def _check_target(name: str, argument: str, x: Tensor, target: Any, dim: int) -> None:
    if not isinstance(target, Tensor):
        raise TypeError(f"{name}: argument '{argument}' must be Tensor, not {type(target).__name__}")
    check_index(name, argument, x, target, (*x.shape[:dim], *x.shape[dim + 1 :]))
