"""Prepared calls of `sample`, `verify` and `topk_logprobs`: a repeated call on a GPU looks up a key of its arguments.

Numbers for temperature, seed and offset are not in the key, as they change with each token; that there is no seed is.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..core.options import LARGEST_FLOAT32
from ..torch.fast_path import PREPARED_CALLS, keep, look_up
from ..torch.gradients import reads_cuda
from .arguments import LARGEST_INT64, Logits, drawn_seeds, in_rows
from .results import TopLogprobs
from .rules import Parameters
from .topk import How, Listed

__all__ = ["look_up", "look_up_call", "prepare", "prepare_topk", "prepare_verify"]

Tensor = torch.Tensor


def look_up_call(
    x: Any, temperature: Any, seed: Any, offset: Any, filters: tuple[Any, Any, Any], arguments: tuple[Any, ...],
    *others: Tensor,
) -> tuple[tuple[Any, ...], Any]:  # fmt: skip
    """(key, prepared call), as `look_up`.  Without a prepared call, a key of () says that none is to be prepared.

    Args:
        x, temperature, seed, offset: Arguments of `sample` or `verify`.
        filters: Its arguments top_k, top_p and min_p.  Their numbers are part of the key, so they have been checked.
        arguments: Name of the function, and its other arguments.
        others: Its other tensors.
    """
    tensors: list[Any] = [None, None, None]
    kind = type(temperature)
    if kind is Tensor:
        tensors[0] = temperature
    elif not ((kind is float or kind is int) and 0 <= temperature <= LARGEST_FLOAT32):
        return (), None
    for i, value in (1, seed), (2, offset):
        kind = type(value)
        if kind is Tensor:
            tensors[i] = value
        elif not (kind is int and 0 <= value <= LARGEST_INT64) and (value is not None or i == 2):
            return (), None
    top_k, top_p, min_p = filters
    if top_k is None and top_p is None and min_p is None:
        return look_up((arguments, seed is None), x, *others, *tensors)
    numbers: list[Any] = []
    for value in filters:
        kind = type(value)
        if kind is Tensor:
            tensors.append(value)
        elif value is None or kind is int or kind is float:
            # A top_k of 50.0 is an error, but equal to 50, so the key has the types.
            numbers.append((kind, value))
            tensors.append(None)
        else:
            return (), None
    return look_up((arguments, seed is None, *numbers), x, *others, *tensors)


def prepare(
    logits: Logits, operands: tuple[Any, ...], filters: tuple[Any, Any, Any], parameters: Parameters,
    arguments: tuple[Any, ...], raw: bool,
) -> bool:  # fmt: skip
    """Prepare the calls of `sample` that are like one that has passed all checks; False if that is not possible.

    Args:
        logits: The logits of that call.
        operands: Its temperature, seed and offset.
        filters: Its arguments top_k, top_p and min_p.
        parameters: Temperature and filters as tensors.
        arguments: "sample" and its other arguments: ties, logprobs, top_logprobs, return_support and dim.
        raw: As for `sample` in run.py.
    """
    (temperature, seed, offset), (_, _, _, top, support, _) = operands, arguments
    key, _ = look_up_call(logits.x, temperature, seed, offset, filters, arguments)
    rows = _rows_in_place(logits) if key else None
    if rows is None or not _are_of_rows(logits, operands, filters):
        return False
    from .kernels import sample_launch, support_launch

    run = sample_launch.bind(rows, logits.rows, parameters, raw, max(top, support or 0))
    if run is None:
        return False
    if support:
        run = support_launch.with_support(run, top, support)
    keep(PREPARED_CALLS, key, _made_ready(run, operands, filters, len(rows)))
    return True


def prepare_verify(
    target: Logits, drafts: Tensor, draft: Logits | None, operands: tuple[Any, ...], filters: tuple[Any, Any, Any],
    parameters: Parameters, arguments: tuple[Any, ...],
) -> bool:  # fmt: skip
    """Prepare the calls of `verify` that are like one that has passed all checks; False if that is not possible.

    Args:
        target: The logits of the target model in that call, with the rows of drafts.
        drafts: Its drafted tokens.
        draft: The logits of its draft model, or None.
        operands, filters, parameters: As for `prepare`.
        arguments: "verify" and its other arguments.
    """
    models, (temperature, seed, offset) = [target] if draft is None else [target, draft], operands
    others = [drafts, *(one.x for one in models[1:])]
    key, _ = look_up_call(target.x, temperature, seed, offset, filters, arguments, *others)
    rows = [t for t in map(_rows_in_place, models) if t is not None] if key else []
    if len(rows) < len(models) or not _are_of_rows(target, operands, filters):
        return False
    if drafts.dtype != torch.int64 or not drafts.is_contiguous() or rows[0].dtype != rows[-1].dtype:
        return False
    from .kernels import verify_launch

    run = verify_launch.bind(rows, target.rows, drafts.shape[-1], parameters)
    if run is None:
        return False
    keep(PREPARED_CALLS, key, _made_ready(run, operands, filters, drafts.shape[:-1].numel()))
    return True


def _rows_in_place(logits: Logits) -> Tensor | None:
    """The rows of logits on a GPU, (rows, tokens); None if they would be a copy."""
    x = logits.x
    rows = in_rows(x, logits.dim) if reads_cuda(x) else x
    return rows if reads_cuda(x) and rows.data_ptr() == x.data_ptr() else None


def _are_of_rows(logits: Logits, operands: tuple[Any, ...], filters: tuple[Any, Any, Any]) -> bool:
    """True where each operand that is a tensor is contiguous, with one number for each row."""
    tensors = [t for t in (*operands, *filters) if isinstance(t, Tensor)]
    return all(t.shape == logits.rows and t.device == logits.x.device and t.is_contiguous() for t in tensors)


def _made_ready(run: Any, operands: tuple[Any, ...], filters: tuple[Any, Any, Any], count: int) -> Any:
    """`run`, with dtypes converted and, where there is no seed, one drawn for each of `count` rows in each call."""
    tensors = [t for t in (*operands, *filters) if isinstance(t, Tensor)]
    converted = [t.dtype for t in _converted(*operands, *filters) if isinstance(t, Tensor)]
    run = run if converted == [t.dtype for t in tensors] else partial(_run_converted, run)
    return run if operands[1] is not None else partial(_run_with_drawn_seeds, run, count)


def _run_with_drawn_seeds(run: Any, count: int, *given: Any) -> Any:
    *models, temperature, _, offset, filters = given
    return run(*models, temperature, drawn_seeds(count, models[0].device, None), offset, filters)


def _run_converted(run: Any, *given: Any) -> Any:
    *models, temperature, seed, offset, filters = given
    made = _converted(temperature, seed, offset, *filters)
    return run(*models, *made[:3], tuple(made[3:]))


def _converted(*operands: Any) -> list[Any]:
    """Temperature, seed, offset, top_k, top_p and min_p, of which tensors get dtypes that the kernel reads."""
    return [
        t.to(dtypes[0]) if isinstance(t, Tensor) and t.dtype not in dtypes else t
        for t, dtypes in zip(operands, _DTYPES, strict=True)
    ]


# The first of each is that to convert to.
_DTYPES = [(torch.float32,), *[(torch.int64,)] * 2, (torch.int64, torch.int32), *[(torch.float64, torch.float32)] * 2]


def prepare_topk(logits: Logits, k: int, target: Tensor | None, dim: int) -> bool:
    """Prepare the calls of `topk_logprobs` that are like one that has passed all checks; False if that is not possible.

    Args:
        logits, k, target: As for `topk_logprobs` in topk.py; there is no score option.
        dim: The dimension of the tokens as the caller has it.
    """
    x = logits.x
    key, _ = look_up(("topk_logprobs", (k, dim)), x, target)
    if not key:
        return False
    if target is not None and not (target.dtype == torch.int64 and target.is_contiguous()):
        return False
    rows = _rows_in_place(logits)
    if rows is None:
        return False
    from .kernels import topk_launch

    run = topk_launch.bind(rows, logits.rows, k, logits.dim, target is not None)
    if run is None:
        return False
    how = How(logits._replace(x=None), k, run)
    recorded = torch.is_grad_enabled() and x.requires_grad
    keep(PREPARED_CALLS, key, partial(_recorded, how) if recorded else run)
    return True


def _recorded(how: How, x: Tensor, target: Tensor | None) -> TopLogprobs:
    return TopLogprobs(*Listed.apply(x, how, target))
