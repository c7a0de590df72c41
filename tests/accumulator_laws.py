"""The laws of the accumulators that a state keeps beside l: the value of each, which no cut of the row may change.

A fourth accumulator joins with its entry here, and with its name in the algebras (laws.py) that have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
INF = math.inf


@dataclass(frozen=True)
class AccumulatorLaw:
    """The value of one accumulator.

    Attributes:
        empty: Value of an empty slice.
        all_minus_inf: Value of a slice of -inf alone.
        of_row: Value of a row, exactly.
        tolerance: Error that the value may have in a row, if l has a relative error of `slack`.
        is_defined: True for the rows that have a value.
    """

    empty: float
    all_minus_inf: float
    of_row: Callable[[Float64], float]
    tolerance: Callable[[Float64, float], float]
    is_defined: Callable[[Float64], bool] = lambda row: True


def has_softmax(row: Float64) -> bool:
    """True where the logsumexp is finite."""
    return row.size > 0 and bool(np.isfinite(row.max()))


def all_finite(row: Float64) -> bool:
    return bool(np.isfinite(row).all())


def weighted_sum(row: Float64) -> float:
    terms = np.exp(row - row.max())
    return float(np.sum(np.where(terms > 0, row, 0) * terms))


def weighted_tolerance(row: Float64, slack: float) -> float:
    """A bound on the error of the terms x * exp(x - m), from that of l.

    |x| is at most |m| + t with t = m - x, and an element with t > 40 adds less than 2^-52 to either sum.
    """
    return float(2 * slack * np.sum(np.exp(row - row.max())) * (abs(row.max()) + 40))


ACCUMULATORS = {
    # The sum of x * exp(x - m).
    "weighted": AccumulatorLaw(0, 0, weighted_sum, weighted_tolerance, has_softmax),
    # The sum of x.
    "plain": AccumulatorLaw(0, -INF, math.fsum, lambda row, slack: float(slack * np.sum(np.abs(row))), all_finite),
    # The index of the largest element: the first NaN, else the first of equals.
    "largest": AccumulatorLaw(-1, 0, lambda row: int(np.argmax(row)) if row.size else -1, lambda row, slack: 0),
}
