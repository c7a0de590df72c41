"""Token log-probabilities: the logarithm of the probability of one column of every row, for any array library `xp`.

    logprob = z[target] - lse

z is the score, `x` in the code.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core import formulas
from ..core.arrays import Array
from ..core.declaration import ALL_OPTIONS, INEXACT_STATISTICS, STATE, SUMS, TARGET, Operand, Operation, Output, X
from ..core.formulas import STATISTICS, Formula, is_column, is_defined, probabilities
from ..core.state import shift


def log_probability(xp: Any, m: Array, l: Array, z_target: Array, **row: Array) -> Array:
    """Logarithm of the probability of the target; NaN where the target is no column, and where softmax is NaN."""
    return xp.where(is_column(row) & is_defined(xp, l), (z_target - shift(xp, m)) - xp.log(l), np.nan)


def gradient_terms(xp: Any, x: Array, dy: Array, m: Array, l: Array, **row: Array) -> tuple[Array, Array]:
    """The two terms whose difference is the gradient of logprob, lse and entropy with respect to the scores."""
    p = probabilities(xp, x, m, l)
    own = xp.where(is_column(row), dy, 0.0)
    factor = own - row.get("dlse", 0.0)
    if "dentropy" in row:
        factor = factor + row["dentropy"] * (xp.where(p == 0, 0.0, x - shift(xp, m) - xp.log(l)) + row["entropy"])
    return (row["columns"] == row["target"]) * own, p * factor


def gradient(xp: Any, **values: Array) -> Array:
    """Gradient of logprob, lse and entropy with respect to the scores."""
    minuend, subtrahend = gradient_terms(xp, **values)
    return minuend - subtrahend


FORWARD = Operation(
    "token_logprobs", (X, TARGET), SUMS,
    (Output("y", "row", "accumulator", exact=False), *INEXACT_STATISTICS),
    ALL_OPTIONS, Formula(formulas.SUMS, {"y": log_probability, **STATISTICS}),
    gradient_name="token_logprobs_backward", saved=("x", "target", "m", "l", "entropy"),
)  # fmt: skip

# dy, dlse and dentropy are the gradients of the logarithm, of lse and of the entropy of every row.
BACKWARD = Operation(
    "token_logprobs_backward",
    (
        X, TARGET, Operand("dy", "row"), *STATE, Operand("dlse", "row", optional=True),
        Operand("entropy", "row", optional=True), Operand("dentropy", "row", optional=True),
    ),
    (), (Output("y", "element", needs=()),), ALL_OPTIONS, Formula({}, {"y": gradient}, gradient_terms),
)  # fmt: skip
