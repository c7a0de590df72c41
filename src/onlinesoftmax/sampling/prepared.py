"""Prepared calls of `sample` and of `topk_logprobs`: a repeated call on a GPU checks only its key.

A temperature, a seed or an offset that is a number is no part of the key: each token of a text has another offset.
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

__all__ = ["look_up", "look_up_call", "prepare", "prepare_topk"]

Tensor = torch.Tensor


def look_up_call(
    x: Any, temperature: Any, seed: Any, offset: Any, filters: tuple[Any, Any, Any], arguments: tuple[Any, ...]
) -> tuple[tuple[Any, ...], Any]:
    """(key, prepared call), as `look_up`: without a prepared call, the key is () if the call is not to be prepared.

    Args:
        x, temperature, seed, offset: Arguments of `sample`.
        filters: Its arguments top_k, top_p and min_p.  Their numbers are part of the key, so they have been checked.
        arguments: Its other arguments.
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
        return look_up(("sample", arguments, seed is None), x, *tensors)
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
    return look_up(("sample", arguments, seed is None, *numbers), x, *tensors)


def prepare(
    logits: Logits, operands: tuple[Any, ...], filters: tuple[Any, Any, Any], parameters: Parameters,
    arguments: tuple[Any, ...], raw: bool,
) -> bool:  # fmt: skip
    """Prepare the calls that are like one that has passed all checks; returns False if that is not possible.

    Args:
        logits: The logits of that call.
        operands: Its temperature, seed and offset.
        filters: Its arguments top_k, top_p and min_p.
        parameters: Temperature and filters as tensors.
        arguments: Its other arguments: ties, logprobs, top_logprobs and dim.
        raw: As for `sample` in run.py.
    """
    x, (temperature, seed, offset) = logits.x, operands
    key, _ = look_up_call(x, temperature, seed, offset, filters, arguments)
    if not key or not reads_cuda(x):
        return False
    rows = in_rows(x, logits.dim)
    tensors = [t for t in (*operands, *filters) if isinstance(t, Tensor)]
    if not all(t.shape == logits.rows and t.device == x.device and t.is_contiguous() for t in tensors):
        return False
    if rows.data_ptr() != x.data_ptr():
        return False  # the rows are a copy
    from .kernels import sample_launch

    run = sample_launch.bind(rows, logits.rows, parameters, raw, arguments[2])
    if run is None:
        return False
    converted = [t.dtype for t in _converted(*operands, *filters) if isinstance(t, Tensor)]
    run = run if converted == [t.dtype for t in tensors] else partial(_run_converted, run)
    keep(PREPARED_CALLS, key, run if seed is not None else partial(_run_with_drawn_seeds, run, len(rows)))
    return True


def _run_with_drawn_seeds(run: Any, count: int, x: Tensor, temperature: Any, _: None, offset: Any, filters: Any) -> Any:
    return run(x, temperature, drawn_seeds(count, x.device, None), offset, filters)


def _run_converted(run: Any, x: Tensor, temperature: Any, seed: Any, offset: Any, filters: tuple[Any, Any, Any]) -> Any:
    made = _converted(temperature, seed, offset, *filters)
    return run(x, *made[:3], tuple(made[3:]))


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
    if not key or not reads_cuda(x):
        return False
    if target is not None and not (target.dtype == torch.int64 and target.is_contiguous()):
        return False
    rows = in_rows(x, logits.dim)
    if rows.data_ptr() != x.data_ptr():
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
