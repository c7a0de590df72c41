"""Speculative decoding: which tokens of a draft model stay, so that all are distributed as those of the target model.

A draft x with the probability q(x) in the draft model and p(x) in the target model stays with the probability
min(1, p(x) / q(x)).  The first that does not stay is replaced by a token of the distribution max(p - q, 0), and ends
the row; if all stay, one token follows.  (Leviathan, Kalman and Matias, arXiv:2211.17192.)

The rule stands here in operations that PyTorch, NumPy and JAX have in common, and in kernels/verify.cuh for GPUs.
"""

from __future__ import annotations

from typing import Any

from ..core.arrays import Array


def number_accepted(exists: Array, of_p: Array, of_q: Array, chance: Array) -> Array:
    """How many drafts stay, (..., 1).

    Args:
        exists: True for a draft that is a token, (..., n), which is the shape of the other arrays too.
        of_p, of_q: Its probabilities; of_q is 1 for a draft without a distribution, as from greedy decoding.
        chance: A uniform number between 0 and 1.
    """
    stays = exists & (chance * of_q < of_p)
    return (stays * 1).cumprod(-1).sum(-1)[..., None]


def keys_of_next(xp: Any, p: Array, q: Array, replaces: Array, noise: Array, keys: Array) -> Array:
    """The numbers, one for each token, of which the largest has the token that follows the accepted drafts.

    Args:
        xp: torch, numpy or jax.numpy.
        p, q: Probabilities of all tokens at the position of that token, (..., tokens).
        replaces: True where the token replaces a draft, (..., 1).
        noise: The noise of the stream CORRECT.
        keys: The numbers of `sample`, which count where no draft is replaced, or p - q is nowhere positive.
    """
    left = (p - q).clip(0)
    # The probabilities have the temperature already.
    corrected = xp.log(left) + noise
    return xp.where(replaces & (left.sum(-1)[..., None] > 0), corrected, keys)


def row_of(
    xp: Any, position: Array, accepted: Array, drafts: Array, of_p: Array, next_token: Array, of_next: Array
) -> tuple[Array, Array]:
    """The tokens of a row and the logarithms of their probabilities, (..., n + 1), float64.

    Args:
        xp: torch, numpy or jax.numpy.
        position: The numbers from 0 to n.
        accepted: How many drafts stay, (..., 1).
        drafts: The drafts, (..., n).
        of_p: Their probabilities in the target model.
        next_token: The token that follows them, (..., 1); -1 where the target has no distribution.
        of_next: Its probability.
    """
    more = xp.concatenate([drafts, next_token], -1)
    found = xp.where(position < accepted, more, xp.where(position == accepted, next_token, -1))
    p = xp.where(position < accepted, xp.concatenate([of_p, of_next], -1), of_next)
    return found, xp.where(found < 0, 0.0, xp.log(p))
