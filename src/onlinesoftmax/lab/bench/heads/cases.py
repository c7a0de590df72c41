"""A case of a function with a head, and of a training step that ends with one."""

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

TRAINING, POLICY = LOSS, "linear_token_loss"
"""Functions that a step ends with: the loss of pre-training and fine-tuning, and the objective of PPO and GRPO."""

LENGTH = 2048
"""Tokens of a sequence; a smaller batch is one shorter sequence."""


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

    @property
    def needed_bytes(self) -> int:
        """Bytes of the float64 weight and gradient of the input, the logits and their float32 copies, the gradients."""
        tokens, hidden, classes = self.shape
        return 16 * classes * (hidden + tokens) + 4 * self.bytes


@dataclass(frozen=True)
class StepCase(HeadCase):
    """A step of a decoder: forward, backward and optimizer; its shape is (tokens, hidden, classes).

    Attributes:
        layers: Number of layers.

    Example:
        >>> case = StepCase("linear_cross_entropy", (8192, 4096, 128256), 2, "bfloat16", (), True, layers=8)
        >>> str(case), f"{case.parameters:.2e}"
        ('8192x4096 -> 128256, 8 layers', '2.66e+09')
    """

    layers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("function of a training step", [self.operation], [TRAINING, POLICY])
        if self.rows > LENGTH and self.rows % LENGTH:
            raise ValueError(f"a step needs a multiple of {LENGTH} tokens, or fewer, got {self.rows}")

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.layers} layers"

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return min(LENGTH, self.rows)

    @property
    def parameters(self) -> int:
        """Number of weights: those of the embedding, of the layers' products, and of the head."""
        _, hidden, classes = self.shape
        return 2 * classes * hidden + 12 * self.layers * hidden * hidden

    @property
    def needed_bytes(self) -> int:
        """Bytes of each weight, its gradient and both optimizer states; a way that needs more fails by itself."""
        return 4 * ITEMSIZE[self.dtype] * self.parameters
