"""The operations, each with a room: its declaration, its array formulas, and its arguments where it has some.

A small operation is one file.  A large one is a folder: `declare` (the declaration of the operation and of its
gradient), `formulas` (for every array library), `arguments` (the rules that NumPy and PyTorch share).
"""

from __future__ import annotations

from ..core.operations import Operation
from . import log_softmax, logsumexp, softmax
from .cross_entropy import declare as cross_entropy
from .token_logprobs import declare as token_logprobs

OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        softmax.FORWARD, log_softmax.FORWARD, logsumexp.FORWARD,
        softmax.BACKWARD, log_softmax.BACKWARD, logsumexp.BACKWARD,
        cross_entropy.FORWARD, cross_entropy.BACKWARD,
        token_logprobs.FORWARD, token_logprobs.BACKWARD,
    )
}  # fmt: skip
"""Every operation by name.  The order is that of the parameters of the CUDA kernels."""

FORWARD: tuple[str, ...] = tuple(name for name, operation in OPERATIONS.items() if not operation.backward)
"""Names of the public functions."""
