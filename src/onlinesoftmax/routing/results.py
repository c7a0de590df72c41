"""The named tuple that `route` returns."""

from __future__ import annotations

from typing import NamedTuple

from ..core.arrays import Array


class Routed(NamedTuple):
    """The experts of each token; for logits (tokens, experts) or (sequences, tokens, experts), or with more dimensions.

    Attributes:
        weights: (..., tokens, k) float32 (float64 for float64 logits), in the order of `indices`; differentiable.
        indices: (..., tokens, k) int32, by falling selection score; those of a token are different.  -1 for a masked
            token.
        counts: (..., experts) int32: number of tokens of each sequence that chose the expert; None unless asked for.
        prob_sums: (..., experts) float32: probability of the expert, added over the tokens of each sequence;
            differentiable; None unless asked for.
        lse: (..., tokens) float32: logsumexp of the logits; 0 for a masked token; differentiable.
        dense: (..., tokens, experts) float32: the weight of every expert, 0 for one that is not chosen;
            differentiable; None unless asked for.
    """

    weights: Array
    indices: Array
    counts: Array | None
    prob_sums: Array | None
    lse: Array
    dense: Array | None = None
