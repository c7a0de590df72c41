"""Sampling from torch tensors, by a kernel or in PyTorch's operations."""

from __future__ import annotations

import operator
from typing import Any

import torch

from ..torch.fast_path import is_transformed
from ..torch.formulas import PLAIN_TYPES
from ..torch.gradients import adjacent, is_traced, reads_cuda
from .arguments import LARGEST_INT64, Logits
from .distribution import (
    Distribution,
    distribution_of,
    log_of_kept,
    log_sum_of,
    masses_of,
    sampled_of,
    support_of,
)
from .noise import gumbel, uniform
from .order import largest
from .philox import ACCEPT, CORRECT
from .results import Sampled, Verified
from .rules import Parameters
from .topk import CHUNK, topk_logprobs
from .verification import keys_of_next, number_accepted, row_of

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
    found = found or _in_chunks(logits.scores(), *given, listed)
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


def _in_chunks(scores: Tensor, parameters: Parameters, seed: Tensor, offset: Tensor, raw: bool, top: int) -> Sampled:
    """`sample` of scores (rows, tokens) by PyTorch's operations, on a CPU a chunk of rows at a time."""
    # A trace would have one graph for each number of chunks.
    if not scores.is_cpu or is_traced(scores):
        return _sample(scores, parameters, seed, offset, raw, top)
    count, chunks = max(CHUNK // scores.shape[1], 1), []
    for first in range(0, max(len(scores), 1), count):
        part = slice(first, first + count)
        of_part = parameters.map(operator.itemgetter(part))
        chunks.append(_sample(scores[part], of_part, seed[part], offset[part], raw, top))
    joined: list[Any] = [None if parts[0] is None else torch.cat(parts) for parts in zip(*chunks, strict=True)]
    return Sampled(*joined)


def _sample(scores: Tensor, parameters: Parameters, seed: Tensor, offset: Tensor, raw: bool, top: int) -> Sampled:
    """`sample` of scores (rows, tokens)."""
    found = distribution_of(scores, parameters)
    noise = gumbel(seed, offset, scores.shape[1])
    if parameters.filters:
        noise = noise.gather(1, found.tokens)
    keys = (found.z + found.temperature * noise).masked_fill(~found.kept, -torch.inf)
    # Equal keys go to the lower token id, which need not come first in the order of scores.
    column = found.tokens.where(keys == keys.amax(1, keepdim=True), LARGEST_INT64).argmin(1, keepdim=True)
    kept = found.kept.sum(1, keepdim=True)
    if raw:
        found = _without_filters(found, scores)
    # With a filter, the tokens are in the order of their scores already.  Without tokens to list, `torch.jit.trace`
    # would see the order made for nothing, which ends in an internal error of PyTorch.
    listed = parameters.filters or not top
    best = torch.arange(top, device=scores.device).expand(scores.shape[0], top) if listed else largest(scores, top)
    columns = torch.cat([column, best], 1)
    return sampled_of(found, columns, kept, scores.dtype)


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
        flat = drafts.reshape(seed.shape[0], n).long()
        left = _verify(target.scores(), flat, None if draft is None else draft.scores(), parameters, seed, offset)
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


def _verify(
    scores: Tensor, drafts: Tensor, scores_of_draft: Tensor | None, parameters: Parameters, seed: Tensor, offset: Tensor
) -> Verified:
    """`verify` of scores (rows * (n + 1), tokens) and (rows * n, tokens), and drafts (rows, n) int64."""
    (rows, n), tokens = drafts.shape, scores.shape[1]
    target, draft = distribution_of(scores, parameters.map(lambda t: t.repeat_interleave(n + 1))), None
    if scores_of_draft is not None:
        draft = distribution_of(scores_of_draft, parameters.map(lambda t: t.repeat_interleave(n)))
    position, row = (torch.arange(i, device=drafts.device) for i in (n + 1, rows))
    exists = (drafts >= 0) & (drafts < tokens)
    columns = drafts.where(exists, 0)
    drafted = torch.nn.functional.pad(columns, (0, 1)).flatten()
    of_p = target.of_token(drafted).probabilities().view(rows, n + 1)[:, :n]
    of_q = torch.ones_like(of_p) if draft is None else draft.of_token(columns.flatten()).probabilities().view(rows, n)
    seeds, offsets = seed.repeat_interleave(n), (offset.unsqueeze(1) + position[:n]).flatten()
    accepted = number_accepted(exists, of_p, of_q, uniform(seeds, offsets, 1, ACCEPT).view(rows, n))

    # The token behind the accepted drafts.
    offset = offset + accepted.squeeze(1)
    here = target.of_rows(row * (n + 1) + accepted.squeeze(1))
    p = here.by_id(here.probabilities())
    keys = here.by_id(here.z.masked_fill(~here.kept, -torch.inf)) + here.temperature * gumbel(seed, offset, tokens)
    if n:
        at = accepted.clamp(max=n - 1)
        if draft is None:
            q = torch.zeros_like(p).scatter(1, columns.gather(1, at), 1.0)
        else:
            other = draft.of_rows(row * n + at.squeeze(1))
            q = other.by_id(other.probabilities())
        replaces = exists.gather(1, at) & (accepted < n)
        keys = keys_of_next(torch, p, q, replaces, gumbel(seed, offset, tokens, CORRECT), keys)
    last = torch.where(here.valid, keys.argmax(1, keepdim=True), -1)
    of_last = p.gather(1, last.clamp(min=0))
    found, logprobs = row_of(torch, position, accepted, drafts, of_p, last, of_last)
    return Verified(accepted.squeeze(1), found, logprobs.to(scores.dtype), here.valid.squeeze(1))


def _without_filters(found: Distribution, scores: Tensor) -> Distribution:
    """The distribution of all tokens of the scores at the temperature 1."""
    one, kept = torch.ones_like(found.temperature), torch.ones_like(found.kept)
    wide = scores.dtype == torch.float64
    log_sum = log_sum_of(found.z, kept) if wide else log_of_kept(masses_of(scores, found.m, one), kept)
    return found._replace(temperature=one, kept=kept, log_sum=log_sum)
