"""The score options, each declared once, and the one formula that makes a score from a logit.

    z = softcap * tanh(scale * x / softcap) + bias,  and -inf where the mask is False or causality forbids the key

Softmax is applied to the scores z.  Kernels compute the scores while they read the logits x, so the scores need no
pass of their own.  Each kernel language has its own version of the formula (`score` in `operands`).  The array
formula below serves NumPy, torch and JAX: the eager backend, XLA, the benchmark's reference and the verification.

To declare an option: CONTRIBUTING.md, "To add a score option".
"""

from __future__ import annotations

import math
import numbers
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from .arrays import Array, advice


@dataclass(frozen=True)
class ScoreOption:
    """One score option.

    Attributes:
        name: Name of the argument.
        kind: "call" for one number per call; "row" for one number per call or one per row; "element" for a tensor that
            broadcasts to the input; "flag" for True or False.
        dtype: "floating" or "boolean".
        tensor: True where the option may be a tensor.
    """

    name: str
    kind: Literal["call", "row", "element", "flag"]
    dtype: Literal["floating", "boolean"] = "floating"
    tensor: bool = False

    @property
    def number(self) -> bool:
        """True where the option may be one number for the call."""
        return self.kind in ("call", "row")


SCORE_OPTIONS: dict[str, ScoreOption] = {
    option.name: option
    for option in (
        ScoreOption("scale", "row", tensor=True),
        ScoreOption("softcap", "call"),
        ScoreOption("bias", "element", tensor=True),
        ScoreOption("mask", "element", "boolean", tensor=True),
        ScoreOption("causal", "flag", "boolean"),
    )
}
"""By name, in the order in which the formula applies them."""


class Placeholder(Enum):
    """Stands for an array in options without data."""

    ARRAY = "array"


ARRAY: Final = Placeholder.ARRAY
"""Marks an option whose array is passed separately: JAX passes the arrays of a compiled program as its operands."""


class ScoreOptions(NamedTuple):
    """The score options of one call, after the checks that need no framework.

    Attributes:
        scale: A number, or a tensor with one number per row, which broadcasts to the input's shape.
        softcap: A positive number, or None.
        bias, mask: Tensors that broadcast to the input's shape, or None.
        causal: True where a query sees no key past its own position; the last query sees every key.
        zero: True where a row whose scores are all -inf gives zeros; False where it gives NaN.
    """

    scale: Any = 1.0
    softcap: float | None = None
    bias: Any = None
    mask: Any = None
    causal: bool = False
    zero: bool = False

    # No property, which torch.compile of PyTorch 2.10 cannot trace.
    def is_plain(self) -> bool:
        """True where every option is at its default.  Does not read a tensor's values, so no GPU synchronization."""
        given = self.softcap is not None or self.bias is not None or self.mask is not None or self.causal or self.zero
        return not given and isinstance(self.scale, float) and self.scale == 1

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the options that are not at their default, in the order of SCORE_OPTIONS."""
        scaled = not isinstance(self.scale, float) or self.scale != 1
        present = (scaled, self.softcap is not None, self.bias is not None, self.mask is not None, self.causal)
        return tuple(name for name, is_given in zip(SCORE_OPTIONS, present, strict=True) if is_given)

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the options that are ARRAY, in the order of SCORE_OPTIONS."""
        return tuple(name for name in SCORE_OPTIONS if getattr(self, name) is ARRAY)

    def filled(self, arrays: Iterable[Array]) -> ScoreOptions:
        """The options with ARRAY replaced by these arrays, one for each name in `self.arrays`."""
        return self._replace(**dict(zip(self.arrays, arrays, strict=True)))

    def mapped(self, function: Callable[[str, Array], Array]) -> ScoreOptions:
        """The options with function(name, array) in the place of each array."""
        names = (option.name for option in SCORE_OPTIONS.values() if option.tensor)
        arrays = {name: t for name in names if hasattr(t := getattr(self, name), "dtype")}
        return self._replace(**{name: function(name, t) for name, t in arrays.items()})

    def of(self, names: tuple[str, ...]) -> ScoreOptions:
        """Only the options of these names; the others are at their defaults.  `zero` is kept."""
        return ScoreOptions(**{name: getattr(self, name) for name in names}, zero=self.zero)


PLAIN = ScoreOptions()
"""No score option: a score is its logit."""


