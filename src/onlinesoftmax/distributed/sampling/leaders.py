"""The largest scores of whole rows, which every process learns by one all-gather."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...core.processes import gathered
from ...sampling.arguments import LARGEST_INT64, Logits
from ...sampling.eager import FUNCTIONS
from ...sampling.formulas import below
from ...sampling.order import largest
from ..shards import Shards
from .thresholds import Candidates

Tensor = torch.Tensor

PIECE = 1 << 22
"""Scores of a process with the average number of tokens that are sampled from at a time: each takes up to 80 bytes."""


class Team(NamedTuple):
    """The processes that share rows.

    Attributes:
        groups: Process groups over which the tokens are sharded; several are the axes of a grid of processes.
        shards: Position of the local tokens.
    """

    groups: tuple[Any, ...]
    shards: Shards


class Slice(NamedTuple):
    """The tokens of this process.

    Attributes:
        scores: Scores (rows, tokens).
        first: Number of tokens on the processes before this one.
        tokens: Token ids (tokens,).
        groups: The process groups that have the other tokens.
    """

    scores: Tensor
    first: int
    tokens: Tensor
    groups: tuple[Any, ...]


class Leaders(NamedTuple):
    """The largest scores of whole rows, by falling size, ties by the lower token id; the same on every process.

    Attributes:
        scores, tokens: Scores and token ids, (rows, columns).
        last, hidden: For each process, the least score that it sent, and how many more of its tokens have this score,
            both (rows, processes).
    """

    scores: Tensor
    tokens: Tensor
    last: Tensor
    hidden: Tensor

    def candidates(self) -> Candidates:
        """All scores from the least on that a process sent, for the threshold of top_k."""
        scores = torch.cat([self.scores, self.last], 1)
        counts = torch.cat([torch.ones_like(self.tokens), self.hidden], 1)
        counts = counts.where(below(FUNCTIONS, scores, self.scores[:, :1].double()) > -torch.inf, 0)
        order = largest(scores, scores.shape[1])
        return Candidates(scores.gather(1, order), counts.gather(1, order))


def slice_of(logits: Logits, shards: Shards, groups: tuple[Any, ...]) -> Slice:
    """The tokens of this process."""
    scores, first = logits.scores(), shards.first
    tokens = torch.arange(first, first + shards.cols, device=scores.device)
    if not shards.cols:
        # The maximum of no scores does not exist.  This one is no token, and nothing keeps it.
        scores, tokens = scores.new_full((len(scores), 1), -torch.inf), tokens.new_full((1,), LARGEST_INT64)
    return Slice(scores, first, tokens, groups)


def leaders_of(here: Slice, count: int) -> Leaders:
    """The largest scores of whole rows, from so many of each process, by one all-gather."""
    width = here.scores.shape[1]
    pieces = here.scores.split(max(PIECE // width, 1))
    columns = torch.cat([largest(piece, min(count, width)) for piece in pieces])
    missing = len(columns), count - columns.shape[1]
    scores = torch.cat([here.scores.gather(1, columns), here.scores.new_full(missing, -torch.inf)], 1)
    tokens = torch.cat([here.tokens[columns], here.tokens.new_full(missing, LARGEST_INT64)], 1)
    last = scores[:, -1:]
    hidden = (here.scores == last).sum(1, keepdim=True) - (scores == last).sum(1, keepdim=True)
    sent = torch.cat([scores.double().view(torch.int64), tokens, hidden], 1)
    found = gathered(sent, *here.groups).transpose(0, 1)
    scores = found[:, :, :count].view(torch.float64).to(scores.dtype)
    last, hidden = scores[:, :, -1], found[:, :, -1]
    scores, tokens = scores.flatten(1), found[:, :, count:-1].flatten(1)
    order = tokens.argsort(1)
    order = order.gather(1, largest(scores.gather(1, order), scores.shape[1]))
    return Leaders(scores.gather(1, order), tokens.gather(1, order), last, hidden)
