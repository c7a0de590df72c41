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
    def names(self) -> tuple[str, ...]:
        """Names of the arrays that are read beside the logits, in their order."""
        given = (("scale", self.scale == "array"), ("bias", self.bias), ("mask", self.mask))
        return tuple(name for name, is_there in given if is_there)

    @property
    def arrays(self) -> int:
        """How many they are."""
        return len(self.names)

    @property
    def linear(self) -> bool:
        """Whether a score is its logit times a number, or masked."""
        return self.softcap is None and not self.bias and self.scale != "array"

    def named(self, arrays: tuple[Array, ...]) -> tuple[Any, Array | None, Array | None]:
        """(scale, bias, mask) of arrays in their order."""
        found = dict(zip(self.names, arrays, strict=True))
        return found.get("scale", self.scale), found.get("bias"), found.get("mask")


PLAIN = Scores()
"""Scores that are the logits themselves."""


def accumulator(x: Array) -> str:
    """The dtype that an operation on x is computed in."""
    return "float64" if x.dtype.name == "float64" else "float32"