def checked_options(
    operation: str, scale: Any, softcap: Any, bias: Any, mask: Any, causal: Any, fully_masked: Any
) -> ScoreOptions | None:
    """The arguments of a public function, checked; None where every one is at its default.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: scale is an integer that no float holds, softcap is not positive and finite, or fully_masked is
            neither "nan" nor "zero".
    """
    number = is_number(scale)
    # NumPy's True is no number, and equals the scale 1 in the key of a prepared call.
    if not number and (isinstance(scale, np.bool_) or not hasattr(scale, "dtype")):
        raise TypeError(f"{operation}(): scale must be a number or a tensor, not {type(scale).__name__}")
    check_softcap(f"{operation}()", softcap)
    for name, value in (("bias", bias), ("mask", mask)):
        if value is not None and not hasattr(value, "dtype"):
            raise TypeError(
                f"{operation}(): {name} must be a tensor or None, not {type(value).__name__}{advice(type(value))}"
            )
    if not isinstance(causal, bool):
        raise TypeError(f"{operation}(): causal must be a bool, not {type(causal).__name__}")
    if fully_masked not in ("nan", "zero"):
        raise ValueError(f"{operation}(): fully_masked must be 'nan' or 'zero', got {fully_masked!r}")
    factor = checked_scale(f"{operation}()", scale) if number else scale
    capped = None if softcap is None else float(softcap)
    options = ScoreOptions(factor, capped, bias, mask, causal, fully_masked == "zero")
    return None if options.is_plain() else options


def is_number(value: Any) -> bool:
    """True for a real number of Python or NumPy, but not for a bool or an array."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


SMALLEST_FLOAT32, LARGEST_FLOAT32 = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""The smallest positive number of float32 that has all bits, and the largest that is finite."""


LARGEST_FLOAT64, LARGEST_INT64 = sys.float_info.max, 2**63 - 1


def as_float(value: Any) -> float:
    """A number as a float, infinite if it is an integer that no float holds."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def checked_scale(caller: str, scale: Any) -> float:
    """A scale that is a number as a float.  It may be infinite: then the scores are, or are NaN, as the product is."""
    try:
        return float(scale)
    except OverflowError:
        raise ValueError(f"{caller}: scale must fit a float, got {scale!r}") from None


def check_number(
    caller: str, argument: str, value: Any, low: float, high: float, error: type[Exception] = ValueError,
    or_none: bool = False,
) -> None:  # fmt: skip
    """Check that an argument is a number from `low` to `high`, which NaN is not, and no bool.

    Args:
        caller: Name of the function, for the error.
        argument: Name of the argument.
        value: Its value.
        low, high: Bounds.
        error: Type of the error for a number out of bounds.
        or_none: True where None is right too.
    """
    if or_none and value is None:
        return
    if not is_number(value):
        raise TypeError(f"{caller}: {argument} must be a number{' or None' * or_none}, not {type(value).__name__}")
    # A number of NumPy would convert the bounds to its own dtype.
    if not low <= as_float(value) <= high:
        raise error(f"{caller}: {argument} must be {bounds(low, high)}, got {value}")


def bounds(low: float, high: float) -> str:
    """The words for a number from `low` to `high`, of which the largest of its dtype is no number to read.

    >>> bounds(0, math.inf), bounds(0, LARGEST_FLOAT32), bounds(0, LARGEST_INT64), bounds(0.0, 1.0)
    ('at least 0', 'at least 0 and finite in float32', 'at least 0 and less than 2**63', 'from 0 to 1')
    >>> bounds(SMALLEST_FLOAT32, LARGEST_FLOAT32), bounds(-LARGEST_FLOAT64, LARGEST_FLOAT64)
    ('positive and finite in float32', 'a finite number')
    """
    if high == LARGEST_FLOAT64 == -low:
        return "a finite number"
    least = "positive" if low == SMALLEST_FLOAT32 else f"at least {low:g}"
    ends = {math.inf: "", LARGEST_FLOAT32: " and finite in float32", LARGEST_INT64: " and less than 2**63"}
    return f"{least}{ends[high]}" if high in ends else f"from {low:g} to {high:g}"


def check_softcap(caller: str, softcap: Any) -> None:
    """Check that a softcap is None or a positive finite number in float32; an error begins with the caller's name."""
    check_number(caller, "softcap", softcap, SMALLEST_FLOAT32, LARGEST_FLOAT32, or_none=True)


