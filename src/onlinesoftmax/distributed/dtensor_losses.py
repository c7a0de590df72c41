"""cross_entropy and token_logprobs on a DTensor.

This module has the same function names as torch/losses.py.  Each process computes the losses of its rows.  If a row
dimension is sharded, one more exchange adds the totals and the counts.  So every process has the mean over all rows.
"""

from __future__ import annotations

from typing import Any

import torch

from ..core.call import Call, LossStatistics, Settings, TokenLogprobs
from ..core.options import ScoreOptions
from ..core.task import Choice
from ..ops import OPERATIONS
from ..torch import loss_arguments, losses
from ..torch.check import check_options, checked_dim
from ..torch.gradients import accumulator_of
from ..torch.loss import Loss
from . import losses as sharded_losses
from .dtensor import scored, sharded_call
from .layout import compare, layout_of, local_of, without_partial_sums

__all__ = ["Loss", "check_targets", "check_tokens", "cross_entropy", "token_logprobs"]

Tensor = torch.Tensor


def cross_entropy(x: Any, target: Any, weight: Any, fields: tuple[Any, ...], return_stats: bool) -> Any:
    """The loss as a DTensor: a number that every process has, or one loss per row, sharded as the rows are.

    Args:
        x, target, weight: DTensors; target and weight may be plain tensors.
        fields: The fields of `Loss`.
        return_stats: Return the statistics too.
    """
    loss = loss_arguments.checked_loss(x, target, weight, Loss(*fields))
    layout = layout_of("cross_entropy", x, (1 if x.dim() > 1 else 0,))
    arguments = {"target": target, "weight": weight, "loss": loss, "return_stats": return_stats}
    compare("cross_entropy", x, layout, arguments, over_rows=loss.reduction != "none")
    x = without_partial_sums(x, layout)
    probabilities = target.is_floating_point()
    target = layout.operand("target", target) if probabilities else layout.per_row("target", target)
    weight, local = layout.whole("weight", weight), local_of(x, layout.placements)
    stats, dtype = None, loss.settings.dtype or losses.result_dtype(local)
    wide = accumulator_of(local.dtype, dtype)
    if layout.softmax_groups:
        _check_available(probabilities, return_stats, loss, wide != accumulator_of(local.dtype, local.dtype))
        call = sharded_call("cross_entropy", layout, loss.options or ScoreOptions(), loss.settings.choice)
        loss = loss._replace(settings=loss.settings._replace(dtype=dtype))
        y = sharded_losses.cross_entropy(local, target, weight, loss, call, layout.row_groups)
    else:
        weight = sharded_losses.weight_of_mean(local, target, weight, loss, layout.row_groups)
        each = loss._replace(
            settings=loss.settings._replace(dtype=wide), reduction="none",
            options=layout.options(loss.options, local.device),
        )  # fmt: skip
        rows = losses.cross_entropy(local, target, weight, each, return_stats)
        if return_stats:
            rows, stats = rows
        y = sharded_losses.reduced(rows, target, weight, loss, layout.row_groups).to(dtype)
    y = layout.rows(y) if loss.reduction == "none" else layout.number(y)
    return y if stats is None else (y, LossStatistics(*map(layout.rows, stats)))


def _check_available(probabilities: bool, return_stats: bool, loss: Loss, wider: bool) -> None:
    named = {
        "target with class probabilities": probabilities,
        "return_stats": return_stats,
        "inplace_backward": loss.inplace,
        "mask": loss.mask is not None,
        "scale as a tensor": loss.tensors[0] is not None,
        "dtype=torch.float64": wider,
    }
    for name, given in named.items():
        if given:
            raise NotImplementedError(f"cross_entropy(): {name} is not available if the softmax dimension is sharded")


def token_logprobs(
    x: Any, index: Any, dim: Any, options: ScoreOptions | None, entropy: bool, choice: Choice, ignore_index: Any = None
) -> TokenLogprobs:
    """(logprob, entropy, lse) as DTensors, sharded as the rows are."""
    name = "token_logprobs"
    loss_arguments.check_token_arguments(x, index, dim)
    if index.dim() == x.dim():
        raise NotImplementedError(f"{name}(): index with several tokens of each row is not available for a DTensor")
    check_options(Call(OPERATIONS[name], x, Settings(dim), options))
    layout = layout_of(name, x, (checked_dim(name, dim, x.dim()),))
    arguments = {"index": index, "dim": layout.dims, "options": options, "entropy": entropy, "choice": choice}
    compare(name, x, layout, arguments)
    x = without_partial_sums(x, layout)
    index, local = layout.per_row("index", index), local_of(x, layout.placements)
    options = layout.options(options, local.device)
    if layout.softmax_groups:
        z, call = scored(local, layout.dims[0], sharded_call(name, layout, options or ScoreOptions(), choice))
        found = sharded_losses.token_logprobs(z, index, layout.dims[0], entropy, call)
        found = found if ignore_index is None else losses.without_ignored(found, index, ignore_index)
    else:
        found = losses.token_logprobs(local, index, layout.dims[0], options, entropy, choice, ignore_index)
    logprob, found_entropy, lse = found
    return TokenLogprobs(
        layout.rows(logprob), None if found_entropy is None else layout.rows(found_entropy), layout.rows(lse)
    )


def check_targets(x: Any, target: Any, weight: Any, fields: tuple[Any, ...]) -> None:
    """Check the arguments, and the range of every target on every process, so that all raise the same error."""
    loss = loss_arguments.checked_loss(x, target, weight, Loss(*fields))
    # Only the shape of x is used, so its partial sums are not added here.
    layout = layout_of("cross_entropy", x, (1 if x.dim() > 1 else 0,))
    loss_arguments.check_targets(x, layout.whole("target", target), None, loss)


def check_tokens(x: Any, index: Any, dim: Any, ignore_index: Any = None) -> None:
    """Check the arguments, and the range of every index on every process, so that all raise the same error."""
    loss_arguments.check_token_arguments(x, index, dim)
    layout = layout_of("token_logprobs", x, (checked_dim("token_logprobs", dim, x.dim()),))
    loss_arguments.check_tokens(x, layout.whole("index", index), dim, ignore_index)
