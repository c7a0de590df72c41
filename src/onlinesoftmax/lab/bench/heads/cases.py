"""A case of a function with a head."""

from __future__ import annotations

from dataclasses import dataclass

from ....core.declaration import Operation
from ....core.task import ITEMSIZE
from ....linear.problem import FUNCTIONS, STATISTICS
from ....ops import OPERATIONS
from ...names import Shape, check_names
from ..cases import Case

LOSS, LOGPROBS = "linear_cross_entropy", "linear_token_logprobs"
"""Functions of a head that are measured."""


@dataclass(frozen=True)
class HeadCase(Case):
    """Forward and backward of a function with a head; its shape is (tokens, hidden, classes).

    Example:
        >>> case = HeadCase("linear_cross_entropy", (8192, 4096, 128256), 2, "bfloat16", with_gradient=True)
        >>> str(case), case.logits_bytes
        ('8192x4096 -> 128256', 2101346304)
    """

    differentiated = 2

    def __post_init__(self) -> None:
        check_names("function", [self.operation], FUNCTIONS)
        if len(self.shape) != 3 or self.dim != 2:
            raise ValueError(f"{self.operation} needs three sizes, tokens x hidden x classes, got {self.shape}")

    def __str__(self) -> str:
        tokens, hidden, classes = self.shape
        return f"{tokens}x{hidden} -> {classes}"

    @property
    def declaration(self) -> Operation:
        """The operation that reads the logits."""
        return OPERATIONS[FUNCTIONS[self.operation].loss or STATISTICS]

    @property
    def operands(self) -> int:
        """Input, weight and targets."""
        return 3

    @property
    def rows(self) -> int:
        """Number of tokens."""
        return self.shape[0]

    @property
    def row_shape(self) -> Shape:
        """Shape of a tensor with one value per token."""
        return self.shape[:1]

    @property
    def logits_bytes(self) -> int:
        """Bytes of all logits."""
        return self.shape[0] * self.shape[2] * ITEMSIZE[self.dtype]

    @property
    def read_bytes(self) -> int:
        """Bytes of input, weight and targets."""
        tokens, hidden, classes = self.shape
        return (tokens + classes) * hidden * ITEMSIZE[self.dtype] + 8 * tokens

    @property
    def write_bytes(self) -> int:
        """Bytes of the two gradients."""
        tokens, hidden, classes = self.shape
        return (tokens + classes) * hidden * ITEMSIZE[self.dtype]
