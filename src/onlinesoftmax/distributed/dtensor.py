"""Runs an operation on a DTensor.

If the softmax dimension is sharded, it calls the functions of `onlinesoftmax.distributed` on the local part; otherwise
the ordinary function.  A result per element or per row is sharded as the input is.  If a row dimension is sharded, one
more exchange adds the totals and the counts of a loss, so that every process has the mean over all rows.

This module has the function names of torch/run.py and of torch/loss_run.py.
"""

from __future__ import annotations

from typing import Any

import torch

from ..core.arguments import checked_dim
from ..core.call import Call, LossStatistics, Settings, TokenLogprobs
from ..core.declaration import Operation
from ..core.options import PLAIN, ScoreOptions
from ..core.task import Choice
from ..ops import CROSS_ENTROPY, TOKEN_LOGPROBS
from ..ops.cross_entropy.arguments import class_dim
from ..torch import loss_run as whole_rows
from ..torch import run as torch_run
from ..torch.arguments import check_options, checked_loss
from ..torch.formulas import accumulator_of
from ..torch.loss_arguments import Loss
from . import losses
from .layout import MeshLayout, compare, layout_of, local_of, without_partial_sums
from .shards import ShardedInput
from .softmax import softmax

__all__ = ["Loss", "check_targets", "check_tokens", "run", "run_loss", "run_plain", "run_tokens"]

Tensor = torch.Tensor


def run_plain(operation: Operation, x: Any, dim: Any, keepdim: bool, out: Any, choice: tuple[Any, ...]) -> Tensor:
    """A call without score options, dtype or batch invariance."""
    return run(Call(operation, x, Settings(dim, None, keepdim, Choice(*choice)), None, out))


def run(call: Call) -> Tensor:
    """The operation on a DTensor."""
    operation, x, settings, options = call.operation, call.x, call.settings, call.options
    name = operation.name
    if call.out is not None:
        raise NotImplementedError(f"{name}(): out is not available for a DTensor; use the result")
    check_options(call)
    layout = layout_of(name, x, _dims(name, settings.dim, x.dim()))
    x, local = _local(name, x, layout, {"settings": settings._replace(dim=layout.dims), "options": options})
    here = call._replace(x=local, options=layout.options(options, local.device))
    y = _sharded(here, layout) if layout.softmax_groups else torch_run.run(here)
    return layout.rows(y, settings.keepdim) if operation.per_row else layout.elements(y, x.stride())


def _dims(name: str, dim: Any, ndim: int) -> tuple[int, ...]:
    if isinstance(dim, (tuple, list)):
        # PyTorch takes an empty tuple for all dimensions.
        return tuple(checked_dim(name, each, ndim) for each in dim) or tuple(range(ndim))
    return (checked_dim(name, dim, ndim),) if ndim else ()


def _local(
    name: str, x: Any, layout: MeshLayout, arguments: dict[str, Any], over_rows: bool = False
) -> tuple[Any, Tensor]:
    """(the input without partial sums, its local part), after a comparison of the calls; arguments as for `compare`."""
    compare(name, x, layout, arguments, over_rows)
    x = without_partial_sums(x, layout)
    return x, local_of(x, layout.placements)


def _sharded(call: Call, layout: MeshLayout) -> Tensor:
    """The local part of the result if the softmax dimension is sharded."""
    call.operation.check_mergeable()
    name = call.operation.name
    x, settings = call.x, call.settings
    if len(layout.dims) > 1:
        raise NotImplementedError(f"{name}(): a dimension of dim {settings.dim} is sharded; reduce one dim at a time")
    if not x.is_floating_point() and settings.dtype is None:
        raise NotImplementedError(f"{name}(): input of dtype {x.dtype} is not floating point; pass dtype=")
    dtype = torch_run.with_autocast(call).settings.dtype or x.dtype
    x, (dim,) = x.to(torch.promote_types(x.dtype, dtype)), layout.dims
    if not call.operation.per_row:
        return softmax(name, x, dim, _sharded_call(name, layout, call.scores(), settings.choice)).to(dtype)
    options = call.scores()._replace(zero=False)
    lse = losses.logsumexp(x, dim, _sharded_call(name, layout, options, settings.choice))
    lse = lse.unsqueeze(dim) if settings.keepdim else lse
    if call.scores().zero:
        # A row of only -inf gets gradient 0: the constant in `where` stops the gradient.
        lse = lse.where(lse != -torch.inf, -torch.inf)
    return lse.to(dtype)


def _sharded_call(name: str, layout: MeshLayout, options: ScoreOptions | None, choice: Choice) -> ShardedInput:
    """The arguments of a call whose softmax dimension is sharded.

    Raises:
        NotImplementedError: batch_invariant is asked for.
    """
    if choice.batch_invariant:
        raise NotImplementedError(f"{name}(): batch_invariant is not available if the softmax dimension is sharded")
    return ShardedInput(layout.softmax_groups, options or PLAIN, choice, layout.shards)


