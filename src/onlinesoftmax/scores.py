"""What is fused at load in JAX: which arrays a score is made of, without the arrays.

Score = softcap · tanh(scale · x / softcap) + bias, and -inf where the mask is False.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .arrays import Array


class Scores(NamedTuple):
    """What a score is made of, beside the logit, and in which order the arrays for it come.

    Attributes:
        scale: A number; "array" where it is the first array.
        softcap: A positive number, or None.
        bias, mask: Whether there is such an array.
    """

    scale: float | str = 1.0
    softcap: float | None = None
    bias: bool = False
    mask: bool = False

    @property
    def arrays(self) -> int:
        """How many arrays are read beside the logits."""
        return (self.scale == "array") + self.bias + self.mask

    @property
    def linear(self) -> bool:
        """Whether a score is its logit times a number, or masked."""
        return self.softcap is None and not self.bias and self.scale != "array"

    def named(self, arrays: tuple[Array, ...]) -> tuple[Any, Array | None, Array | None]:
        """(scale, bias, mask) of arrays in their order."""
        rest = list(arrays)
        scale = rest.pop(0) if self.scale == "array" else self.scale
        bias = rest.pop(0) if self.bias else None
        return scale, bias, rest.pop(0) if self.mask else None


PLAIN = Scores()
"""Scores that are the logits themselves."""


def accumulator(x: Array) -> str:
    """The dtype that an operation on x is computed in."""
    return "float64" if x.dtype.name == "float64" else "float32"
