"""`sample` and `verify` by PyTorch's operations, which choose the tokens that the kernels choose."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..torch.gradients import is_traced
from . import formulas
from .order import largest
from .results import Sampled, Support, Verified
from .rules import Parameters
from .topk import CHUNK

Tensor = torch.Tensor


class Sorted(NamedTuple):
    """The order of scores (..., tokens), as `formulas.Order`.

    Attributes:
        scores: Scores.
        tokens: Token ids in that order; None without a filter, where nothing is sorted.
    """

    scores: Tensor
    tokens: Tensor | None

    def best(self) -> Tensor:
        # torch.argmax gives the first of equal scores.
        return self.scores.argmax(-1, keepdim=True) if self.tokens is None else self.tokens[..., :1]

    def largest(self, k: int) -> Tensor:
        return largest(self.scores, k) if self.tokens is None else self.tokens[..., :k]

    def leading(self, kept: Tensor, weights: Tensor | None, wanted: Tensor, first: bool) -> Tensor:
        tokens = self.tokens
        assert tokens is not None
        last = wanted - 1
        if weights is not None:
            sums = weights.gather(-1, tokens).cumsum(-1)
            last = (sums < wanted).sum(-1, keepdim=True)
        last = last.clamp(0, tokens.shape[-1] - 1)
        if not first:
            return kept & (self.scores >= self.scores.gather(-1, tokens.gather(-1, last)))
        places = torch.arange(tokens.shape[-1], device=tokens.device)
        return kept & torch.empty_like(kept).scatter(-1, tokens, places <= last)

    def log_sum(self, z: Tensor, kept: Tensor) -> Tensor:
        z = z.masked_fill(~kept, -torch.inf)
        return (z if self.tokens is None else z.gather(-1, self.tokens)).logsumexp(-1, keepdim=True)


def _order(scores: Tensor, filtered: bool) -> Sorted:
    # A sort of whole rows, which has the order of `largest`.
    return Sorted(scores, torch.sort(scores, dim=-1, descending=True, stable=True).indices if filtered else None)


def _take(t: Tensor, places: Tensor, axis: int) -> Tensor:
    # In an exported program, torch.take_along_dim would fix the number of rows.
    return t.gather(axis, places if axis == -1 else places.expand(*places.shape[:-1], t.shape[-1]))


FUNCTIONS = formulas.Functions(
    torch,
    cast=Tensor.to,
    float32=lambda t: t.float().double(),
    take=_take,
    arange=lambda first, end, like: torch.arange(first, end, device=like.device),
    order=_order,
)
"""PyTorch's functions for the formulas."""


def sample_rows(scores: Tensor, parameters: Parameters, seed: Tensor, offset: Tensor, raw: bool, top: int) -> Sampled:
    """`sample` of scores (rows, tokens), on a CPU a chunk of rows at a time."""

    def of_part(part: slice) -> tuple[Any, ...]:
        given = parameters.map(lambda t: t[part, None])
        return formulas.sample(FUNCTIONS, scores[part], given, seed[part, None], offset[part, None], raw, top)[:-1]

    # A trace would have one graph for each number of chunks.
    if not scores.is_cpu or is_traced(scores):
        return Sampled(*of_part(slice(None)))
    count = max(CHUNK // scores.shape[1], 1)
    chunks = [of_part(slice(first, first + count)) for first in range(0, max(len(scores), 1), count)]
    joined: list[Any] = [None if parts[0] is None else torch.cat(parts) for parts in zip(*chunks, strict=True)]
    return Sampled(*joined)


def verify_rows(
    scores: tuple[Tensor, Tensor | None], drafts: Tensor, parameters: Parameters, seed: Tensor, offset: Tensor
) -> Verified:
    """`verify` of scores (rows * (n + 1), tokens) and (rows * n, tokens), and drafts (rows, n) int64."""
    (rows, n), (target, draft) = drafts.shape, scores
    target = target.view(rows, n + 1, target.shape[-1])
    draft = None if draft is None else draft.view(rows, n, draft.shape[-1])
    given, seed, offset = parameters.map(lambda t: t[:, None, None]), seed[:, None, None], offset[:, None, None]
    return Verified(*formulas.verify(FUNCTIONS, (target, draft), drafts, given, seed, offset))


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
