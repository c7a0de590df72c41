"""The largest log-probabilities of rows whose tokens are sharded over processes.

The log-probability of the largest score comes from the exchange of states that log-probabilities of tokens make
(losses.py); those of the other scores differ from it as the scores do.
"""

from __future__ import annotations

import torch

from ...core.options import PLAIN
from ...core.processes import gathered
from ...sampling.arguments import Logits
from ...sampling.order import number_before
from ...sampling.results import TopLogprobs
from ...torch.eager import scores_of
from ...torch.formulas import accumulator_of
from .. import losses
from ..shards import ShardedInput, Shards
from .leaders import Slice, Team, leaders_of, slice_of

Tensor = torch.Tensor


@torch.compiler.disable
def topk_logprobs(logits: Logits, k: int, target: Tensor | None, team: Team) -> TopLogprobs:
    """The k largest scores of each row and their log-probabilities, and log-probability and rank of a target.

    Args:
        logits: The logits of this process, which have no bias.
        k: From 0 to the number of tokens of a row.
        target: A token of each row, an integer tensor of the shape of the rows.
        team: The processes.
    """
    rows, dim, rank = logits.rows, logits.dim, None
    if logits.x.requires_grad and torch.is_grad_enabled():
        # The gradients of scores and of log-probabilities are added up before they are rounded to 16 bits.
        logits = logits._replace(x=logits.x.to(accumulator_of(logits.x.dtype, logits.x.dtype)))
    with torch.no_grad():
        here = slice_of(logits, team.shards, team.groups if target is None or target.numel() else ())
        leaders = leaders_of(here, max(k, 1))
        n = max(k, 1)
        scores, tokens = leaders.scores[:, :n], leaders.tokens[:, :n]
        if target is not None:
            of_target = target.reshape(-1, 1).long()
            score, rank = _rank_of(here, of_target, team.shards)
            scores, tokens = torch.cat([scores, score], 1), torch.cat([tokens, of_target], 1)
    values = _with_gradient(logits, tokens, scores, team.shards)
    call = ShardedInput(team.groups, logits.options or PLAIN, shards=team.shards)
    logprob, lse = losses.log_probabilities(logits.x, tokens[:, 0].reshape(rows), dim, False, call)
    logprobs = values - values[:, :1] + logprob.reshape(-1, 1)

    def along(t: Tensor) -> Tensor:
        return t[:, :k].reshape(*rows, k).movedim(-1, dim)

    own = None if target is None else logprobs[:, n].reshape(rows)
    return TopLogprobs(
        along(values), along(tokens), along(logprobs), own, None if rank is None else rank.reshape(rows), lse
    )


def _rank_of(here: Slice, target: Tensor, shards: Shards) -> tuple[Tensor, Tensor]:
    """(score, rank) of a token of each row, all (rows, 1); NaN and 0 where it is no token of any process."""
    column = target - shards.first
    owned = (column >= 0) & (column < shards.cols)
    score = here.scores.gather(1, column.clamp(0, here.scores.shape[1] - 1))
    bits = score.double().view(torch.int64).where(owned, 0)
    # One process has the target; the others add 0.
    score = gathered(bits, *here.groups).sum(0).view(torch.float64).to(score.dtype)
    before = gathered(number_before(here.scores, score, here.tokens, target), *here.groups).sum(0)
    inside = (target >= 0) & (target < shards.total)
    return score.where(inside, torch.nan), (before + 1).where(inside, 0)


def _with_gradient(logits: Logits, tokens: Tensor, scores: Tensor, shards: Shards) -> Tensor:
    """Known scores of some tokens of each row (rows, n), with the gradient of those that this process has."""
    x, dim, options = logits.x, logits.dim, logits.options
    if not (x.requires_grad and torch.is_grad_enabled()):
        return scores
    if not shards.cols:
        # An empty sum: the results need a gradient on every process.
        return scores + x.sum(dtype=scores.dtype)
    column = tokens - shards.first
    owned = (column >= 0) & (column < shards.cols)
    at = column.clamp(0, shards.cols - 1).reshape(*logits.rows, -1).movedim(-1, dim)
    mask = None if options.mask is None else options.mask.expand_as(x).gather(dim, at)
    own = scores_of(x.gather(dim, at), dim, options._replace(mask=mask), torch.float32)[0]
    own = own.movedim(dim, -1).reshape(scores.shape)
    own = own.where(owned & own.isfinite(), 0.0)
    return scores + (own - own.detach())
