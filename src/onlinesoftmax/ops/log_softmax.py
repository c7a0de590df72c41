"""Log-softmax, z - m - log(l), and its gradient.

The operand x of the gradient is the saved output, and dy is its gradient.  The scale, the softcap and the masks change
the gradient that is written.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core import formulas
from ..core.arrays import Array
from ..core.declaration import ALL_OPTIONS, DY, GRADIENT_OPTIONS, PRODUCT_SUM, STATISTICS, SUMS, Operation, Output, X
from ..core.formulas import Formula


def _log_softmax(xp: Any, x: Array, m: Array, l: Array, **_: Array) -> Array:
    return xp.where(xp.isinf(m), np.nan, x - m - xp.log(l))


FORWARD = Operation(
    "log_softmax", (X,), SUMS, (Output("y", "element"), *STATISTICS), ALL_OPTIONS,
    Formula(formulas.SUMS, {"y": _log_softmax, **formulas.STATISTICS}),
    gradient_name="log_softmax_backward", saved=("y",),
)  # fmt: skip

BACKWARD = Operation(
    "log_softmax_backward", (X, DY), (PRODUCT_SUM,), (Output("y", "element", needs=("dot",)),), GRADIENT_OPTIONS,
    Formula(
        {"dot": lambda xp, dy, **_: dy},
        {"y": lambda xp, x, dy, dot, **_: dy - xp.exp(x) * dot},
        lambda xp, x, dy, dot, **_: (dy, xp.exp(x) * dot),
    ),
    scores=False,
)  # fmt: skip
