"""What is fused at load: the score that softmax is taken of, made from a logit while it is read.

    score = softcap · tanh(scale · x / softcap) + bias,  and -inf where the mask is False or causality forbids it

Whoever leaves all of it out pays nothing: the functions then pass None.
"""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple


class Fused(NamedTuple):
    """What a score is made of, checked as far as that needs no framework.

    Attributes:
        scale: A number, or a tensor with one element.
        softcap: A positive number, or None.
        bias, mask: Tensors that broadcast to the input's shape, or None.
        causal: Whether a query sees no key past its own position, the last query seeing all.
        zero: Whether a row in which everything is masked is zeros; it is NaN otherwise.
    """

    scale: Any = 1.0
    softcap: float | None = None
    bias: Any = None
    mask: Any = None
    causal: bool = False
    zero: bool = False

    @property
    def plain(self) -> bool:
        """Whether nothing is asked for; no tensor is looked into."""
        scale, softcap, bias, mask, causal, zero = self
        given = softcap is not None or bias is not None or mask is not None or causal or zero
        return not given and isinstance(scale, float) and scale == 1


def make_fused(
    operation: str, scale: Any, softcap: Any, bias: Any, mask: Any, causal: Any, fully_masked: Any
) -> Fused | None:  # fmt: skip
    """The arguments as a Fused; None where they are all at their defaults.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: softcap is not positive and finite, or fully_masked is no known word.
    """
    nothing = mask is None and bias is None and softcap is None and causal is False and fully_masked == "nan"
    # First what most calls are: every microsecond shows.
    if nothing and scale.__class__ is float and scale == 1.0:
        return None
    is_number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if not is_number and not hasattr(scale, "dtype"):
        raise TypeError(f"{operation}(): scale must be a number or a 0-d tensor, not {type(scale).__name__}")
    check_softcap(f"{operation}()", softcap)
    for name, value in (("bias", bias), ("mask", mask)):
        if value is not None and not hasattr(value, "dtype"):
            raise TypeError(f"{operation}(): {name} must be a tensor or None, not {type(value).__name__}")
    if not isinstance(causal, bool):
        raise TypeError(f"{operation}(): causal must be a bool, not {type(causal).__name__}")
    if fully_masked not in ("nan", "zero"):
        raise ValueError(f"{operation}(): fully_masked must be 'nan' or 'zero', got {fully_masked!r}")
    return Fused(
        float(scale) if is_number else scale, None if softcap is None else float(softcap),
        bias, mask, causal, fully_masked == "zero",
    )  # fmt: skip


def check_softcap(caller: str, softcap: Any) -> None:
    """Raise, in the caller's name, where a softcap is neither None nor a positive number."""
    if softcap is None:
        return
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)):
        raise TypeError(f"{caller}: softcap must be a number or None, not {type(softcap).__name__}")
    if not 0 < softcap < math.inf:
        raise ValueError(f"{caller}: softcap must be positive and finite, got {softcap}")


def query_axis(operation: str, axis: int, ndim: int) -> int:
    """The dimension of the queries that a causal mask compares with: the one before the softmax dimension.

    Raises:
        ValueError: there is none.
    """
    if axis == 0:
        raise ValueError(
            f"{operation}(): causal needs a dimension of queries before dim, and dim is the first of {ndim}"
        )
    return axis - 1


def bits(value: float) -> int:
    """The bits of a float64 as an integer that takes 64 bits.

    A smaller one would be passed to a kernel as 32 bits, so 0 is -0, and so is what would be under 1e-310.

    >>> hex(bits(1.0)), bits(0.0) == bits(-0.0)
    ('0x3ff0000000000000', True)
    """
    number: int = struct.unpack("q", struct.pack("d", value))[0]
    return number if abs(number) >= 1 << 40 else -(1 << 63)
