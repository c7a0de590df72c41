"""Checks and choices of the operations with a target on torch tensors: our kernels, or PyTorch's operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..core.arguments import check_range, checked_index_dim
from ..core.call import Call, LossStatistics, Settings, TokenLogprobs
from ..core.options import ScoreOptions
from ..core.task import Choice
from ..ops import CROSS_ENTROPY, TOKEN_LOGPROBS
from ..ops.cross_entropy.arguments import class_dim
from ..ops.support import check_values, checked_support, excluding, truncated
from ..planner.plan import PlanError
from ..planner.strategies import TABLE
from . import cached_rows, loss_eager, loss_kernels, several_tokens
from .arguments import TORCH, autocasts, check_options, check_scale_is_constant, checked_ignore_index, checked_loss
from .autograd import prepared_results, results_of
from .fast_path import PREPARED_CALLS, are_constant, is_transformed, keep, look_up
from .loss_arguments import MOST_EXACT_INDEX, UNSIGNED, Loss, counted, equals, is_class, signed, with_constants
from .reasons import DTYPES, why_pytorch

Tensor = torch.Tensor

check_token_arguments = partial(checked_index_dim, TORCH, TOKEN_LOGPROBS.name)

_NUMBERS = frozenset((int, float))

EAGER_STRATEGIES = tuple(strategy for backend, strategy, _ in TABLE if backend == "eager")


def run_loss(x: Any, target: Any, weight: Any, fields: tuple[Any, ...], return_stats: bool) -> Any:
    """The loss, or (loss, LossStatistics): the implementation of `onlinesoftmax.cross_entropy` on torch tensors.

    Args:
        x, target, weight: The tensors.
        fields: The fields of `Loss`.
        return_stats: Return the statistics too.
    """
    # An equal number of a wrong type, as 1.0 for 1, must not find the call of the right one.
    exact = type(fields[1]) is int and type(fields[3]) in _NUMBERS and type(fields[4]) in _NUMBERS
    tensors = (x, target) if weight is None else (x, target, weight)
    key, prepared_call = look_up((CROSS_ENTROPY, fields), *tensors) if exact and not return_stats else ((), None)
    if prepared_call is not None:
        return prepared_call(*tensors)
    loss = Loss(*fields)
    numbers = checked_loss(x, target, weight, loss)
    if numbers is not loss or target.dtype in UNSIGNED:
        # A tensor among the numbers may change its value, so a kept launch has only Python's numbers in its key.
        return run_loss(x, signed(target), weight, numbers, return_stats)
    if torch.compiler.is_dynamo_compiling():
        loss = with_constants(loss)
    loss = loss.with_settings(dim=class_dim(x), dtype=loss.settings.dtype or result_dtype(x, target))
    choice = loss.settings.choice
    reason = why_not_kernels(x, target, weight, choice.backend, loss.ignore_index)
    if loss.smoothing and loss.mask() is not None:
        reason = reason or "label_smoothing with a mask has no kernel"
    way = loss_kernels if _runs_kernels(CROSS_ENTROPY.name, x, choice, reason) else loss_eager
    if loss.inplace and x.requires_grad and torch.is_grad_enabled():
        _check_inplace(x)
    if key and are_constant(loss.options) and (run := way.prepared_loss(x, target, weight, loss)) is not None:
        return keep(PREPARED_CALLS, key, run)(*tensors)
    y, *stats = way.losses(x, target, weight, loss, return_stats)
    y = y.to(loss.settings.dtype)
    return (y, statistics_of(target, loss, *stats)) if return_stats else y


def statistics_of(target: Tensor, loss: Loss, lse: Tensor, entropy: Tensor, largest: Tensor) -> LossStatistics:
    """The statistics of each row that the caller of a loss gets."""
    with torch.no_grad():
        counts = torch.ones_like(lse, dtype=torch.bool)
        classes = target
        if target.is_floating_point():
            classes = target.argmax(loss.settings.dim) if target.shape[loss.settings.dim] else largest
        else:
            counts = counted(target, loss)
        # Without z_loss, the product 0 * inf of a row with an infinite lse would be NaN.
        penalty = (loss.z_loss * lse * lse).where(counts, 0.0) if loss.z_loss else torch.zeros_like(lse)
        return LossStatistics(lse, penalty, entropy, largest, (largest == classes) & counts)


def run_tokens(
    x: Any, index: Any, dim: Any, options: ScoreOptions | None, entropy: bool, choice: Any, ignore_index: Any = None,
    support: Any = None,
) -> TokenLogprobs:  # fmt: skip
    """The log-probabilities of one token or several of each row."""
    if support is not None:
        found = _truncated(x, index, dim, options, entropy, choice, support)
        return found if ignore_index is None else without_ignored(found, index, ignore_index)
    arguments = TOKEN_LOGPROBS, dim, options, entropy, choice
    key, prepared_call = look_up(arguments, x, index) if type(dim) is int else ((), None)
    results = (prepared_call or _log_probabilities(key, x, index, dim, options, entropy, choice))(x, index)
    found = TokenLogprobs(results[0], results[2] if len(results) > 2 else None, results[1])
    return found if ignore_index is None else without_ignored(found, index, ignore_index)


def _log_probabilities(
    key: tuple[Any, ...], x: Any, index: Any, dim: Any, options: ScoreOptions | None, entropy: bool, choice: Choice
) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    """The function (x, index) of the calls like this one, after the checks; kept under the key where there is one."""
    settings = Settings(check_token_arguments(x, index, dim), None, False, choice)
    call = Call(TOKEN_LOGPROBS, x, settings, options, None, {"target": signed(index)})
    check_options(call)
    check_scale_is_constant(f"{TOKEN_LOGPROBS}()", options)
    results: tuple[str, ...] = ("y", "lse", "entropy") if entropy else ("y", "lse")
    is_constant = bool(key) and are_constant(options)
    if not _runs_kernels(TOKEN_LOGPROBS.name, x, choice, why_not_kernels(x, index, None, choice.backend)):
        run: Callable[..., Any] = (cached_rows if cached_rows.takes(call) else loss_eager).log_probabilities
    elif index.dim() == x.dim():
        run, is_constant = several_tokens.log_probabilities, False
    elif is_constant and not choice.batch_invariant and index.is_contiguous() and index.dtype not in UNSIGNED:
        how = {"by_pytorch": loss_eager.log_probabilities_of}
        return keep(PREPARED_CALLS, key, prepared_results(call, results, **how))
    else:
        run, is_constant = partial(results_of, by_pytorch=loss_eager.log_probabilities_of), False

    def log_probabilities(x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        call = Call(TOKEN_LOGPROBS, x, settings, options, None, {"target": signed(index)})
        found: tuple[Tensor, ...] = run(call, results)
        return found

    return keep(PREPARED_CALLS, key, log_probabilities) if is_constant else log_probabilities


def _gather(t: Any, places: Any, axis: int) -> Any:
    return t.gather(axis, places)


def _truncated(
    x: Any, index: Any, dim: Any, options: ScoreOptions | None, entropy: bool, choice: Any, support: Any
) -> TokenLogprobs:
    """`run_tokens` of the distribution of the tokens in `support`."""
    axis = check_token_arguments(x, index, dim)
    check_options(Call(TOKEN_LOGPROBS, x, Settings(axis), options))
    kept = _int64_support(x, axis, support)
    # torch.take_along_dim needs sizes that are known.
    call = truncated(torch, _gather, x, signed(index).long(), axis, options, *kept)
    found = run_tokens(call.x, call.index, axis, call.options, entropy, choice)
    logprob = excluding(torch, found.logprob, found.lse, call.outside, axis)
    return TokenLogprobs(logprob, found.entropy, found.lse)


def _int64_support(x: Tensor, axis: int, support: Any) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Token ids and offsets in int64, after the checks, and the places of a row."""
    token_ids, offsets, n = checked_support(TORCH, f"{TOKEN_LOGPROBS}()", x, axis, support)
    return (token_ids.long(), offsets.long()), torch.arange(n, device=x.device)


