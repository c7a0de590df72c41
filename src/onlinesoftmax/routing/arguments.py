"""The call that the arguments of `route` make for torch tensors; the rules for all libraries stand in rules.py."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from ..torch.arguments import TORCH
from ..torch.formulas import accumulator_of
from . import rules
from .rules import Call, Rule, check_arrays, sizes_of

Tensor = torch.Tensor

check_logits = partial(rules.check_logits, TORCH)


def checked_call(
    logits: Any, bias: Any, mask: Any, indices: Any, rule: Rule, counts: bool, prob_sums: bool
) -> Call:  # fmt: skip
    """The call on flat rows.

    Raises:
        TypeError, RuntimeError, ValueError: an argument has the wrong type, dtype, device or shape.
    """
    check_arrays(TORCH, logits, bias, mask, indices, rule.k)
    rows, wide = logits.shape[:-1], accumulator_of(logits.dtype, logits.dtype)
    count = math.prod(rows)
    x = logits.reshape(count, rule.experts)
    bias = None if bias is None else bias.detach().to(wide).contiguous()
    mask = None if mask is None else mask.expand(rows).reshape(count).contiguous()
    if indices is not None:
        # An index beyond int32 must not become an expert.
        indices = indices.clamp(-1, rule.experts).int().reshape(count, rule.k).contiguous()
    return Call(x, bias, mask, indices, rule, *sizes_of(tuple(logits.shape)), counts, prob_sums)
