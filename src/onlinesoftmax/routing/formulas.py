"""Weights, probabilities and logsumexp of a routing whose experts are chosen, for NumPy, PyTorch and JAX.

All are computed in float32, in float64 for float64 logits.  The kernels compute the same numbers up to rounding errors;
the choice of experts is the same to the last bit (selection.py).

    valid       A token is valid unless its mask is False; with given experts, also unless none of them is an expert.
                A token that is not valid has the experts -1, weights 0 and lse 0; it adds nothing to counts and
                prob_sums, and its logits have the gradient 0, whatever they are.
    excluded    An expert is excluded where its logit or its bias is -inf.  A token chooses it only if too few others
                are left; then it is counted, and has weight 0.  Of given experts, those outside 0 ... E - 1 become -1:
                they are not counted, and have weight 0.
    score       softmax: exp(x - m) / sum(exp(x - m)), with m the largest logit.  sigmoid: 1 / (1 + exp(-x)).
                sqrtsoftplus: sqrt(log(1 + exp(x))).  identity: x.
    weight      scale * score.  With `renormalize`, scale * score / (sum of the scores of the chosen experts that are
                not excluded), and 0 where the sum is 0.  For softmax this is the softmax of the chosen logits, so that
                no sum underflows; topk_first with softmax always is.
    probability Of each expert, for prob_sums.  softmax: the score.  sigmoid, sqrtsoftplus: the score divided by the sum
                over all experts, 0 where the sum is 0.  identity: the score.  0 for a logit of -inf.
    NaN, inf    A token with a NaN among its logits, or +inf, has NaN where the arithmetic gives it; its experts are
                distinct and in range, counts are right, and no other token changes, but prob_sums get the NaN.
    counts      int32 numbers.
    prob_sums   float32 sums over the tokens of a sequence; the order of additions depends on shapes alone.

Each formula has a derivative wherever the function has one, so that automatic differentiation gives no NaN elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ..core.arrays import Array
from ..core.state import shift
from .rules import Rule, Score

LOWEST = -40.0
"""Below this logit, sqrt(log(1 + exp(x))) is exp(x / 2) to the last bit of float64."""


class Functions(NamedTuple):
    """The functions that the formulas need of an array library; the last axis of an array are the experts.

    Attributes:
        xp: The functions of the library (core/arrays.py).
        sqrt, log1p: Functions of one array.
        constant: The same numbers without a gradient.
        take: take(array, places) along the last axis.
        softmax: Softmax of finite numbers along the last axis, as one function of the library; None without one.
    """

    xp: Any
    sqrt: Callable[[Array], Array]
    log1p: Callable[[Array], Array]
    constant: Callable[[Array], Array]
    take: Callable[[Array, Array], Array]
    softmax: Callable[[Array], Array] | None = None


class Found(NamedTuple):
    """The results of each token; the last axis stays.

    Attributes:
        weights: (..., k).
        probabilities: (..., experts), 0 for a token that is not valid; None unless asked for.
        lse: (..., 1), 0 for a token that is not valid.
    """

    weights: Array
    probabilities: Array | None
    lse: Array


def results_of(
    of: Functions, x: Array, bias: Array | None, indices: Array, rule: Rule, with_probabilities: bool, complete: bool,
    finite: bool = False,
) -> Found:  # fmt: skip
    """The results for known experts.

    Args:
        of: Functions of the library.
        x: Logits (..., experts), float32 or float64.
        bias: Bias (..., experts) that broadcasts to x, or None.
        indices: The experts of each token, (..., k); -1 for none.
        rule: How they are weighted.
        with_probabilities: True to return the probabilities.
        complete: True where no expert is -1: there is no mask, and no expert was given.
        finite: True where the caller knows that the call is complete, and that all logits and biases are finite.
    """
    xp = of.xp
    places = indices if complete else xp.where(indices < 0, 0, indices)
    valid = None if complete else xp.max(indices, -1) >= 0

    def of_valid(t: Array) -> Array:
        return t if valid is None else xp.where(valid, t, 0.0)

    # The logits of a token that is not valid may be anything.
    x = of_valid(x)
    picked, out, p = of.take(x, places), None, None
    of_all = rule.score is Score.SOFTMAX and not rule.is_of_chosen()
    if finite and of.softmax is not None:
        p = of.softmax(x)
        # The largest logit has the probability 1 / sum(exp(x - m)).
        lse = xp.max(x, -1) - xp.log(xp.max(p, -1))
    else:
        terms, total, lse = terms_of(of, x)
        if rule.score is Score.SOFTMAX and (of_all or with_probabilities):
            p = _quotient(xp, x, terms, total)
        out = (picked == -math.inf) | is_out(of, bias, places)
        out = out if complete else out | (indices < 0)
    weights = weights_of(of, of.take(p, places) if of_all else picked, out, rule)
    if with_probabilities and rule.score is not Score.SOFTMAX:
        p = probabilities(of, x, rule)
    return Found(weights, of_valid(p) if with_probabilities else None, of_valid(lse))


def is_out(of: Functions, bias: Array | None, places: Array) -> Array | bool:
    """True for each expert whose bias is -inf, (..., k); a bool without a bias."""
    if bias is None:
        return False
    excluded: Array = of.take(of.xp.broadcast(bias, (*places.shape[:-1], bias.shape[-1])), places) == -math.inf
    return excluded


def weights_of(of: Functions, x: Array, out: Array | None, rule: Rule) -> Array:
    """The weights of chosen experts, (..., k).

    Args:
        of: Functions of the library.
        x: Their logits, (..., k); for the softmax of all logits, their probabilities.
        out: True for those without a weight, (..., k); None where all are finite and have one.
        rule: How they are weighted.
    """
    xp = of.xp

    def of_chosen(t: Array, other: float = 0.0) -> Array:
        return t if out is None else xp.where(out, other, t)

    x = of_chosen(x)
    if rule.is_of_chosen() and out is None and of.softmax is not None:
        scores = of.softmax(x)
    else:
        if rule.is_of_chosen():
            scores = xp.exp(x - of.constant(shift(xp, xp.max(of_chosen(x, -math.inf), -1))))
        elif rule.score is Score.SOFTMAX:
            scores = x
        else:
            scores = score_of(of, x, rule)
        scores = of_chosen(scores)
        if rule.renormalize:
            total = xp.sum(scores, -1)
            # Scores of both signs may add up to 0; divided by infinity, they and their derivatives are 0.
            scores = scores / xp.where(total == 0, math.inf, total)
    return of_chosen(scores if rule.scale == 1 else scores * rule.scale)


def score_of(of: Functions, x: Array, rule: Rule) -> Array:
    """The score of each logit, for a score that depends on no other logit; x is not -inf."""
    if rule.score is Score.IDENTITY:
        return x
    xp, t = of.xp, of.xp.exp(of.xp.where(x >= 0, -x, x))
    if rule.score is Score.SIGMOID:
        return xp.where(x >= 0, 1.0, t) / (1.0 + t)
    softplus, low = xp.where(x >= 0, x, 0.0) + of.log1p(t), x < LOWEST
    # The derivative of the square root is infinite where softplus underflows to 0.
    return xp.where(low, xp.exp(xp.where(low, x, 0.0) * 0.5), of.sqrt(xp.where(low, 1.0, softplus)))


def terms_of(of: Functions, x: Array) -> tuple[Array, Array, Array]:
    """The terms exp(x - m) of logits (..., experts), their sum (..., 1), and the logsumexp, -inf if all are -inf.

    The least sum is 1, but 0 if all are -inf: then 1 takes its place, as a divisor.
    """
    xp = of.xp
    m = of.constant(shift(xp, xp.max(x, -1)))
    terms = xp.exp(x - m)
    total = xp.sum(terms, -1)
    divisor = xp.where(total == 0, total + 1.0, total)
    lse = m + xp.log(divisor)
    # Both cases have a derivative, so that an infinite one, as that of lse^2, gives NaN for lse = -inf as in logsumexp.
    return terms, divisor, xp.where(total == 0, lse - math.inf, lse)


def probabilities(of: Functions, x: Array, rule: Rule) -> Array:
    """The probability of each expert, (..., experts), of logits x of this shape."""
    if rule.score is Score.SOFTMAX:
        return softmax(of, x)
    xp, out = of.xp, x == -math.inf
    x = xp.where(out, 0.0, x)
    scores = xp.where(out, 0.0, score_of(of, x, rule))
    return scores if rule.score is Score.IDENTITY else scores / _divisor(xp, xp.sum(scores, -1))


def softmax(of: Functions, x: Array) -> Array:
    """The softmax of logits x."""
    return _quotient(of.xp, x, *terms_of(of, x)[:2])


def _quotient(xp: Any, x: Array, terms: Array, total: Array) -> Array:
    """The softmax of logits x by their terms, 0 for -inf in a row with NaN too."""
    return xp.where(x == -math.inf, 0.0, terms / total)


def _divisor(xp: Any, total: Array) -> Array:
    """A sum to divide by: numbers of which none is positive are divided by 1."""
    return xp.where(total == 0, 1.0, total)
