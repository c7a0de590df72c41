"""The rows of a public call: its arrays, checked, with the reduced axes last and joined, as primitives take them."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..core.arguments import check_int64
from ..core.arrays import Array, array_kind, broadcasts
from ..core.options import (
    ARRAY,
    LARGEST_INT64,
    SCORE_OPTIONS,
    ScoreOptions,
    check_one_per_row,
    check_softcap,
    checked_scale,
    is_number,
)
from ..ops import OPERATIONS
from . import array_types
from .exchange import checked_names, devices
from .signature import Names, Values

Axis = int | Sequence[int] | None
AxisName = str | tuple[str, ...] | None
"""Names of the axes of `shard_map` along which rows are sharded; None where rows are whole."""


class Rows(NamedTuple):
    """An array with its reduced axes last and joined, and the arrays of its score options in the same layout.

    Attributes:
        x: Shape (outer axes, cols).
        arrays: Arrays of the score options, by name.
        options: Score options; ARRAY stands for an array.
        axes: The reduced axes of the caller's array.
        shape: Shape of the caller's array.
        dtype: Dtype of the result; x may be wider.
        names: Axes of `shard_map` along which rows are sharded; none where rows are whole.
    """

    x: Array
    arrays: Values
    options: ScoreOptions
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any
    names: Names = ()

    @property
    def cols(self) -> int:
        """Number of columns of a whole row."""
        return self.x.shape[-1] * (devices(self.names) if self.names else 1)

    def sum(self, t: Array) -> Array:
        """The sum of an array over the devices that share a row."""
        return jax.lax.psum(t, self.names) if self.names else t

    def last(self, t: Array) -> Array:
        """An array of the caller's shape, in the layout of x."""
        return array_types.sharded_as(_last(t, self.axes), self.x)

    def back_of_row(self, y: Array) -> Array:
        """A result for some elements of each row, with their axis in the place of the only reduced axis."""
        return jnp.moveaxis(y, -1, self.axes[0])

    def back(self, y: Array) -> Array:
        """A result per element, in the shape of the caller's array."""
        outer = y.shape[:-1]
        y = y.reshape((*outer, *(self.shape[axis] for axis in self.axes)))
        return jnp.moveaxis(y, range(len(outer), y.ndim), self.axes)


def options_of(name: str, scale: Any, softcap: Any, bias: Any, where: Any) -> ScoreOptions:
    """The score options of a function of this name, with numbers as floats; the mask is called `where` in jax.nn."""
    scale = checked_scale(name, scale) if is_number(scale) else scale
    check_softcap(name, softcap)
    return ScoreOptions(scale, None if softcap is None else float(softcap), bias, where)


def is_plain(options: ScoreOptions) -> bool:
    """True where jax.nn knows all the options that are given."""
    return set(options.given) <= {"mask"}


def is_complex(x: Array) -> bool:
    """True for complex numbers, for which only jax.nn has functions."""
    return hasattr(x, "dtype") and array_kind(x) != "torch" and jnp.issubdtype(x.dtype, jnp.complexfloating)


def rows_of(name: str, x: Array, axis: Axis, options: ScoreOptions, axis_name: Any = None) -> Rows:
    """The rows of x, which `checked_input` has checked; the other arguments are checked here."""
    names = checked_names(name, axis_name)
    axes = axes_of(name, axis, x.ndim)
    # A target is an index into the row, so there the order of the axes is the caller's.
    axes = axes if has_target(name) else tuple(sorted(axes))
    options, arrays = _checked_options(name, x, axes, options)
    narrow = x.dtype
    if not jnp.issubdtype(narrow, jnp.floating):
        narrow = jnp.result_type(float)
        x = x.astype(narrow)
    elif jnp.finfo(narrow).bits < 16:
        x = x.astype(jnp.float32)
    last = array_types.vary(_last(x, axes), frozenset(names))
    arrays = {option: array_types.sharded_as(t, last) for option, t in arrays.items()}
    return Rows(last, arrays, options, axes, x.shape, narrow, names)


def checked_input(name: str, x: Any, argument: str = "") -> Array:
    """The input of an operation as an array; the logits of an operation with targets are floating-point."""
    argument = argument or ("logits" if has_target(name) else "x")
    x = as_array(name, argument, x)
    if has_target(name):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name}: {argument} must be floating point, got {x.dtype}")
        return x
    # jax.nn.logsumexp takes booleans, and the functions with a result per element do not.
    if x.dtype == jnp.bool_ and not OPERATIONS[name].per_row:
        raise TypeError(f"{name}: x must be a number array, not bool")
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(f"{name}: scale, softcap and bias are for real x, not {x.dtype}")
    return x


def check_no_list(name: str, argument: str, value: Any) -> None:
    """Raise an error for a list, a tuple, a string and None."""
    if isinstance(value, (list, tuple, str)) or value is None:
        raise TypeError(f"{name}: {argument} must be an array, not {type(value).__name__}")


def has_target(name: str) -> bool:
    """True for an operation with a target column per row, and for a function of logits that is no operation."""
    return name not in OPERATIONS or OPERATIONS[name].has_target


