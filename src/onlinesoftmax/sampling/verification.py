"""Speculative decoding: which tokens of a draft model stay, so that all are distributed as those of the target model.

A draft x with the probability q(x) in the draft model and p(x) in the target model stays with the probability
min(1, p(x) / q(x)).  The first that does not stay is replaced by a token of the distribution max(p - q, 0), and ends
the row; if all stay, one token follows.  (Leviathan, Kalman and Matias, arXiv:2211.17192.)
"""

from __future__ import annotations

import torch

from .distribution import Distribution, KeptRows
from .noise import gumbel, uniform
from .philox import ACCEPT, CORRECT
from .results import Verified

Tensor = torch.Tensor


def verified(
    target: Distribution | KeptRows,
    drafts: Tensor,
    draft: Distribution | KeptRows | None,
    seed: Tensor,
    offset: Tensor,
    dtype: torch.dtype,
) -> Verified:
    """Decides which drafts stay, and samples the token that follows them.

    Args:
        target: Distribution of each position of each row, of rows * (n + 1) rows.
        drafts: Drafted tokens (rows, n) int64; a number that is no token where a row has fewer.
        draft: Distribution that each draft was sampled from, of rows * n rows; None for a draft without one, as from
            greedy decoding, whose probability counts as 1.
        seed, offset: Those of each position, (rows * (n + 1),) int64.
        dtype: Dtype of the log-probabilities.
    """
    (rows, n), tokens = drafts.shape, target.length
    exists = (drafts >= 0) & (drafts < tokens)
    columns = drafts.where(exists, 0)
    of_p = target.of_token(torch.nn.functional.pad(columns, (0, 1)).flatten()).probabilities().view(rows, n + 1)[:, :n]
    of_q = torch.ones_like(of_p) if draft is None else draft.of_token(columns.flatten()).probabilities().view(rows, n)
    chance = uniform(seed, offset, 1, ACCEPT).view(rows, n + 1)[:, :n]
    stays = exists & (chance * of_q < of_p)
    accepted = stays.long().cumprod(1).sum(1)

    # One more token: it stands at the first draft that does not stay, or behind the last one.
    row = torch.arange(rows, device=drafts.device)
    place = row * (n + 1) + accepted
    seed, offset, here = seed[place], offset[place], target.of_rows(place)
    p = _in_order(here, here.probabilities())
    # The token of `sample`: where all drafts stay, where a row has no more of them, and where nothing is left of p.
    keys = _in_order(here, here.z.masked_fill(~here.kept, -torch.inf))
    keys = keys + here.temperature * gumbel(seed, offset, tokens)
    if n:
        rejected = accepted.clamp(max=n - 1)
        if draft is None:
            q = torch.zeros_like(p).scatter(1, columns.gather(1, rejected.unsqueeze(1)), 1.0)
        else:
            other = draft.of_rows(row * n + rejected)
            q = _in_order(other, other.probabilities())
        left = (p - q).clamp(min=0)
        corrects = (
            exists.gather(1, rejected.unsqueeze(1)) & (accepted < n).unsqueeze(1) & (left.sum(1, keepdim=True) > 0)
        )
        # The probabilities have the temperature already.
        keys = torch.where(corrects, left.log() + gumbel(seed, offset, tokens, CORRECT), keys)

    at, position = accepted.unsqueeze(1), torch.arange(n + 1, device=drafts.device)
    last = torch.where(here.valid, keys.argmax(1, keepdim=True), -1)
    more, of_more = (torch.nn.functional.pad(t, (0, 1)) for t in (drafts, of_p))
    found = torch.where(position < at, more, torch.where(position == at, last, -1))
    probability = torch.where(position < at, of_more, p.gather(1, last.clamp(min=0)))
    return Verified(accepted, found, probability.log().masked_fill(found < 0, 0.0).to(dtype), here.valid.squeeze(1))


def _in_order(found: Distribution, t: Tensor) -> Tensor:
    """Numbers of the tokens of a distribution, in the order of the token ids."""
    return torch.empty_like(t).scatter(1, found.tokens, t)
