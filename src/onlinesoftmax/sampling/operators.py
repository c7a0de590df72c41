"""`topk_logprobs` of rows as a custom operator of PyTorch: opaque to torch.compile and torch.export.

The operator has no gradient.  Where one is wanted, its tokens are passed to log-probabilities that have one.
"""

from __future__ import annotations

import torch

from ..core.options import PLAIN
from ..torch.arguments import TORCH
from ..torch.formulas import accumulator_of
from ..torch.namespace import NAMESPACE
from .arguments import Logits
from .topk import found_of

Tensor = torch.Tensor


def _listed(z: Tensor, target: Tensor | None, k: int) -> list[Tensor]:
    """Values, indices, log-probabilities, lse, and log-probability and rank of a target, of rows (rows, tokens)."""
    rows, tokens = z.shape
    found = found_of(Logits(TORCH, "topk_logprobs", z, 1, PLAIN, (rows,), tokens), k, target)
    return [t.contiguous() for t in (*found[:3], found.lse, *found[3:5]) if t is not None]


def _fake(z: Tensor, target: Tensor | None, k: int) -> list[Tensor]:
    wide, rows = accumulator_of(z.dtype, z.dtype), z.shape[0]
    dtypes = [wide, torch.int64] if target is not None else []
    values, lse = z.new_empty(rows, k, dtype=wide), z.new_empty(rows, dtype=wide)
    indices, of_target = z.new_empty(rows, k, dtype=torch.int64), [z.new_empty(rows, dtype=each) for each in dtypes]
    return [values, indices, torch.empty_like(values), lse, *of_target]


_SCHEMA = "(Tensor z, Tensor? target, int k) -> Tensor[]"
torch.library.custom_op(f"{NAMESPACE}::topk_logprobs", _listed, mutates_args=(), schema=_SCHEMA).register_fake(_fake)