def run_loss(x: Any, target: Any, weight: Any, fields: tuple[Any, ...], return_stats: bool) -> Any:
    """The loss as a DTensor: a number that every process has, or one loss per row, sharded as the rows are.

    Args:
        x, target, weight: DTensors; target and weight may be plain tensors.
        fields: The fields of `Loss`.
        return_stats: Return the statistics too.
    """
    name, loss = CROSS_ENTROPY.name, checked_loss(x, target, weight, Loss(*fields))
    layout = layout_of(name, x, (class_dim(x),))
    arguments = {"target": target, "weight": weight, "loss": loss, "return_stats": return_stats}
    _, local = _local(name, x, layout, arguments, over_rows=loss.reduction != "none")
    probabilities = target.is_floating_point()
    target = layout.operand("target", target) if probabilities else layout.per_row("target", target)
    weight, stats = layout.whole("weight", weight), None
    dtype = loss.settings.dtype or whole_rows.result_dtype(local)
    wide = accumulator_of(local.dtype, dtype)
    if layout.softmax_groups:
        _check_available(probabilities, return_stats, loss, wide != accumulator_of(local.dtype, local.dtype))
        call = _sharded_call(name, layout, loss.options, loss.settings.choice)
        y = losses.cross_entropy(local, target, weight, loss.with_settings(dtype=dtype), call, layout.row_groups)
    else:
        weight = losses.weight_of_mean(local, target, weight, loss, layout.row_groups)
        each = loss.per_row(dtype=wide)._replace(options=layout.options(loss.options, local.device))
        rows = whole_rows.run_loss(local, target, weight, each, return_stats)
        if return_stats:
            rows, stats = rows
        y = losses.reduced(rows, target, weight, loss, layout.row_groups).to(dtype)
    y = layout.rows(y) if loss.reduction == "none" else layout.number(y)
    return y if stats is None else (y, LossStatistics(*map(layout.rows, stats)))


def _check_available(probabilities: bool, return_stats: bool, loss: Loss, wider: bool) -> None:
    named = {
        "target with class probabilities": probabilities,
        "return_stats": return_stats,
        "inplace_backward": loss.inplace,
        "mask": loss.mask() is not None,
        "scale as a tensor": loss.options is not None and isinstance(loss.options.scale, Tensor),
        "dtype=torch.float64": wider,
    }
    for name, given in named.items():
        if given:
            raise NotImplementedError(f"cross_entropy(): {name} is not available if the softmax dimension is sharded")


def run_tokens(
    x: Any, index: Any, dim: Any, options: ScoreOptions | None, entropy: bool, choice: Choice, ignore_index: Any = None,
    support: Any = None,
) -> TokenLogprobs:  # fmt: skip
    """(logprob, entropy, lse) as DTensors, sharded as the rows are."""
    name = TOKEN_LOGPROBS.name
    _refuse_support(support)
    axis = whole_rows.check_token_arguments(x, index, dim)
    if index.dim() == x.dim():
        raise NotImplementedError(f"{name}(): index with several tokens of each row is not available for a DTensor")
    check_options(Call(TOKEN_LOGPROBS, x, Settings(dim), options))
    layout = layout_of(name, x, (axis,))
    arguments = {"index": index, "dim": layout.dims, "options": options, "entropy": entropy, "choice": choice}
    _, local = _local(name, x, layout, arguments)
    index, options = layout.per_row("index", index), layout.options(options, local.device)
    if layout.softmax_groups:
        call = _sharded_call(name, layout, options, choice)
        found = losses.named(losses.log_probabilities(local, index, axis, entropy, call))
        found = found if ignore_index is None else whole_rows.without_ignored(found, index, ignore_index)
    else:
        found = whole_rows.run_tokens(local, index, axis, options, entropy, choice, ignore_index)
    return TokenLogprobs(*(None if t is None else layout.rows(t) for t in found))


def check_targets(x: Any, target: Any, weight: Any, fields: tuple[Any, ...]) -> None:
    """Check the arguments, and the range of every target on every process, so that all raise the same error."""
    loss = checked_loss(x, target, weight, Loss(*fields))
    # Only the shape of x is used, so its partial sums are not added here.
    layout = layout_of(CROSS_ENTROPY.name, x, (class_dim(x),))
    whole_rows.check_targets(x, layout.whole("target", target), None, loss)


def _refuse_support(support: Any) -> None:
    if support is not None:
        raise NotImplementedError(f"{TOKEN_LOGPROBS}(): support is not available for a DTensor")


def check_tokens(x: Any, index: Any, dim: Any, ignore_index: Any = None, support: Any = None) -> None:
    """Check the arguments, and the range of every index on every process, so that all raise the same error."""
    _refuse_support(support)
    layout = layout_of(TOKEN_LOGPROBS.name, x, (whole_rows.check_token_arguments(x, index, dim),))
    whole_rows.check_tokens(x, layout.whole("index", index), dim, ignore_index)
