"""Sampling from torch tensors, by a kernel or in PyTorch's operations."""

from __future__ import annotations

from typing import Any

import torch

from ..torch.fast_path import is_transformed
from ..torch.formulas import PLAIN_TYPES
from ..torch.gradients import adjacent, is_traced, reads_cuda
from .arguments import Logits
from .eager import sample_rows, support_of, verify_rows
from .order import largest
from .results import Sampled, Verified
from .rules import Parameters
from .topk import topk_logprobs

__all__ = ["sample", "topk_logprobs", "verify"]

Tensor = torch.Tensor


@torch.no_grad()
def sample(
    logits: Logits, parameters: Parameters, seed: Tensor, offset: Tensor, raw: bool, top: int, most: int
) -> Sampled:
    """A token of each row.

    Args:
        logits: The logits.
        parameters: Temperature and filters.
        seed, offset: What the noise of a row is made of, (rows,) int64.
        raw: True for log-probabilities of the scores as they are, without temperature and filters.
        top: Number of the largest log-probabilities to return.
        most: Most tokens of a row in the support; 0 for no support.
    """
    given, listed = (parameters, seed, offset, raw), max(top, most)
    found, tokens = _by_kernel(logits, *given, listed), None
    if found is None and listed > top:
        # A kernel may list fewer tokens than the support needs.
        found = _by_kernel(logits, *given, top)
        tokens = None if found is None else largest(logits.scores(), most)
    by_kernel = found is not None
    found = found or sample_rows(logits.scores(), *given, listed)
    tops: list[Any] = [found.top_tokens, found.top_logprobs]
    support = None
    if most and by_kernel:
        from .kernels import support_launch

        support = support_launch.support((tops[0] if tokens is None else tokens).contiguous(), found.kept, most)
    elif most:
        support = support_of(tops[0][:, :most], found.kept)
    tops = [t[:, :top] if top else None for t in tops]
    of_rows: list[Any] = [None if t is None else t.reshape(logits.rows + t.shape[1:]) for t in (*found[:5], *tops)]
    return Sampled(*[*of_rows, support])


def _by_kernel(
    logits: Logits, parameters: Parameters, seed: Tensor, offset: Tensor, raw: bool, top: int
) -> Sampled | None:
    """`sample` of flat rows by a kernel; None where none takes the call."""
    if not _kernels_take(logits):
        return None
    from .kernels import sample_launch

    x = adjacent(logits.as_rows())
    run = sample_launch.bind(x, (len(x),), parameters, raw, top)
    return None if run is None else run(x, parameters.temperature, seed, offset, parameters[1:4])


def _kernels_take(logits: Logits) -> bool:
    """True where our kernels may take a call."""
    x = logits.x
    plain = type(x) in PLAIN_TYPES and not is_traced(x) and not is_transformed()
    return plain and reads_cuda(x) and x.dtype != torch.float64


@torch.no_grad()
def verify(
    target: Logits, drafts: Tensor, draft: Logits | None, parameters: Parameters, seed: Tensor, offset: Tensor
) -> Verified:
    """What is left of drafted tokens.

    Args:
        target: Logits (..., n + 1, tokens) of the target model.
        drafts: Drafted tokens (..., n).
        draft: Logits (..., n, tokens) that they were sampled from, or None.
        parameters: Temperature and filters of each row of drafts.
        seed, offset: What the noise of the first position of each row is made of.
    """
    *rows, n = drafts.shape
    left = _verify_by_kernel(target, drafts, draft, parameters, seed, offset)
    if left is None:
        scores = target.scores(), None if draft is None else draft.scores()
        left = verify_rows(scores, drafts.reshape(seed.shape[0], n).long(), parameters, seed, offset)
    return Verified(*[t.reshape((*rows, *t.shape[1:])) for t in left])


def _verify_by_kernel(
    target: Logits, drafts: Tensor, draft: Logits | None, parameters: Parameters, seed: Tensor, offset: Tensor
) -> Verified | None:
    """`verify` of flat rows by kernels; None where none takes the call."""
    logits = [target] if draft is None else [target, draft]
    if not all(map(_kernels_take, logits)):
        return None
    from .kernels import verify_launch

    same = logits[0].x.dtype == logits[-1].x.dtype
    models = [adjacent(x.as_rows() if same else x.scores()) for x in logits]
    run = verify_launch.bind(models, tuple(seed.shape), drafts.shape[-1], parameters)
    if run is None:
        return None
    x, other = models[0], None if draft is None else models[1]
    return run(x, drafts.long().contiguous(), other, parameters.temperature, seed, offset, parameters[1:4])
