"""Checks and choices of cross_entropy and token_logprobs on torch tensors: our kernels, or PyTorch's operations."""

from __future__ import annotations

from typing import Any

import torch

from ..core.call import Call, LossStatistics, Settings, TokenLogprobs
from ..core.options import ScoreOptions
from ..core.task import Choice
from ..ops import OPERATIONS
from ..ops.cross_entropy.arguments import class_dim
from ..planner.plan import PlanError
from ..planner.strategies import TABLE
from . import targets, targets_eager, tokens, transformed
from .check import autocasts, check_options
from .fast_path import PREPARED_CALLS, keep, look_up
from .gradients import accumulator_of
from .loss import (
    MOST_EXACT_INDEX,
    UNSIGNED,
    Loss,
    counted,
    equals,
    scaled_weight,
    scales_weight,
    signed,
    with_constants,
)  # fmt: skip
from .loss_arguments import (
    check_scale_is_constant,
    check_targets,
    check_token_arguments,
    check_tokens,
    checked_loss,
    checked_number,
)
from .run import DTYPES, why_pytorch

__all__ = ["Loss", "check_targets", "check_tokens", "cross_entropy", "token_logprobs"]

Tensor = torch.Tensor

_LOSS, _LOGPROBS = OPERATIONS["cross_entropy"], OPERATIONS["token_logprobs"]

EAGER_STRATEGIES = tuple(strategy for backend, strategy, _ in TABLE if backend == "eager")


def cross_entropy(x: Any, target: Any, weight: Any, fields: tuple[Any, ...], return_stats: bool) -> Any:
    """The loss, or (loss, LossStatistics): the implementation of `onlinesoftmax.cross_entropy` on torch tensors.

    Args:
        x, target, weight: The tensors.
        fields: The fields of `Loss`.
        return_stats: Return the statistics too.
    """
    key, prepared_call = ((), None) if return_stats else look_up((_LOSS, fields), x, target, weight)
    if prepared_call is not None:
        return prepared_call(x, target, weight)
    loss = Loss(*fields)
    numbers = checked_loss(x, target, weight, loss)
    if numbers is not loss or target.dtype in UNSIGNED:
        # A tensor among the numbers may change its value, so a kept launch has only Python's numbers in its key.
        return cross_entropy(x, signed(target), weight, numbers, return_stats)
    if torch.compiler.is_dynamo_compiling():
        loss = with_constants(loss)
    settings = loss.settings._replace(dim=class_dim(x), dtype=loss.settings.dtype or result_dtype(x, target))
    loss = loss._replace(settings=settings)
    reason = why_not_kernels(x, target, weight, settings.choice.backend, loss.ignore_index)
    if loss.smoothing and loss.mask is not None:
        reason = reason or "label_smoothing with a mask has no kernel"
    if _runs_kernels("cross_entropy", x, settings.choice, reason):
        if loss.inplace and x.requires_grad and torch.is_grad_enabled():
            _check_inplace(x)
        if key and (run := targets.prepared_loss(x, target, weight, loss)) is not None:
            return keep(PREPARED_CALLS, key, run)(x, target, weight)
        weight = _weight_of_mean(x, target, weight, loss)
        y, *stats = targets.losses(x, target, weight, loss, return_stats)
    elif not return_stats and targets_eager.is_right(x, loss):
        run = targets_eager.prepared_loss(x, target, weight, loss)
        return (keep(PREPARED_CALLS, key, run) if key else run)(x, target, weight)
    else:
        weight = _weight_of_mean(x, target, weight, loss)
        y = targets_eager.reduced(targets_eager.losses(x, target, weight, loss), target, weight, loss)
        stats = [*targets_eager.statistics(x, loss), _largest(x, loss)] if return_stats else []
    y = y.to(settings.dtype)
    return (y, _statistics(target, loss, *stats)) if return_stats else y


def _weight_of_mean(x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss) -> Tensor | None:
    if weight is None or not scales_weight(target, weight, loss):
        return weight
    return scaled_weight(target, weight, loss, accumulator_of(loss.wide(x), weight.dtype))


def _largest(x: Tensor, loss: Loss) -> Tensor:
    """The class of each row with the largest score, by PyTorch's operations; -1 in rows without classes."""
    if not x.shape[loss.dim]:
        return x.new_full((*x.shape[: loss.dim], *x.shape[loss.dim + 1 :]), -1, dtype=torch.int64)
    # The softcap keeps the order of the scores; a negative scale reverses it.
    scale: Any = 1.0 if loss.options is None else loss.options.scale
    if isinstance(scale, Tensor):
        x, negative = x.detach() * torch.where(scale < 0, -1.0, 1.0).to(x.dtype), False
    else:
        negative = scale < 0
    if loss.mask is not None:
        x = x.detach().masked_fill(~loss.mask, torch.inf if negative else -torch.inf)
    return x.argmin(loss.dim) if negative else x.argmax(loss.dim)


def _statistics(target: Tensor, loss: Loss, lse: Any, entropy: Any, largest: Any) -> LossStatistics:
    with torch.no_grad():
        counts = torch.ones_like(lse, dtype=torch.bool)
        classes = target
        if target.is_floating_point():
            classes = target.argmax(loss.dim) if target.shape[loss.dim] else largest
        else:
            counts = counted(target, loss)
        # Without z_loss, the product 0 * inf of a row with an infinite lse would be NaN.
        penalty = (loss.z_loss * lse * lse).where(counts, 0.0) if loss.z_loss else torch.zeros_like(lse)
        return LossStatistics(lse, penalty, entropy, largest, (largest == classes) & counts)


