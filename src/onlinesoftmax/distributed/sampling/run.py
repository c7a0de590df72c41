"""A token of each row whose tokens are sharded over processes: that of `onlinesoftmax.sample` of the whole row.

    leaders      every process sends its largest scores, and learns the largest of whole rows: one all-gather
    threshold    of top_k and top_p: from the leaders, or by exchanges of bins (thresholds.py)
    winner       every process sends the mass and the number of its kept tokens, and the best of them: one all-gather

Every process merges the same numbers, and so gets the same results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ...core.processes import gathered
from ...sampling.arguments import (
    LARGEST_INT64,
    Logits,
    checked_choice,
    checked_count,
    checked_parameters,
    checked_seeds,
)
from ...sampling.eager import FUNCTIONS, support_of
from ...sampling.formulas import (
    Distribution,
    below,
    constants_of,
    gumbel,
    log_of,
    masses_of,
    reaching_min_p,
    results_of,
)
from ...sampling.results import Sampled
from ...sampling.rules import Parameters
from .leaders import PIECE, Slice, Team, leaders_of, slice_of
from .thresholds import Slices, Threshold, threshold_of

Tensor = torch.Tensor

MOST_CANDIDATES = 1024
"""Largest number top_k whose threshold is found among the leaders: each process sends 16 KiB for each row."""


class Filter(NamedTuple):
    """The filters of rows, and constants of the rows, (rows, 1).

    Attributes:
        given: The parameters, (rows, 1).
        m: Largest score, float64.
        temperature, greedy, valid: As `constants_of` returns them.
        best: Token with the largest score.
        threshold: Threshold of top_k and top_p; None without them.
    """

    given: Parameters
    m: Tensor
    temperature: Tensor
    greedy: Tensor
    valid: Tensor
    best: Tensor
    threshold: Threshold | None

    def kept(self, scores: Tensor, tokens: Tensor, before: Tensor | int) -> Tensor:
        """True for the tokens that can be sampled; `before` as for `Threshold.kept`."""
        z = below(FUNCTIONS, scores, self.m)
        kept = z > -torch.inf
        if self.threshold is not None:
            kept = self.threshold.kept(scores, kept.long(), before) > 0
        kept = reaching_min_p(FUNCTIONS, kept, z, self.temperature, self.given)
        return torch.where(self.greedy, tokens == self.best, kept)


@torch.compiler.disable
@torch.no_grad()
def sample(logits: Logits, arguments: Mapping[str, Any], team: Team) -> Sampled:
    """A token of each row.

    Args:
        logits: The logits of this process.
        arguments: The other arguments of the public function by name, without score options.
        team: The processes.

    Raises:
        TypeError, RuntimeError, ValueError: an argument is wrong.
    """
    name, top_k = logits.name, arguments["top_k"]
    filters = (arguments[key] for key in ("temperature", "top_k", "top_p", "min_p", "ties"))
    given = checked_parameters(logits, *filters)
    raw = checked_choice(f"{name}()", "logprobs", arguments["logprobs"], ("processed", "raw")) == "raw"
    top, most = checked_count(logits, "top_logprobs", arguments["top_logprobs"], 0), 0
    if arguments["return_support"] is not None:
        most = checked_count(logits, "return_support", arguments["return_support"], 1)
    seed, offset = checked_seeds(logits, *(arguments[key] for key in ("seed", "offset", "generator")))
    # Without rows there is nothing to send.
    groups, few = team.groups if len(seed) else (), None
    if given.top_k is not None and not isinstance(top_k, Tensor) and top_k <= MOST_CANDIDATES:
        few = top_k
    if arguments["seed"] is None:
        seed = gathered(seed, *groups)[0]
    here, pieces = slice_of(logits, team.shards, groups), []
    step = max(PIECE * math.prod(group.size() for group in groups) // logits.tokens, 1)
    for start in range(0, max(len(seed), 1), step):
        part = slice(start, start + step)
        of_part = here._replace(scores=here.scores[part]), given.map(lambda t: t[part, None])  # noqa: B023  # called at once
        pieces.append(_sample(*of_part, (seed[part, None], offset[part, None]), few, raw, (top, most)))
    whole: list[Any] = [None if parts[0] is None else torch.cat(parts) for parts in zip(*pieces, strict=True)]
    *found, tokens = whole
    of_rows: list[Any] = [None if t is None else t.reshape(logits.rows + t.shape[1:]) for t in found]
    return Sampled(*[*of_rows, support_of(tokens, found[3]) if most else None])


def _sample(
    here: Slice, given: Parameters, noise: tuple[Tensor, Tensor], few: int | None, raw: bool, listed: tuple[int, int]
) -> tuple[Any, ...]:
    """The results of scores (rows, tokens) but for the support, and the tokens that it is taken from.

    Args:
        here: The local tokens.
        given: Parameters, (rows, 1).
        noise: Seed and offset of each row, (rows, 1).
        few: top_k of all rows if it is one number, and not more than MOST_CANDIDATES; else None.
        raw: True for log-probabilities of the scores as they are, without temperature and filters.
        listed: Number of the largest log-probabilities, and most tokens of a row in the support.
    """
    top, most = listed
    leaders = leaders_of(here, max(top, most, few or 1))
    m, best = leaders.scores[:, :1].double(), leaders.tokens[:, :1]
    filters = Filter(given, m, *constants_of(FUNCTIONS, m, given), best, None)
    threshold: Threshold | None = None
    before: Tensor | int = 0
    if few is not None:
        threshold = threshold_of(leaders.candidates(), given, m, filters.temperature)
        equal = leaders.scores == threshold.score
        before = (equal & (leaders.tokens < here.first)).sum(1, keepdim=True)
    elif given.top_k is not None or given.top_p is not None:
        rows = Slices(here.scores, (below(FUNCTIONS, here.scores, m) > -torch.inf).long(), here.groups)
        threshold = threshold_of(rows, given, m, filters.temperature)
        before = rows.before(threshold.score) if given.first else 0
    filters = filters._replace(threshold=threshold)
    token, z, kept, log_sum = _winner(here, filters, before, noise, raw)

    scores, tokens = leaders.scores[:, :top], leaders.tokens[:, :top]
    named = torch.cat([torch.ones_like(kept, dtype=torch.bool), filters.kept(scores, tokens, 0)], 1)
    temperature = filters.temperature
    if raw:
        named, temperature = torch.ones_like(named), torch.ones_like(temperature)
    z, tokens = torch.cat([z, below(FUNCTIONS, scores, m)], 1), torch.cat([token, tokens], 1)
    found = Distribution(z, named, m, temperature, log_sum, filters.valid)
    return *results_of(FUNCTIONS, found, tokens, kept, scores.dtype), leaders.tokens[:, :most]


def _winner(
    here: Slice, filters: Filter, before: Tensor | int, noise: tuple[Tensor, Tensor], raw: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(token, z, number, log_sum), each (rows, 1): the sampled token, its score less the largest, the number of kept
    tokens, and the logarithm of the sum of exp(z / temperature) that log-probabilities refer to.
    """
    scores, temperature, wide = here.scores, filters.temperature, here.scores.dtype == torch.float64
    z, kept = below(FUNCTIONS, scores, filters.m), filters.kept(scores, here.tokens, before)
    keys = z + temperature * gumbel(FUNCTIONS, *noise, scores.shape[1], first=here.first)
    keys = keys.masked_fill(~kept, -torch.inf)
    at = keys.argmax(1, keepdim=True)
    divisor, summed = (torch.ones_like(temperature), z > -torch.inf) if raw else (temperature, kept)
    if wide:
        total = FUNCTIONS.order(scores, False).log_sum(z / divisor, summed).view(torch.int64)
    else:
        total = masses_of(FUNCTIONS, scores, filters.m, divisor).where(summed, 0).sum(1, keepdim=True)
    best = [t.gather(1, at).view(torch.int64) for t in (keys, z)]
    sent = torch.cat([*best, here.tokens[at], kept.sum(1, keepdim=True), total], 1)
    keys, z, tokens, numbers, totals = gathered(sent, *here.groups).permute(2, 1, 0)
    keys, z = keys.view(torch.float64), z.view(torch.float64)
    at = tokens.where(keys == keys.amax(1, keepdim=True), LARGEST_INT64).argmin(1, keepdim=True)
    if wide:
        log_sum = totals.view(torch.float64).logsumexp(1, keepdim=True)
    else:
        log_sum = log_of(
            FUNCTIONS, totals.sum(1, keepdim=True), masses_of(FUNCTIONS, filters.m.to(scores.dtype), filters.m, divisor)
        )
    return tokens.gather(1, at), z.gather(1, at), numbers.sum(1, keepdim=True), log_sum
