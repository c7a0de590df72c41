"""The choice of experts: the same for NumPy, PyTorch, JAX and the kernels, to the last bit of a score.

Experts are ordered by a key: the larger key first, NaN before all, and of equal keys (0 equals -0) the lower expert.

Without a bias, the key is the logit, since every score rises with the logit.  With a bias, it is score + bias, rounded
to float32; it is -inf where the logit is -inf.  With `order="topk_first"`, the score is the logit.

With groups, the score of a group is the sum of the `group_top` largest keys of its experts, added one by one by falling
size; keys of -inf are left out, and if all are -inf, so is the sum.  Without a bias, and for a sum of more than one,
the scores take the place of the keys in this sum.  The `group_k` groups with the largest sums are kept, in the order of
keys.  Only their experts can be chosen, those with a key of -inf too.

Float32 scores are computed by these operations, each rounded by itself (no fused multiply-add), for float16, bfloat16
and float32 logits x, which float32 holds exactly:

    power(y) = 2^y: y is bounded to [-125, 125]; n is y rounded to a whole number (of two, the even one); f = y - n; the
        polynomial POWER_OF_TWO in f, by Horner's rule; times 2^n, which is exact.
    softmax: m is the largest logit that is not NaN.  e = power((x - m) * LOG2_E), where x - m is 0 if x = m.  Without a
        bias, the score is e.  With one, it is e / L: L is the sum of round(e * 2^40) over the experts that are not NaN,
        which is exact in int64 and in float64, rounded to float32, times 2^-40.
    sigmoid: 1 / (1 + power(-x * LOG2_E)).
    sqrtsoftplus: t = power(-|x| * LOG2_E); u = t / (2 + t); v = u * u; the square root, rounded
        correctly, of max(x, 0) + 2 * u * (the polynomial HALF_LOG in v, by Horner's rule).
    identity: x.

A NaN passes through each operation, also through a bound.  Float64 logits take the exp and the log1p of the library in
float64, so libraries may differ where two scores do in their last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ..core.arrays import Array
from .rules import Rule, Score

LOG2_E = 1.4426950216293335
"""log2(e) in float32."""

LARGEST_POWER = 125.0
"""Bound of an exponent: no step of a score has a subnormal number, which some devices round to 0."""

MASS_BITS = 40
"""Fraction bits of the powers that are added for softmax."""

POWER_OF_TWO = (
    1.0, 0.6931471824645996, 0.24022646248340607, 0.05550328642129898, 0.009618489071726799, 0.0013399930903688073,
    0.0001534581242594868,
)  # fmt: skip
"""Coefficients of a polynomial for 2^f, f from -1/2 to 1/2; its relative error in float32 is 1e-7."""

HALF_LOG = (1.0, 0.3333315849304199, 0.20012454688549042, 0.13980303704738617, 0.14089162647724152)
"""Coefficients of a polynomial in v = u^2 for log((1 + u) / (1 - u)) / (2 u), u from 0 to 1/3.