def token_logprobs(
    x: Any, index: Any, dim: Any, options: ScoreOptions | None, entropy: bool, choice: Any, ignore_index: Any = None
) -> TokenLogprobs:
    """The implementation of `onlinesoftmax.token_logprobs` on torch tensors."""
    found = _token_logprobs(x, index, dim, options, entropy, choice)
    return found if ignore_index is None else without_ignored(found, index, ignore_index)


def without_ignored(found: TokenLogprobs, index: Tensor, ignore_index: Any) -> TokenLogprobs:
    """The results with a logprob of 0, which has no gradient, where the index is to be ignored."""
    number = checked_number("token_logprobs", "ignore_index", ignore_index, int)
    return found._replace(logprob=found.logprob.masked_fill(equals(signed(index), number), 0.0))


def _token_logprobs(
    x: Any, index: Any, dim: Any, options: ScoreOptions | None, entropy: bool, choice: Any
) -> TokenLogprobs:
    key, prepared_call = look_up((_LOGPROBS, dim, options, entropy, choice), x, index)
    if prepared_call is not None:
        return _named(*prepared_call(x, index))
    axis = check_token_arguments(x, index, dim)
    if index.dtype in UNSIGNED:
        return _token_logprobs(x, signed(index), dim, options, entropy, choice)
    call = Call(_LOGPROBS, x, Settings(axis, None, False, choice), options, None, {"target": index})
    check_options(call)
    check_scale_is_constant("token_logprobs()", options)
    if not _runs_kernels("token_logprobs", x, choice, why_not_kernels(x, index, None, choice.backend)):
        bare = call._replace(x=None, beside={})

        def by_pytorch(x: Tensor, target: Tensor) -> tuple[Any, ...]:
            y, entropies, lse = targets_eager.log_probabilities(bare._replace(x=x, beside={"target": target}), entropy)
            return y, lse, entropies

        cacheable = key and not targets.has_tensors(options)
        return _named(*(keep(PREPARED_CALLS, key, by_pytorch) if cacheable else by_pytorch)(x, index))
    if index.dim() == x.dim():
        return _named(*tokens.log_probabilities(call, entropy).values())
    if key and (run := targets.prepared_log_probabilities(call, entropy)) is not None:
        return _named(*keep(PREPARED_CALLS, key, run)(x, index))
    return _named(*targets.log_probabilities(call, entropy).values())


def _named(logprob: Tensor, lse: Tensor, entropy: Tensor | None = None) -> TokenLogprobs:
    return TokenLogprobs(logprob, entropy, lse)


def why_not_kernels(
    x: Tensor, target: Tensor, weight: Tensor | None, backend: str | None, ignore_index: int = -100
) -> str | None:
    """Why PyTorch's operations compute this call; None if a kernel may run it, or the forced backend."""
    if target.is_floating_point():
        return "the targets are class probabilities, for which there is no kernel"
    if not -MOST_EXACT_INDEX <= ignore_index <= MOST_EXACT_INDEX:
        taken = f"integers from -{MOST_EXACT_INDEX} to {MOST_EXACT_INDEX}"
        return f"ignore_index is {ignore_index}, and kernels take {taken}"
    if weight is not None and weight.dtype not in DTYPES:
        return f"weight has the dtype {weight.dtype}"
    if weight is not None and not torch.compiler.is_compiling() and weight.is_neg():
        return "weight is a lazily negated view; call resolve_neg() first"
    if transformed.is_active():
        return "torch.func and forward mode need operations with derivatives of their own"
    return why_pytorch(x, None, backend)


def _runs_kernels(name: str, x: Tensor, choice: Choice, reason: str | None) -> bool:
    """True where our kernels run a call, False where PyTorch's operations do.

    Args:
        name: Name of the public function, for errors.
        x: The logits.
        choice: What the caller forces of the plan.
        reason: Result of `why_not_kernels`.

    Raises:
        PlanError: what the caller forces cannot run.
    """
    backend, strategy = choice.backend, choice.strategy
    by_pytorch = backend in (None, "eager") and strategy in (None, *EAGER_STRATEGIES)
    if backend == "eager":
        reason = f"eager has no strategy {strategy!r}; its strategies: {', '.join(EAGER_STRATEGIES)}"
    if reason is not None and not by_pytorch:
        raise PlanError(f"{name}() with backend={backend!r}, strategy={strategy!r}: {reason}")
    # PyTorch's operations compute an input without elements, whichever backend is forced.
    return reason is None and bool(x.numel())


def result_dtype(x: Tensor, target: Tensor | None = None) -> torch.dtype:
    """The dtype of the loss, as in PyTorch: that of the logits or a wider one of the target; float32 under autocast."""
    if x.dtype in (torch.float16, torch.bfloat16) and autocasts(x):
        return torch.float32
    floating = target is not None and target.is_floating_point()
    return torch.promote_types(x.dtype, target.dtype) if target is not None and floating else x.dtype


def _check_inplace(x: Tensor) -> None:
    if x.is_leaf:
        raise RuntimeError("cross_entropy(): inplace_backward=True would overwrite input, a leaf that requires grad")
    if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
        raise RuntimeError("cross_entropy(): inplace_backward=True, and input has several elements at one location")
