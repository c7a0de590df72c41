"""Our own functions on `Logits`: the losses run the linear functions, the others compute the logits."""

from __future__ import annotations

import sys
from typing import Any

import torch

from .. import api
from ..core.call import Call, TokenLogprobs
from ..core.declaration import Operation
from ..core.options import ScoreOptions
from ..core.task import ANY, Choice
from ..torch import run as torch_run
from ..torch.loss_arguments import Loss
from ..torch.loss_run import without_ignored
from .consumers import is_classes, losses, statistics
from .heads import Logits, linked, plain
from .logits import UncomputedLogits, deferred

__all__ = ["deferred"]


def _scores(x: Logits, options: ScoreOptions | None, choice: Choice) -> tuple[float, float | None] | None:
    """Scale and softcap of a call of our function; None where the linear functions do not have its options."""
    if x.numbers.log or choice != ANY:
        return None
    if options is None:
        return x.numbers.scores
    if not set(options.given) <= {"scale", "softcap"} or type(options.scale) is not float or options.scale <= 0:
        return None
    if options.softcap is None:
        return x.numbers.with_factor(options.scale)
    return None if x.numbers.softcap else (x.numbers.scale * options.scale, options.softcap)


def run_plain(operation: Operation, x: Any, *arguments: Any) -> Any:
    """As onlinesoftmax.torch.run.run_plain."""
    return torch_run.run_plain(operation, plain(x, operation.name), *arguments)


def run(call: Call) -> Any:
    """As onlinesoftmax.torch.run.run."""
    return torch_run.run(call._replace(x=plain(call.x, call.operation.name)))


def run_loss(x: Any, target: Any, weight: Any, fields: tuple[Any, ...], return_stats: bool) -> Any:
    """As onlinesoftmax.torch.loss_run.run_loss."""
    loss, y = Loss(*fields), None
    numbers = loss.reduction, loss.ignore_index, loss.smoothing, loss.z_loss
    with torch._C.DisableTorchFunction():
        scores = _scores(x, loss.options, loss.settings.choice)
        if scores is not None:
            y = losses(x, target, weight, numbers, scores, return_stats, loss.settings.dtype)

    def repeat(z: torch.Tensor) -> Any:
        return torch_run.run_loss(z, target, weight, fields, return_stats)

    return repeat(plain(x, "cross_entropy")) if y is None else linked(y, x, "cross_entropy", repeat)


def run_tokens(
    x: Any, index: Any, dim: Any, options: ScoreOptions | None, entropy: bool, choice: Any, ignore_index: Any = None,
    support: Any = None,
) -> TokenLogprobs:  # fmt: skip
    """As onlinesoftmax.torch.loss_run.run_tokens."""
    found = None
    with torch._C.DisableTorchFunction():
        scores = _scores(x, options, Choice(*choice)) if support is None else None
        if scores is not None and is_classes(x, dim):
            found = statistics(x, index, scores)

    def repeat(z: torch.Tensor) -> TokenLogprobs:
        return torch_run.run_tokens(z, index, dim, options, entropy, choice, ignore_index, support)

    if found is None:
        return repeat(plain(x, "token_logprobs"))
    found = found if entropy else found._replace(entropy=None)
    found = found if ignore_index is None else without_ignored(found, index, ignore_index)
    joined: TokenLogprobs = linked(found, x, "token_logprobs", repeat)
    return joined


check_targets, check_tokens = torch_run.check_targets, torch_run.check_tokens

api._RUNNERS[UncomputedLogits] = sys.modules[__name__]