def axes_of(name: str, axis: Axis, ndim: int) -> tuple[int, ...]:
    """The axes counted from 0, in the order in which they are given."""
    if axis is None:
        return tuple(range(ndim))
    given = tuple(axis) if isinstance(axis, Sequence) else (axis,)
    for one in given:
        if isinstance(one, bool) or not isinstance(one, (int, np.integer)):
            raise TypeError(f"{name}: axis must be an int, ints or None, not {one!r}")
        if not -ndim <= one < ndim:
            raise ValueError(f"{name}: axis {one} is out of range for an array with {ndim} axes")
    found = tuple(int(one) % ndim for one in given)
    if len(set(found)) < len(found):
        raise ValueError(f"{name}: axis {given} names an axis twice")
    return found


def _checked_options(name: str, x: Array, axes: tuple[int, ...], options: ScoreOptions) -> tuple[ScoreOptions, Values]:
    """The options with ARRAY in the place of each array, and the arrays with x's layout."""
    found: Values = {}
    for option in SCORE_OPTIONS.values():
        value = getattr(options, option.name)
        if not option.tensor or (isinstance(value, float) if option.kind == "row" else value is None):
            continue
        t = checked_array(name, x, option.name, value)
        if option.kind == "row" and math.prod(t.shape) != 1:
            check_one_per_row(name, option.name, t.shape, x.shape, axes, ValueError)
        elif option.kind != "row" and len(axes) > 1:
            # Axes that are joined need the whole length of x; along a single axis an option may have size 1.
            t = jnp.broadcast_to(t, [x.shape[i] if i in axes else n for i, n in enumerate(t.shape)])
        found[option.name] = _last(t, axes)
    marked: dict[str, Any] = dict.fromkeys(found, ARRAY)
    return options._replace(**marked), found


def as_array(name: str, argument: str, value: Any) -> Array:
    """An argument as an array of JAX.

    Raises:
        TypeError: JAX makes no array of it.
    """
    check_no_list(name, argument, value)
    if array_kind(value) == "torch":
        # JAX would not compute its gradient.
        raise TypeError(f"{name}: {argument} is a torch tensor: call onlinesoftmax.{name}")
    # A number that fits no dtype is an OverflowError.  A class, such as jnp.float32, is no array.
    with suppress(TypeError, ValueError, OverflowError):
        if np.ndim(value) or not isinstance(value, type):
            return jnp.asarray(value)
    raise TypeError(f"{name}: {argument} must be an array, not {type(value).__name__}")


def as_labels(name: str, argument: str, value: Any) -> Array:
    """An array as `as_array` makes it, but integers of 64 bits stay in NumPy: JAX would take them modulo 2^32.

    `column_of` and `whole_target` compare them with the number of columns, and return arrays of JAX.  An int of Python
    that int64 does not hold becomes the nearest one that it holds: neither is a column.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        value = np.asarray(min(max(value, -LARGEST_INT64), LARGEST_INT64))
    if array_kind(value) == "numpy" and value.dtype in (np.int64, np.uint64):
        return np.asarray(value)
    return as_array(name, argument, value)


def checked_integer(name: str, argument: str, value: Any) -> int:
    """An argument that is an integer."""
    if not isinstance(value, (bool, np.bool_)):
        try:
            number = operator.index(value)
            check_int64(name, argument, number)
            return number
        except TypeError:
            # JAX says how to pass a number that is traced.
            if isinstance(value, jax.core.Tracer):
                raise
    raise TypeError(f"{name}: {argument} must be an int, not {type(value).__name__}")


def checked_dtype(name: str, argument: str, dtype: Any) -> Any:
    """An argument that is a dtype or its name."""
    with suppress(TypeError, ValueError):
        if array_kind(dtype) is None and dtype is not None:
            return jnp.dtype(dtype)
    raise TypeError(f"{name}: {argument} must be a dtype or its name, not {type(dtype).__name__}")


def checked_array(name: str, x: Array, option: str, value: Any) -> Array:
    """An array of the score options, with as many axes as x."""
    argument = ARGUMENTS.get(option, option)
    if SCORE_OPTIONS[option].kind == "row":
        is_array = isinstance(value, (jax.Array, np.ndarray, np.generic))
        if not is_array or not jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(f"{name}: {option} must be a number or a floating-point array, got {value!r}")
        if math.prod(value.shape) == 1:
            return value.reshape((1,) * x.ndim)
    t = as_array(name, argument, value)
    if SCORE_OPTIONS[option].dtype == "boolean" and t.dtype != jnp.bool_:
        raise ValueError(f"{name}: {argument} must be boolean, got {t.dtype}")
    if SCORE_OPTIONS[option].dtype == "floating" and not jnp.issubdtype(t.dtype, jnp.floating):
        raise TypeError(f"{name}: {argument} must be floating point, got {t.dtype}")
    if not broadcasts(t.shape, x.shape):
        of_input = "logits of" if has_target(name) else "x's"
        raise ValueError(f"{name}: {argument} of shape {t.shape} does not broadcast to {of_input} {x.shape}")
    return t.reshape((1,) * (x.ndim - t.ndim) + t.shape)


ARGUMENTS = {"mask": "where"}
"""Names of arguments that jax.nn calls otherwise than core/options.py."""


def _last(t: Array, axes: tuple[int, ...]) -> Array:
    """The array with its reduced axes last and joined."""
    moved = jnp.moveaxis(t, axes, range(t.ndim - len(axes), t.ndim))
    outer = moved.shape[: t.ndim - len(axes)]
    return moved.reshape((*outer, math.prod(moved.shape[len(outer) :])))
