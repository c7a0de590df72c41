"""The distribution that a token of each row is sampled from: temperature, then top_k, top_p and min_p.

A filter keeps the tokens whose score reaches a threshold, so neither the order of a row nor the way in which it is cut
matters.  No operation waits for the GPU: every parameter of a row is a tensor.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..core.options import LARGEST_FLOAT32
from .masses import FRACTION_BITS, MASS_BITS, POWER_OF_TWO
from .order import largest
from .results import Sampled, Support
from .rules import Parameters

Tensor = torch.Tensor


class Distribution(NamedTuple):
    """The distribution of each row, in float64.

    Attributes:
        tokens: Token ids, (rows, columns) int64: by falling score if they come with a filter from `distribution_of`,
            of equal scores the lower id first; otherwise by rising id.
        z: Score of each token less the largest, (rows, columns).
        kept: True for the tokens that can be sampled, (rows, columns).
        m: Largest score, (rows, 1).
        temperature: (rows, 1); 1 for a greedy row, which keeps one token.
        log_sum: Logarithm of the sum of exp(z / temperature) over the kept tokens, (rows, 1).
        valid: False for a row without a distribution, (rows, 1): it has a NaN or nothing but -inf, its temperature is
            negative or infinite, or a parameter is NaN.
    """

    tokens: Tensor
    z: Tensor
    kept: Tensor
    m: Tensor
    temperature: Tensor
    log_sum: Tensor
    valid: Tensor

    def of_rows(self, rows: Tensor) -> Distribution:
        """The distribution of some rows."""
        return Distribution(*[t[rows] for t in self])

    def of_token(self, token: Tensor) -> Distribution:
        """One token of each row, in one column; the numbers of rows are those of whole rows."""
        column = (self.tokens == token.unsqueeze(1)).byte().argmax(1, keepdim=True)
        tokens, z, kept = (t.gather(1, column) for t in (self.tokens, self.z, self.kept))
        return self._replace(tokens=tokens, z=z, kept=kept)

    def probabilities(self) -> Tensor:
        """The probability of each token, in the order of `tokens`; NaN in rows that are not valid."""
        p = (self.z / self.temperature - self.log_sum).exp().masked_fill(~self.kept, 0.0)
        return p.masked_fill(~self.valid, torch.nan)

    def by_id(self, t: Tensor) -> Tensor:
        """Numbers of the tokens in the order of their ids."""
        return torch.empty_like(t).scatter(1, self.tokens, t)


def distribution_of(scores: Tensor, given: Parameters) -> Distribution:
    """The distribution of each row of scores (rows, columns)."""
    m = scores.amax(1, keepdim=True).double()
    temperature, greedy, valid = constants_of(m, given)
    columns = torch.arange(scores.shape[1], device=scores.device).unsqueeze(0)
    if given.filters:
        tokens = largest(scores, scores.shape[1])
        scores = scores.gather(1, tokens)
    else:
        tokens = columns.expand_as(scores)
    z, masses = below(scores, m), masses_of(scores, m, temperature)
    kept = z > -torch.inf
    if given.filters:
        kept = columns < _number_kept(scores, masses, kept.sum(1, keepdim=True), given)
    kept = kept & reaches_min_p(z, temperature, given)
    # torch.argmax gives the first of equal scores.
    kept = torch.where(greedy, columns == z.argmax(1, keepdim=True), kept)
    log_sum = log_sum_of(z / temperature, kept) if scores.dtype == torch.float64 else log_of_kept(masses, kept)
    return Distribution(tokens, z, kept, m, temperature, log_sum, valid)


def constants_of(m: Tensor, given: Parameters) -> tuple[Tensor, Tensor, Tensor]:
    """(temperature, 1 in greedy rows; greedy; valid) of each row with the largest score m, all (rows, 1)."""
    temperature = given.temperature.double().unsqueeze(1)
    valid, greedy = (m > -torch.inf) & (temperature >= 0) & (temperature < torch.inf), temperature == 0
    for p in (given.top_p, given.min_p):
        valid = valid if p is None else valid & ~p.isnan().unsqueeze(1)
    return temperature.masked_fill(greedy, 1.0), greedy, valid


def below(scores: Tensor, m: Tensor) -> Tensor:
    """Scores less the largest, float64."""
    # The difference of two infinite scores would be NaN.
    return torch.where(scores == m, 0.0, scores - m)


def reaches_min_p(z: Tensor, temperature: Tensor, given: Parameters) -> Tensor:
    """True for the scores, less the largest, that min_p keeps."""
    if given.min_p is None:
        return torch.ones_like(z, dtype=torch.bool)
    return z >= temperature * given.min_p.clamp(0.0, 1.0).log().unsqueeze(1)


def number_of(top_k: Tensor, finite: Tensor) -> Tensor:
    """How many of the `finite` tokens top_k keeps, if no scores are equal at its threshold, (rows, 1)."""
    k = top_k.unsqueeze(1)
    return torch.where(k > 0, torch.minimum(k, finite), finite)


def mass_of(top_p: Tensor, total: Tensor) -> Tensor:
    """The mass that the tokens which top_p keeps have to reach, of the whole mass, (rows, 1)."""
    return torch.minimum((top_p.unsqueeze(1) * total).ceil().long(), total)


def masses_of(scores: Tensor, m: Tensor, temperature: Tensor) -> Tensor:
    """The masses of scores (rows, tokens) by masses.py, int64; those of float64 scores by the library's exp.

    Args:
        scores: Scores, in their own dtype.
        m, temperature: Largest score and temperature of each row, (rows, 1) float64.
    """
    if scores.dtype == torch.float64:
        return ((below(scores, m) / temperature).exp() * 2.0**MASS_BITS).round().nan_to_num(0.0).long()
    rate = (math.log2(math.e) / temperature).clamp(max=LARGEST_FLOAT32).float().double()
    y = scores.double() * rate
    n = y.floor()
    octaves = torch.where(scores == m, 0.0, n - (m * rate).floor())
    unit = 2.0**FRACTION_BITS
    # y - n may be rounded, and would be rounded twice.  The fraction of an infinite score is NaN.
    g = 1.0 + ((y * unit).round() - n * unit).nan_to_num(0.0) / unit
    power = torch.full_like(g, POWER_OF_TWO[-1])
    for coefficient in POWER_OF_TWO[-2::-1]:
        power = (power * g + coefficient).float().double()
    power = (power * unit).long()
    left = (octaves.clamp(min=-63.0).nan_to_num(-63.0) + (MASS_BITS - FRACTION_BITS)).long()
    return torch.where(left < 0, power >> -left.clamp(max=0), power << left.clamp(min=0))


def log_of(mass: Tensor, largest: Tensor) -> Tensor:
    """Logarithm of the quotient of a mass and that of the row's largest score, float64."""
    # If only that one is kept, the quotient is 1, of which every library's logarithm is 0.
    return (mass.double() / largest.double()).log()


