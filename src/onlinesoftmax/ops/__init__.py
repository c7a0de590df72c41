"""The operations, each with a room: its declaration, its array formulas, and its arguments where it has some.

A small operation is one file.  A large one is a folder: `declare` (the declaration of the operation and of its
gradient), `formulas` (for every array library), `arguments` (the rules that NumPy and PyTorch share).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..core.declaration import Operation
from . import log_softmax, logsumexp, softmax, token_logprobs
from .cross_entropy import declare as cross_entropy

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

CROSS_ENTROPY, TOKEN_LOGPROBS = cross_entropy.FORWARD, token_logprobs.FORWARD
"""The operations with a target."""

FORWARD: tuple[str, ...] = tuple(name for name, operation in OPERATIONS.items() if not operation.backward)
"""Names of the public functions."""


@contextmanager
def also_declared(*operations: Operation) -> Iterator[None]:
    """Declare more operations inside a block, as a test of an operation and its kernels does.

    Modules that were imported before do not know them: they have no custom operators, their operands no place in the
    parameters of CUDA and Triton kernels.

    Raises:
        ValueError: an operation of this name is declared already.
    """
    more = {operation.name: operation for operation in operations}
    if known := OPERATIONS.keys() & more:
        raise ValueError(f"declared already: {', '.join(sorted(known))}")
    OPERATIONS.update(more)
    try:
        yield
    finally:
        for name in more:
            del OPERATIONS[name]
