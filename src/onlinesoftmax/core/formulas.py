"""The array formulas that operations share: the sums and the statistics of a row, and its target column.

A formula stands once for NumPy, torch, JAX and long double: the functions of the array library are passed as `xp`
(`namespace` in core/arrays.py).  The rooms in `ops` have the formulas that belong to one operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .arrays import Array
from .state import shift

Part = Callable[..., Array]
"""A part of a formula, called as part(xp, **values).

`values` are arrays that broadcast to one another, by name: every operand; "m", the maximum of each row; every sum;
"columns", the number of each column; and the results of `picked`.  A per-row array has size 1 along the softmax
dimension.  Where whole rows are given, "axis" is this dimension, and "cols" the number of columns.  The input "x" is
the score where the operation takes score options, not the logit.
"""


@dataclass(frozen=True)
class Formula:
    """The formula of one operation, in two phases: the sums over each row, then the outputs.

    Attributes:
        sums: The number that each accumulator sums over a row, by the name of the accumulator.
        outputs: Every output, by name.
        terms: The two numbers whose difference is the main output; None where the main output is no difference.  A
            difference is no more exact than its two terms, so a tolerance must allow for their rounding errors.
    """

    sums: Mapping[str, Part]
    outputs: Mapping[str, Part]
    terms: Callable[..., tuple[Array, Array]] | None = None


def exponential(xp: Any, x: Array, m: Array, **_: Array) -> Array:
    """Term of the exponent sum: exp(x - m)."""
    return xp.exp(x - shift(xp, m))


def weighted_score(xp: Any, x: Array, m: Array, **_: Array) -> Array:
    """Term of the sum of the scores: x * exp(x - m)."""
    e = exponential(xp, x, m)
    # A score of -inf has no weight; its product with 0 would be NaN.
    return xp.where(e == 0, 0.0, x) * e


def logsumexp(xp: Any, m: Array, l: Array, **_: Array) -> Array:
    """Logsumexp of each row: m + log(l)."""
    return shift(xp, m) + xp.log(l)


def entropy(xp: Any, m: Array, l: Array, zl: Array, **_: Array) -> Array:
    """Entropy of the softmax of each row."""
    # The arithmetic gives NaN where l is 0 or the maximum is infinite.
    return logsumexp(xp, m, l) - zl / l


SUMS: dict[str, Part] = {"l": exponential, "zl": weighted_score}
"""The sums that every forward operation may need."""

STATISTICS: dict[str, Part] = {
    "lse": logsumexp,
    "m": lambda xp, m, **_: shift(xp, m),
    "l": lambda xp, l, **_: l,
    "entropy": entropy,
}
"""The statistics that every forward operation may write."""


def is_defined(xp: Any, l: Array) -> Array:
    """True for the rows that have a softmax.

    l is 0 if all scores are -inf, infinite if one score is +inf, and NaN if one score is NaN.
    """
    return (l > 0) & ~xp.isinf(l)


def probabilities(xp: Any, x: Array, m: Array, l: Array) -> Array:
    """Softmax of the scores; NaN in the rows that have none (`is_defined`)."""
    return xp.where(is_defined(xp, l), xp.exp(x - shift(xp, m)) / l, np.nan)


def picked(xp: Any, values: Mapping[str, Array], columns: Array, total: Callable[[Array], Array]) -> dict[str, Array]:
    """Score and weight of the target column of each row, "z_target" and "w_target"; an empty dict without a target.

    Both are 0 where the target is no column.

    Args:
        xp: Functions of the array library.
        values: The operands by name.
        columns: The index of each column, in a shape that broadcasts to x.
        total: The sum along the softmax dimension, which stays with size 1.
    """
    if "target" not in values:
        return {}
    hit = columns == values["target"]
    found = {"z_target": total(xp.where(hit, values["x"], 0.0))}
    if "weight" in values:
        found["w_target"] = total(xp.where(hit, values["weight"], 0.0))
    return found


def is_column(row: Mapping[str, Array]) -> Array:
    """True for the rows whose target is a column."""
    return (row["target"] >= 0) & (row["target"] < row["cols"])
