"""Sampling from flat rows as custom operators of PyTorch: opaque to torch.compile and torch.export.

They have no gradient.  For one, `topk_logprobs` takes only tokens and ranks from its operator, and computes the rest
by operations that have gradients.
"""

from __future__ import annotations

from typing import Any

import torch

from ..core.options import PLAIN
from ..torch.arguments import TORCH
from ..torch.formulas import accumulator_of
from ..torch.namespace import NAMESPACE
from .arguments import Logits
from .rules import Parameters
from .run import sample_flat, verify_flat
from .topk import found_of

Tensor = torch.Tensor

_FIELDS = len(Parameters._fields)

_PARAMETERS = "Tensor temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p, bool first, SymInt? kept"
"""The fields of `Parameters` in a schema, in their order."""


def _sample(z: Tensor, *rest: Any) -> list[Tensor]:
    """Run `sample_flat`; the rest are the fields of `Parameters`, then its other arguments.

    Results that are None are left out.
    """
    *fields, support = sample_flat(z, Parameters(*rest[:_FIELDS]), *rest[_FIELDS:])
    return [t.contiguous() for t in (*fields, *(support or ())) if t is not None]


# A fake has the shapes and dtypes of an operator's results.
def _fake_sample(z: Tensor, *rest: Any) -> list[Tensor]:
    rows, (top, supported) = z.shape[0], rest[-2:]
    whole, real = (z.new_empty(rows, dtype=dtype) for dtype in (torch.int64, accumulator_of(z.dtype, z.dtype)))
    found = [whole, real, torch.empty_like(real), torch.empty_like(whole), z.new_empty(rows, dtype=torch.bool)]
    if top:
        found += [whole.new_empty(rows, top), real.new_empty(rows, top)]
    return found + ([whole.new_empty(rows * supported), whole.new_empty(rows + 1)] if supported else [])


def _verify(z: Tensor, drafts: Tensor, draft: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """Run `verify_flat`; the rest are the fields of `Parameters`, then its other arguments."""
    left = verify_flat(z, drafts, draft, Parameters(*rest[:_FIELDS]), *rest[_FIELDS:])
    return tuple([t.contiguous() for t in left])


def _fake_verify(z: Tensor, drafts: Tensor, *_: Any) -> tuple[Tensor, ...]:
    rows, n = drafts.shape
    tokens, logprobs = drafts.new_empty(rows, n + 1), z.new_empty(rows, n + 1, dtype=accumulator_of(z.dtype, z.dtype))
    return drafts.new_empty(rows), tokens, logprobs, z.new_empty(rows, dtype=torch.bool)


def _listed(z: Tensor, target: Tensor | None, k: int) -> list[Tensor]:
    """Values, indices, log-probabilities and lse of scores (rows, tokens), and log-probability and rank of a target."""
    rows, tokens = z.shape
    found = found_of(Logits(TORCH, "topk_logprobs", z, 1, PLAIN, (rows,), tokens), k, target)
    return [t.contiguous() for t in (*found[:3], found.lse, *found[3:5]) if t is not None]


def _fake_listed(z: Tensor, target: Tensor | None, k: int) -> list[Tensor]:
    wide, rows = accumulator_of(z.dtype, z.dtype), z.shape[0]
    dtypes = [wide, torch.int64] if target is not None else []
    values, lse = z.new_empty(rows, k, dtype=wide), z.new_empty(rows, dtype=wide)
    indices, of_target = z.new_empty(rows, k, dtype=torch.int64), [z.new_empty(rows, dtype=each) for each in dtypes]
    return [values, indices, torch.empty_like(values), lse, *of_target]


for _name, _run, _fake, _schema in (
    ("topk_logprobs", _listed, _fake_listed, "(Tensor z, Tensor? target, int k) -> Tensor[]"),
    (
        "sample", _sample, _fake_sample,
        f"(Tensor z, {_PARAMETERS}, Tensor seed, Tensor offset, bool raw, SymInt top, SymInt support) -> Tensor[]",
    ),
    (
        "verify", _verify, _fake_verify,
        f"(Tensor z, Tensor drafts, Tensor? draft, {_PARAMETERS}, Tensor seed, Tensor offset) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
    ),
):  # fmt: skip
    torch.library.custom_op(f"{NAMESPACE}::{_name}", _run, mutates_args=(), schema=_schema).register_fake(_fake)