def without_ignored(found: TokenLogprobs, index: Tensor, ignore_index: Any) -> TokenLogprobs:
    """The results with a logprob of 0, which has no gradient, where the index is to be ignored."""
    number = checked_ignore_index(TOKEN_LOGPROBS.name, ignore_index)
    # torch.compile of torch 2.11 cannot return the result of `_replace`.
    logprob = found.logprob.masked_fill(equals(signed(index), number), 0.0)
    return TokenLogprobs(logprob, found.entropy, found.lse)


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
    if is_transformed():
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


def check_targets(x: Any, target: Any, weight: Any, fields: tuple[Any, ...]) -> None:
    """Check the arguments, and the range of every target that counts, which waits for the GPU.

    Raises:
        IndexError: a target is out of range; the message has its position and its value.
    """
    loss = checked_loss(x, target, weight, Loss(*fields))
    if not target.is_floating_point():
        target, classes = signed(target), x.shape[class_dim(x)]
        wrong = ~is_class(target, classes) & counted(target, loss)
        check_range(f"{CROSS_ENTROPY}(): target", target, classes, wrong)


def check_tokens(x: Any, index: Any, dim: Any, ignore_index: Any = None, support: Any = None) -> None:
    """Check the arguments, and the range of every index and of the support, which waits for the GPU.

    Raises:
        IndexError: an index is out of range; the message has its position and its value.
    """
    axis = check_token_arguments(x, index, dim)
    tokens = x.shape[axis]
    if support is not None:
        check_values(f"{TOKEN_LOGPROBS}(): support", torch, *_int64_support(x, axis, support), tokens)
    index = signed(index)
    wrong = ~is_class(index, tokens)
    if ignore_index is not None:
        wrong &= ~equals(index, checked_ignore_index(TOKEN_LOGPROBS.name, ignore_index))
    check_range(f"{TOKEN_LOGPROBS}(): index", index, tokens, wrong)
