"""The declaration of token log-probabilities, the logarithms of the probability of one column of every row."""

from __future__ import annotations

from ...core.declaration import ALL_OPTIONS, INEXACT_STATISTICS, STATE, SUMS, TARGET, Operand, Operation, Output, X
from . import formulas

FORWARD = Operation(
    "token_logprobs", (X, TARGET), SUMS,
    (Output("y", "row", "accumulator", exact=False), *INEXACT_STATISTICS),
    ALL_OPTIONS, formulas.FORWARD, gradient_name="token_logprobs_backward", saved=("x", "target", "m", "l", "entropy"),
)  # fmt: skip

# dy, dlse and dentropy are the gradients of the logarithm, of lse and of the entropy of every row.
BACKWARD = Operation(
    "token_logprobs_backward",
    (
        X, TARGET, Operand("dy", "row"), *STATE, Operand("dlse", "row", optional=True),
        Operand("entropy", "row", optional=True), Operand("dentropy", "row", optional=True),
    ),
    (), (Output("y", "element", needs=()),), ALL_OPTIONS, formulas.BACKWARD,
)  # fmt: skip
