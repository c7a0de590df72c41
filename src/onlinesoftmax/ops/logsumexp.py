"""Logsumexp, m + log(l), and its gradient."""

from __future__ import annotations

from ..core import formulas
from ..core.declaration import ALL_OPTIONS, STATISTICS, SUMS, Operand, Operation, Output, X
from ..core.formulas import Formula

FORWARD = Operation(
    "logsumexp", (X,), SUMS, (Output("y", "row"), *STATISTICS), ALL_OPTIONS,
    Formula(formulas.SUMS, {"y": formulas.logsumexp, **formulas.STATISTICS}),
    gradient_name="logsumexp_backward", saved=("x", "lse"),
)  # fmt: skip

BACKWARD = Operation(
    "logsumexp_backward", (X, Operand("dy", "row"), Operand("lse", "row")), (), (Output("y", "element", needs=()),),
    ALL_OPTIONS, Formula({}, {"y": lambda xp, x, dy, lse, **_: dy * xp.exp(x - lse)}),
)  # fmt: skip
