"""Prepared calls of `sample` without filters, and of `topk_logprobs`: a repeated call on a GPU checks only its key.

The numbers of a call are no part of the key: a text has another offset at each of its tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..core.options import LARGEST_FLOAT32
from ..kernels import registry
from ..torch.fast_path import PREPARED_CALLS, keep, look_up
from .arguments import LARGEST_INT64, Logits, in_rows
from .results import TopLogprobs
from .topk import How, Listed

__all__ = ["look_up", "look_up_call", "prepare", "prepare_topk"]

Tensor = torch.Tensor


def look_up_call(
    x: Any, temperature: Any, seed: Any, offset: Any, arguments: tuple[Any, ...]
) -> tuple[tuple[Any, ...], Any]:
    """(key, prepared call), as `look_up`: the key is () if the call is not to be prepared.

    Args:
        x, temperature, seed, offset: Arguments of `sample`.
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
        elif not (kind is int and 0 <= value <= LARGEST_INT64):
            return (), None
    return look_up(("sample", arguments), x, *tensors)


def prepare(x: Any, operands: tuple[Any, ...], arguments: tuple[Any, ...], raw: bool) -> bool:
    """Prepare the calls that are like one that has passed all checks; returns False if that is not possible.

    Args:
        x: The logits of that call.
        operands: Its temperature, seed and offset.
        arguments: Its other arguments, of which the last is the dimension of the tokens.
        raw: As for `sample` in run.py.
    """
    temperature, seed, offset = operands
    key, _ = look_up_call(x, temperature, seed, offset, arguments)
    if not key or not x.is_cuda or registry.unavailable("cuda") is not None:
        return False
    dim = arguments[-1]
    rows = in_rows(x, dim)
    shape = tuple(n for i, n in enumerate(x.shape) if i != dim % x.dim())
    for operand, dtype in zip(operands, (torch.float32, torch.int64, torch.int64), strict=True):
        if isinstance(operand, Tensor) and not (
            operand.dtype == dtype and operand.shape == shape and operand.device == x.device and operand.is_contiguous()
        ):
            return False
    if rows.data_ptr() != x.data_ptr():
        return False
    from .kernels import unfiltered_launch

    run = unfiltered_launch.bind(rows, shape, raw)
    if run is not None:
        keep(PREPARED_CALLS, key, run)
    return run is not None


def prepare_topk(logits: Logits, k: int, target: Tensor | None, dim: int) -> bool:
    """Prepare the calls of `topk_logprobs` that are like one that has passed all checks; False if that is not possible.

    Args:
        logits, k, target: As for `topk_logprobs` in topk.py; there is no score option.
        dim: The dimension of the tokens as the caller has it.
    """
    x = logits.x
    key, _ = look_up(("topk_logprobs", (k, dim)), x, target)
    if not key or not x.is_cuda or registry.unavailable("cuda") is not None:
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
