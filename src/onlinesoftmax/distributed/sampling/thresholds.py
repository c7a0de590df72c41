"""The threshold that top_k and top_p set in each row, if the tokens are sharded over processes.

A filter adds up weights, 1 or the mass of each token, by falling score, until a goal is reached.  The score at which
that happens is found in one of two ways:

    Candidates   the largest scores of all processes are known, as many as top_k keeps: nothing more is exchanged
    Slices       each process knows its own scores: their weights are added up in BINS bins over all processes, the bin
                 that reaches the goal is cut into bins again, and so on (a radix select)

The sums are sums of integers, so every process finds the same threshold, and that of a whole row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from ...core.processes import gathered, start_adding
from ...sampling.eager import FUNCTIONS
from ...sampling.formulas import mass_of, masses_of, number_of
from ...sampling.keys import ordered, turned
from ...sampling.rules import Parameters

Tensor = torch.Tensor

DIGIT_BITS = 11
"""Bits of a score that an exchange of bins finds."""

BINS = 1 << DIGIT_BITS


class Threshold(NamedTuple):
    """The tokens of each row that top_k and top_p keep.

    Attributes:
        score: The least score that is kept, (rows, 1).
        ties: Number of the tokens with this score that are kept, those with the lowest ids, (rows, 1) int64; None for
            all of them.
    """

    score: Tensor
    ties: Tensor | None

    def kept(self, scores: Tensor, counts: Tensor, before: Tensor | int) -> Tensor:
        """How many of the tokens are kept, (rows, columns) int64.

        Args:
            scores: Scores (rows, columns), equal ones in the order of their token ids.
            counts: Number of the tokens that have each score, int64.
            before: Number of tokens with the score of the threshold and lower ids, which are not among these scores.
        """
        if self.ties is None:
            return counts.where(scores >= self.score, 0)
        equal = counts.where(scores == self.score, 0)
        sums = equal.cumsum(1) + before
        some = torch.minimum(sums, self.ties) - torch.minimum(sums - equal, self.ties)
        return counts.where(scores > self.score, some)


class Candidates(NamedTuple):
    """The largest scores of whole rows, by falling size; the same on every process.

    Attributes:
        scores: Scores (rows, columns).
        counts: Number of tokens that a column stands for, (rows, columns) int64.
    """

    scores: Tensor
    counts: Tensor

    def reached(self, weights: Tensor, goal_of: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """(score, rest), both (rows, 1): the largest score down to which the weights add up to the goal, and the part
        of the goal that the tokens with this score have to reach.

        Args:
            weights: Weight of each column, (rows, columns) int64.
            goal_of: Function that returns the goal of the sum of all weights, both (rows, 1) int64.
        """
        sums = weights.cumsum(1)
        goal = goal_of(sums[:, -1:]).clamp(min=1)
        at = (sums < goal).sum(1, keepdim=True).clamp(max=weights.shape[1] - 1)
        score = self.scores.gather(1, at)
        return score, goal - weights.where(self.scores > score, 0).sum(1, keepdim=True)

    def before(self, score: Tensor) -> int:
        """How many tokens with this score have lower ids than those of the columns."""
        return 0


class Slices(NamedTuple):
    """The scores of this process, in the order of the token ids.

    Attributes:
        scores: Scores (rows, columns).
        counts: 1 for a token that can be kept, else 0, (rows, columns) int64.
        groups: Process groups that have the other tokens.
    """

    scores: Tensor
    counts: Tensor
    groups: tuple[Any, ...]

    def reached(self, weights: Tensor, goal_of: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Find what `Candidates.reached` returns, by an exchange of bins for each digit of the scores."""
        keys = ordered(torch, self.scores)
        shift = torch.iinfo(keys.dtype).bits
        # The bins are those of the numbers key >> shift from `least` on, which is negative at first.
        least, goal = torch.full((len(keys), 1), -BINS // 2, device=keys.device), None
        while shift:
            width = min(DIGIT_BITS, shift)
            shift -= width
            digits = (keys >> shift) - least
            inside = (digits >= 0) & (digits < 1 << width)
            bins = torch.zeros(len(keys), 1 << width, dtype=torch.int64, device=keys.device)
            bins.scatter_add_(1, digits.clamp(0, (1 << width) - 1), weights.where(inside, 0))
            sums = start_adding(bins, *self.groups)().flip(1).cumsum(1)
            goal = goal_of(sums[:, -1:]).clamp(min=1) if goal is None else goal
            at = (sums < goal).sum(1, keepdim=True).clamp(max=(1 << width) - 1)
            goal = goal - torch.where(at > 0, sums.gather(1, (at - 1).clamp(min=0)), 0)
            least = (least + (1 << width) - 1 - at) << min(DIGIT_BITS, shift)
        assert goal is not None
        return turned(torch, least.to(keys.dtype)).view(self.scores.dtype), goal

    def before(self, score: Tensor) -> Tensor:
        """Count the tokens with this score that have lower ids, by an exchange of the number on each process."""
        here = self.counts.where(self.scores == score, 0).sum(1, keepdim=True)
        index = 0
        for group in self.groups:
            index = index * group.size() + group.rank()
        return gathered(here, *self.groups)[:index].sum(0)


def threshold_of(rows: Candidates | Slices, given: Parameters, m: Tensor, temperature: Tensor) -> Threshold:
    """The threshold of each row.

    Args:
        rows: The tokens.
        given: Parameters (rows, 1), with top_k, top_p or both.
        m, temperature: Largest score and temperature of each row, (rows, 1) float64.
    """
    scores, counts = rows.scores, rows.counts
    found = Threshold(
        scores.new_full((len(scores), 1), -torch.inf), torch.zeros_like(m).long() if given.first else None
    )
    if given.top_k is not None:
        score, left = rows.reached(counts, partial(number_of, FUNCTIONS, given.top_k))
        found = Threshold(score, left if given.first else None)
    if given.top_p is None:
        return found
    if given.top_k is not None:
        counts = found.kept(scores, counts, rows.before(found.score) if given.first else 0)
    masses = masses_of(FUNCTIONS, scores, m, temperature) * counts
    score, left = rows.reached(masses, partial(mass_of, FUNCTIONS, given.top_p))
    limits = given.top_p < 1
    ties = None
    if found.ties is not None:
        each = masses_of(FUNCTIONS, score, m, temperature).clamp(min=1)
        ties = torch.where(limits, (left + each - 1) // each, found.ties)
    return Threshold(torch.where(limits, score, found.score), ties)