def log_of_kept(masses: Tensor, kept: Tensor) -> Tensor:
    """`log_of` the sum of the kept masses of each whole row, (rows, 1)."""
    return log_of(masses.where(kept, 0).sum(1, keepdim=True), masses.amax(1, keepdim=True))


def log_sum_of(z: Tensor, kept: Tensor) -> Tensor:
    """Logarithm of the sum of exp(z) over the kept tokens of each row, with the accuracy of float64."""
    return z.masked_fill(~kept, -torch.inf).logsumexp(1, keepdim=True)


def sampled_of(found: Distribution, columns: Tensor, kept: Tensor, dtype: torch.dtype) -> Sampled:
    """The results of rows.

    Args:
        found: The distribution that log-probabilities refer to.
        columns: Columns of the sampled token and of the largest scores in its `tokens`, (rows, 1 + n).
        kept: Number of tokens that could be sampled, (rows, 1).
        dtype: Dtype of the log-probabilities.
    """
    tokens = found.tokens.gather(1, columns)
    # -inf for a token that is not kept.
    logprobs = found.z.gather(1, columns) / found.temperature - found.log_sum
    logprobs = logprobs.masked_fill(~found.kept.gather(1, columns), -torch.inf)
    lse = found.m / found.temperature + found.log_sum
    tokens, kept = (t.masked_fill(~found.valid, 0) for t in (tokens, kept))
    logprobs, lse = (t.masked_fill(~found.valid, torch.nan).to(dtype) for t in (logprobs, lse))
    tops = (tokens[:, 1:], logprobs[:, 1:]) if columns.shape[1] > 1 else (None, None)
    return Sampled(tokens[:, 0], logprobs[:, 0], lse.squeeze(1), kept.squeeze(1), found.valid.squeeze(1), *tops)


def support_of(tokens: Tensor, kept: Tensor) -> Support:
    """The tokens that rows keep; a row with more than n has none.

    Args:
        tokens: The n tokens of each row with the largest scores, in the order of `largest`, (rows, n).
        kept: Number of tokens that a row keeps, (rows,): whatever the filter, they come first in this order.
    """
    (rows, n), places = tokens.shape, torch.arange(tokens.shape[1], device=tokens.device)
    count = kept.where(kept <= n, 0)
    used, offsets = places < count.unsqueeze(1), torch.nn.functional.pad(count.cumsum(0), (1, 0))
    ids = tokens.masked_fill(~used, torch.iinfo(torch.int64).max).sort(1).values
    # The unused places write behind the end, so that no size depends on the data.
    at = torch.where(used, offsets[:-1].unsqueeze(1) + places, rows * n)
    token_ids = ids.new_full((rows * n + 1,), -1).scatter(0, at.flatten(), ids.flatten())
    return Support(token_ids[:-1], offsets)


def _number_kept(scores: Tensor, masses: Tensor, finite: Tensor, given: Parameters) -> Tensor:
    """How many of the tokens, which are in the order of their scores, top_k and top_p keep of each row, (rows, 1).

    Args:
        scores: Scores.
        masses: As `masses_of` returns them.
        finite: How many scores less the largest are above -inf, (rows, 1).
        given: The parameters.
    """
    number = finite
    if given.top_k is not None:
        number = _with_ties(scores, number_of(given.top_k, finite), given.first)
    if given.top_p is not None:
        sums = masses.cumsum(1)
        wanted = mass_of(given.top_p, sums.gather(1, (number - 1).clamp(min=0)))
        smallest = torch.minimum((sums < wanted).sum(1, keepdim=True) + 1, number)
        number = torch.where(given.top_p.unsqueeze(1) < 1, _with_ties(scores, smallest, given.first), number)
    return number


def _with_ties(scores: Tensor, number: Tensor, first: bool) -> Tensor:
    """The number of tokens, with those that equal the last one unless only the first are to be kept."""
    if first:
        return number
    return (scores >= scores.gather(1, (number - 1).clamp(min=0))).sum(1, keepdim=True)
