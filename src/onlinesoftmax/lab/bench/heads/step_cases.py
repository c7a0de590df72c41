"""A case of a training step."""

from __future__ import annotations

from dataclasses import dataclass

from ...names import check_names
from .cases import LOSS, HeadCase

TRAINING, POLICY = LOSS, "linear_token_loss"
"""Functions that a step ends with: the loss of pre-training and fine-tuning, and the objective of PPO and GRPO."""

LENGTH = 2048
"""Tokens of a sequence; a smaller batch is one shorter sequence."""


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
