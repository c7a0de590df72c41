"""Speculative decoding: which tokens of a draft model stay, so that all are distributed as those of the target model.

A draft x with the probability q(x) in the draft model and p(x) in the target model stays with the probability
min(1, p(x) / q(x)).  The first that does not stay is replaced by a token of the distribution max(p - q, 0), and ends
the row; if all stay, one token follows.  (Leviathan, Kalman and Matias, arXiv:2211.17192.)
"""

from __future__ import annotations

import torch

from .distribution import Distribution
from .noise import gumbel, uniform
from .philox import ACCEPT, CORRECT
from .results import Verified

Tensor = torch.Tensor


def verified(
    target: Distribution, drafts: Tensor, draft: Distribution | None, seed: Tensor, offset: Tensor, dtype: torch.dtype
) -> Verified:
    """What is left of the drafts.

    Args:
        target: Distribution of each position of each row, of rows * (n + 1) rows.
        drafts: Drafted tokens (rows, n) int64; -1 where a row has fewer.
        draft: Distribution that each draft was sampled from, of rows * n rows; None for a draft without one, as from
            greedy decoding, whose probability counts as 1.
        seed, offset: What the noise of each position is made of, (rows * (n + 1),) int64.
        dtype: Dtype of the log-probabilities.
    """
    rows, n = drafts.shape
    p = _probabilities(target).unflatten(0, (rows, n + 1))
    tokens = p.shape[2]
    exists = (drafts >= 0) & (drafts < tokens)
    columns = drafts.where(exists, 0).unsqueeze(2)
    if draft is None:
        q = torch.zeros_like(p[:, :n]).scatter(2, columns, 1.0)
    else:
        q = _probabilities(draft).unflatten(0, (rows, n))
    chance = uniform(seed, offset, 1, ACCEPT).view(rows, n + 1)[:, :n]
    of_p, of_q = (t[:, :n].gather(2, columns).squeeze(2) for t in (p, q))
    stays = exists & (chance * of_q < of_p)
    accepted = stays.long().cumprod(1).sum(1)

    # Where there is no draft, or nothing is left of p, the token is that of `sample`.
    left = (p[:, :n] - q).clamp(min=0)
    corrects = exists & (left.sum(2) > 0)
    keys = _in_order(target, target.z.masked_fill(~target.kept, -torch.inf))
    keys = (keys + target.temperature * gumbel(seed, offset, tokens)).view_as(p)
    corrected = left.log() + gumbel(seed, offset, tokens, CORRECT).view_as(p)[:, :n]
    keys = torch.cat([corrected.where(corrects.unsqueeze(2), keys[:, :n]), keys[:, n:]], 1)
    sampled = keys.argmax(2)

    at, position = accepted.unsqueeze(1), torch.arange(n + 1, device=drafts.device)
    valid = target.valid.view(rows, n + 1).gather(1, at)
    last = torch.where(valid, sampled.gather(1, at), -1)
    more = torch.cat([drafts, torch.full_like(at, -1)], 1)
    found = torch.where(position < at, more, torch.where(position == at, last, -1))
    logprobs = p.gather(2, found.clamp(min=0).unsqueeze(2)).squeeze(2).log().masked_fill(found < 0, 0.0)
    return Verified(accepted, found, logprobs.to(dtype), valid.squeeze(1))


def _probabilities(found: Distribution) -> Tensor:
    """Probabilities of all tokens, (rows, tokens) float64; NaN in rows that are not valid."""
    p = (found.z / found.temperature - found.log_sum).exp().masked_fill(~found.kept, 0.0)
    return _in_order(found, p).masked_fill(~found.valid, torch.nan)


def _in_order(found: Distribution, t: Tensor) -> Tensor:
    """Numbers of the tokens of a distribution, in the order of the token ids."""
    return torch.empty_like(t).scatter(1, found.tokens, t)