def check_one_per_row(
    caller: str, name: str, shape: Sequence[int], of_input: Sequence[int], axes: Iterable[int],
    error: type[Exception] = RuntimeError,
) -> None:  # fmt: skip
    """Check that an option has one number per row, or one in all: size 1 along the axes of a row.

    Args:
        caller: Name of the function, for the error.
        name: Name of the argument.
        shape: Its shape, which broadcasts to that of the input.
        of_input: Shape of the input.
        axes: The axes of a row, counted from 0.
        error: Type of the error.
    """
    ahead = len(of_input) - len(shape)
    if any(axis >= ahead and shape[axis - ahead] != 1 for axis in axes):
        raise error(
            f"{caller}: {name} must be a number or have one number per row, with size 1 along the softmax dimension; "
            f"got shape {tuple(shape)} for input's {tuple(of_input)}"
        )


class Functions(NamedTuple):
    """The array functions that the formula needs, of NumPy, torch or JAX.

    Attributes:
        tanh: tanh(x).
        where: where(condition, x, number).
        cast: cast(t, dtype) of a scale or a bias: a float64 array beside float32 logits would widen the scores.  The
            default leaves the dtype to the library.
    """

    tanh: Callable[[Array], Array]
    where: Callable[[Array, Array, float], Array]
    cast: Callable[[Array, Any], Array] = lambda t, _: t

    def like(self, t: Any, x: Array) -> Any:
        """A number as it is, an array in the dtype of x."""
        return self.cast(t, x.dtype) if hasattr(t, "dtype") else t


def scores(xp: Functions, x: Array, options: ScoreOptions, seen: Array | None = None) -> Array:
    """The scores of logits: the array formula.

    Args:
        xp: tanh and where of the array's library.
        x: Logits in the dtype of the computation, float32 or float64.
        options: Tensors are arrays of the same library.
        seen: The causal mask, where causal is asked for: True where a query may see a key.
    """
    z = _scaled(xp, x, options)
    if options.softcap is not None:
        z = options.softcap * xp.tanh(z / options.softcap)
    if options.bias is not None:
        z = z + xp.like(options.bias, x)
    for mask in (options.mask, seen):
        if mask is not None:
            z = xp.where(mask, z, -math.inf)
    return z


def _scaled(xp: Functions, x: Array, options: ScoreOptions) -> Array:
    """The logits times the scale; the logits themselves where the scale is the number 1."""
    return x if isinstance(options.scale, float) and options.scale == 1 else x * xp.like(options.scale, x)


def softcap_slope(xp: Functions, x: Array, options: ScoreOptions) -> Array | float:
    """Derivative of the softcap at scale * x; times the scale, this is the derivative of a score with respect to x."""
    if options.softcap is None:
        return 1.0
    return 1 - xp.tanh(_scaled(xp, x, options) / options.softcap) ** 2


def causal_mask(arange: Any, shape: tuple[int, ...], axis: int, **where: Any) -> Any:
    """The causal mask of shape (queries, 1, ..., keys, ...), which broadcasts to `shape`: True where a key is seen.

    Args:
        arange: `arange` of the array library; `where` is passed to it (a device, say).
        shape: Shape of the input.
        axis: The softmax dimension, that of the keys.
    """
    axis %= len(shape)
    queries, keys = shape[axis - 1], shape[axis]
    seen = arange(keys, **where) <= arange(queries, **where)[:, None] + (keys - queries)
    return seen.reshape(queries, keys, *(1 for _ in shape[axis + 1 :]))


def query_axis(operation: str, axis: int, ndim: int) -> int:
    """The dimension of the queries: the one before the softmax dimension.

    Raises:
        ValueError: there is none.
    """
    if axis == 0:
        raise ValueError(
            f"{operation}(): causal needs a dimension of queries before dim, and dim is the first of {ndim}"
        )
    return axis - 1


def bits(value: float) -> int:
    """The bits of a float64 as a 64-bit integer, which is how a number travels to a kernel.

    Triton would pass a small integer as 32 bits.  Therefore 0 and positive numbers below 5.4e-312 are encoded as -0.0.

    >>> hex(bits(1.0)), bits(0.0) == bits(-0.0)
    ('0x3ff0000000000000', True)
    """
    number: int = struct.unpack("q", struct.pack("d", value))[0]
    return number if abs(number) >= 1 << 40 else -(1 << 63)
