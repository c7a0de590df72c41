"""The rules for the arguments of sampling that all array libraries share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ..core.arrays import Array
from ..core.options import LARGEST_FLOAT32, is_number
from .masses import MOST_TOKENS

LARGEST_INT64 = 2**63 - 1

OfRows = Callable[[str, Any, str, float, float], Array]
"""of_rows(argument, value, dtype, low, high) returns a number from low to high, or an array, as an array of all rows.

An error for any other value names the argument.  The values of an array are not read.
"""


class Parameters(NamedTuple):
    """Parameters of rows, contiguous (rows,) arrays; None for a filter that is not given.

    Attributes:
        temperature: Divisor of the scores, float32, so that its product with the noise is exact in float64; 0 for the
            token with the largest score.
        top_k: Number of tokens to keep, int64; all where it is not positive.
        top_p: Probability to keep, float64; all from 1 on.
        min_p: Smallest probability to keep, as a part of the largest, float64.
        first: True to keep, of the tokens that are equal at a threshold, those with the lowest ids; False for all.
    """

    temperature: Array
    top_k: Array | None
    top_p: Array | None
    min_p: Array | None
    first: bool

    @property
    def filters(self) -> bool:
        """True where a filter is given."""
        return not (self.top_k is None and self.top_p is None and self.min_p is None)

    def tensors(self) -> dict[str, Array | None]:
        """The parameters by name."""
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}

    def map(self, function: Callable[[Array], Array]) -> Parameters:
        """The parameters that a function makes of each of them."""
        k, p, least = (None if t is None else function(t) for t in (self.top_k, self.top_p, self.min_p))
        return Parameters(function(self.temperature), k, p, least, self.first)


def checked_choice(caller: str, argument: str, value: Any, choices: tuple[str, ...]) -> str:
    """One of these words."""
    if value not in choices:
        raise ValueError(f"{caller}: {argument} must be {' or '.join(map(repr, choices))}, got {value!r}")
    return str(value)


def checked_parameters(
    caller: str, tokens: int, of_rows: OfRows, temperature: Any, filters: tuple[Any, Any, Any], ties: Any
) -> Parameters:
    """Temperature and filters of the rows.  A number that filters nothing is no filter.

    Args:
        caller: Name of the public function, for errors.
        tokens: Number of tokens of a row.
        of_rows: Checks a parameter.
        temperature, ties: The arguments.
        filters: The arguments top_k, top_p and min_p.
    """
    top_k, top_p, min_p = filters
    if tokens > MOST_TOKENS:
        raise ValueError(f"{caller}: rows have {tokens} tokens, and may have {MOST_TOKENS}")
    # A float32 number makes the products with the noise exact.
    divisor = of_rows("temperature", temperature, "float32", 0.0, LARGEST_FLOAT32)
    k = None if top_k is None else of_rows("top_k", top_k, "int64", -1, LARGEST_INT64)
    p = None if top_p is None else of_rows("top_p", top_p, "float64", 0.0, math.inf)
    least = None if min_p is None else of_rows("min_p", min_p, "float64", 0.0, 1.0)
    if is_number(top_k) and not 0 < top_k < tokens:
        k = None
    if is_number(top_p) and top_p >= 1:
        p = None
    if is_number(min_p) and not min_p:
        least = None
    return Parameters(divisor, k, p, least, checked_choice(caller, "ties", ties, ("keep", "first")) == "first")