Its relative error in float32 is 1e-7.
"""


class Functions(NamedTuple):
    """The functions that the choice needs of an array library; the last axis of an array are the experts.

    Attributes:
        xp: The functions of the library (core/arrays.py).
        exact: Converts float32 numbers to the dtype of the arithmetic: float32, or float64 where a compiler would join
            the operations of float32 numbers.
        rounded: Rounds the result of one operation to float32, in the dtype of the arithmetic.
        double: Converts to float64.
        single: Rounds to float32.
        bounded: bounded(array, low, high): numbers below low become low, those above high high, and NaN stays.
        power_of_two: 2^n for whole float32 numbers n from -125 to 125; any number for NaN.
        sqrt, log1p: Functions of a float64 array.
        largest: largest(keys, k): places of the k largest keys, in the order of keys.
        sorted: Sorts integers by rising size.
        take: take(array, places) along the last axis.
        number: A float32 number as an operand beside an array.
    """

    xp: Any
    exact: Callable[[Array], Array]
    rounded: Callable[[Array], Array]
    double: Callable[[Array], Array]
    single: Callable[[Array], Array]
    bounded: Callable[[Array, float, float], Array]
    power_of_two: Callable[[Array], Array]
    sqrt: Callable[[Array], Array]
    log1p: Callable[[Array], Array]
    largest: Callable[[Array, int], Array]
    sorted: Callable[[Array], Array]
    take: Callable[[Array, Array], Array]
    number: Callable[[float], Any] = float


def chosen(of: Functions, x: Array, bias: Array | None, rule: Rule, wide: bool, finite: bool = False) -> Array:
    """The experts of each token, (..., k) integers, in the order of their keys.

    Args:
        of: Functions of the library.
        x: Logits (..., experts), float32 or float64.
        bias: Bias with the dtype of x, in a shape that broadcasts to x; None for none.
        rule: How experts are chosen.
        wide: True for float64 logits.
        finite: True where the caller knows that all logits and biases are finite.
    """
    if wide:
        of = of._replace(exact=_same, rounded=_same, double=_same, single=_same)
    keys = values = x
    if bias is not None or rule.group_top > 1:
        scores = _scores(of, of.exact(x), rule, bias is not None, wide, finite)
        if bias is not None:
            scores = of.exact(scores) + of.exact(bias)
        values = of.single(scores) if finite else of.xp.where(x == -math.inf, -math.inf, of.single(scores))
        keys = x if bias is None else values
    if rule.groups == 1:
        return of.largest(keys, rule.k)
    size, rows = rule.experts // rule.groups, tuple(x.shape[:-1])
    in_groups = values.reshape((*rows, rule.groups, size))
    kept = of.sorted(of.largest(_group_scores(of, in_groups, rule.group_top, finite), rule.group_k))
    experts = (kept[..., None] * size + of.xp.arange(in_groups, -1)).reshape((*rows, rule.group_k * size))
    return of.take(experts, of.largest(of.take(keys, experts), rule.k))


def _same(t: Array) -> Array:
    return t


def _group_scores(of: Functions, values: Array, top: int, finite: bool) -> Array:
    """The score of each group, (..., groups), of the values (..., groups, experts of a group)."""
    best = of.take(values, of.largest(values, top))
    total = best[..., 0]
    for i in range(1, top):
        added = best[..., i]
        total = total + (added if finite else of.xp.where(added == -math.inf, 0.0, added))
    return total


def _scores(of: Functions, x: Array, rule: Rule, normalized: bool, wide: bool, finite: bool) -> Array:
    """The scores that decide; those of softmax are divided by their sum only where this is asked for."""
    if rule.selection() is Score.IDENTITY:
        return x
    if rule.selection() is Score.SOFTMAX:
        return _softmax(of, x, normalized, wide, finite)
    return (_sigmoid if rule.selection() is Score.SIGMOID else _sqrtsoftplus)(of, x, wide)


def _softmax(of: Functions, x: Array, normalized: bool, wide: bool, finite: bool) -> Array:
    xp = of.xp
    if finite:
        difference = of.rounded(x - xp.max(x, -1))
    else:
        m = xp.max(xp.where(x != x, -math.inf, x), -1)
        # The difference of two infinite logits would be NaN.
        difference = xp.where(x == m, 0.0, of.rounded(x - m))
    e = _exp(of, difference, wide)
    if not normalized:
        return e
    numbers = e if finite else xp.where(e == e, e, 0.0)
    if wide:
        return e / xp.sum(numbers, -1)
    masses = xp.sum((of.double(numbers) * 2.0**MASS_BITS).round(), -1)
    return of.rounded(e / of.exact(of.single(masses * 2.0**-MASS_BITS)))


def _sigmoid(of: Functions, x: Array, wide: bool) -> Array:
    one = of.number(1.0)
    return of.rounded(one / of.rounded(one + _exp(of, -x, wide)))


def _sqrtsoftplus(of: Functions, x: Array, wide: bool) -> Array:
    t, positive = _exp(of, -abs(x), wide), of.xp.where(x < 0, 0.0, x)
    if wide:
        return of.sqrt(positive + of.log1p(t))
    u = of.rounded(t / of.rounded(2.0 + t))
    log = of.rounded(2.0 * u * _polynomial(of, HALF_LOG, of.rounded(u * u)))
    # PyTorch's square root of float32 numbers is not rounded correctly on a CPU; that of float64 is close enough.
    return of.single(of.sqrt(of.double(of.rounded(positive + log))))


def _exp(of: Functions, x: Array, wide: bool) -> Array:
    if wide:
        return of.xp.exp(x)
    y = of.rounded(x * of.number(LOG2_E))
    y = of.bounded(y, -LARGEST_POWER, LARGEST_POWER)
    n = y.round()
    return _polynomial(of, POWER_OF_TWO, y - n) * of.power_of_two(n)


def _polynomial(of: Functions, coefficients: tuple[float, ...], x: Array) -> Array:
    total: Any = of.number(coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total = of.rounded(of.rounded(total * x) + of.number(coefficient))
    return total
