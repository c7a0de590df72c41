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


class Losses(NamedTuple):
    """The losses of one sequence, by the kernel that routes its tokens.

    Attributes:
        balance: () float32: the load-balancing loss; None once it has been handed out.
        z_loss: The same of the z-loss.
        slopes: float32: the derivative of `balance` in each of prob_sums; the last number, behind 0 to 3 that are not
            used, is c in the derivative c * lse of `z_loss` in lse.  None in what the caller gets.
    """

    balance: Array | None
    z_loss: Array | None
    slopes: Array | None


class WithLosses(Routed):
    """The results of `route` by a kernel that has computed both losses too.

    A tuple that is made of this one, as by `_replace`, has no losses: they would not be those of its other fields.
    """

    losses = Losses(None, None, None)

    def __repr__(self) -> str:
        return repr(Routed(*self))


def with_losses(routed: Routed, losses: Losses | None) -> Routed:
    """The results with these losses, or as they are for None."""
    if losses is None:
        return routed
    found = WithLosses(*routed)
    found.losses = losses
    return found


def losses_of(routed: Routed) -> Losses | None:
    """The losses of results, or None."""
    return routed.losses if isinstance(routed, WithLosses) else None
