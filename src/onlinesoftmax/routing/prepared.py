"""Prepared calls of `route`: a repeated call checks only its key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..torch.fast_path import PREPARED_CALLS, keep, look_up
from .results import Routed
from .rules import Call
from .run import found_of, in_shape, recorded

__all__ = ["look_up", "prepare"]

Tensor = torch.Tensor

Prepared = Callable[[Tensor, Tensor | None, Tensor | None], Routed]
"""prepared(logits, bias, mask) returns the results of a call that is like one that has passed all checks."""


def prepare(logits: Tensor, bias: Any, mask: Any, arguments: tuple[Any, ...], call: Call, dense: bool) -> bool:
    """Prepare the calls that are like one that has passed all checks; returns False if that is not possible.

    Args:
        logits, bias, mask: Arguments of that call, which has no given experts.
        arguments: Its other arguments, as the caller looks them up.
        call: The call that was made of them.
        dense: As in `route`.
    """
    key, _ = look_up(arguments, logits, bias, mask)
    rows = tuple(logits.shape[:-1])
    # The general path converts other tensors.
    if bias is not None and (call.bias is None or bias.dtype != call.bias.dtype or not bias.is_contiguous()):
        return False
    if mask is not None and (tuple(mask.shape) != rows or not mask.is_contiguous()):
        return False
    if not key or not logits.numel():
        return False
    rule, count = call.rule, len(call.x)
    run = recorded if torch.is_grad_enabled() and logits.requires_grad else found_of
    numbers = (None, rule, call.sequences, call.tokens, call.counts, call.prob_sums)

    def prepared(x: Tensor, bias: Tensor | None, mask: Tensor | None) -> Routed:
        flat = x if len(rows) == 1 else x.reshape(count, rule.experts)
        mask = mask if mask is None or len(rows) == 1 else mask.reshape(count)
        return in_shape(run(Call(flat, bias, mask, *numbers)), rule, rows, dense)

    keep(PREPARED_CALLS, key, prepared)
    return True
