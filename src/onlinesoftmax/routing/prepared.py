"""Prepared calls of `route`: a repeated call checks only its key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..torch.fast_path import PREPARED_CALLS, keep, look_up
from .results import Routed
from .rules import Call
from .run import bound, found_of, in_shape, recorded, training

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
    rule, count, flat = call.rule, len(call.x), len(rows) == 1
    records = torch.is_grad_enabled() and logits.requires_grad
    call = training(call) if records else call
    numbers = (None, rule, call.sequences, call.tokens, call.counts, call.prob_sums, call.losses)
    # Logits that are copied to be flat lie elsewhere.
    run = bound(call) if call.x.data_ptr() == logits.data_ptr() else None

    def prepared(x: Tensor, bias: Tensor | None, mask: Tensor | None) -> Routed:
        if not flat:
            x, mask = x.reshape(count, rule.experts), mask if mask is None else mask.reshape(count)
        if records:
            found = recorded(Call(x, bias, mask, *numbers), run)
        elif run is not None:
            found = run(x, bias, mask, None)
        else:
            found = found_of(Call(x, bias, mask, *numbers))
        return in_shape(found, rule, rows, dense)

    keep(PREPARED_CALLS, key, prepared)
    return True
