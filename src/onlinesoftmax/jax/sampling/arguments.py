"""The checks of the arguments of sampling; errors name the function and the argument."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...core.arrays import Array, array_kind, broadcasts
from ...core.options import LARGEST_INT64, ScoreOptions, as_float, bounds, is_number
from ..exchange import column_of
from ..prepare import Rows, as_labels, checked_input, checked_integer, rows_of


class Words(NamedTuple):
    """An array of 64-bit numbers as JAX has it without `jax_enable_x64`.

    Attributes:
        words: Pairs of uint32 along one axis more, the lower half first.
        dtype: "int64" or "float64".
    """

    words: Array
    dtype: str


def checked_rows(name: str, logits: Any, axis: Any, options: ScoreOptions, argument: str = "logits") -> Rows:
    """The logits with their tokens on the last axis, and the arrays of the score options."""
    rows = rows_of(name, checked_input(name, logits, argument), checked_integer(name, "axis", axis), options)
    if not rows.cols:
        raise ValueError(f"{name}: {argument} has no tokens, its shape is {rows.shape}")
    return rows


def checked_of_rows(
    name: str, rows: tuple[int, ...], argument: str, value: Any, dtype: str, low: float, high: float
) -> Array | Words:
    """A number, or an array with one for each row, of the shape of the rows or of ones, and one axis of size 1.

    Args:
        name: Name of the function.
        rows: Shape of the rows.
        argument: Name of the argument.
        value: Its value.  A number has to be from `low` to `high`; the values of an array are not read.
        dtype: Dtype of a number; the formulas convert an array.
        low, high: Bounds of a number.
    """
    whole = dtype == "int64"
    wanted = "an int" if whole else "a number"
    if is_number(value):
        if whole and not hasattr(value, "__index__"):
            raise TypeError(f"{name}: {argument} must be an int, not {type(value).__name__}")
        # A number of NumPy would convert the bounds to its own dtype.
        number = operator.index(value) if whole else as_float(value)
        if not low <= number <= high:
            raise ValueError(f"{name}: {argument} must be {bounds(low, high)}, got {value}")
        return _with_axes(np.asarray(number, dtype), rows)
    if array_kind(value) not in ("numpy", "jax"):
        raise TypeError(f"{name}: {argument} must be {wanted} or an array of such, not {type(value).__name__}")
    if not jnp.issubdtype(value.dtype, jnp.integer) and (whole or not jnp.issubdtype(value.dtype, jnp.floating)):
        raise TypeError(f"{name}: {argument} must be {wanted} or an array of such, got {value.dtype}")
    if not broadcasts(value.shape, rows):
        raise ValueError(
            f"{name}: {argument} must be {wanted} or have one for each row, of shape {rows}; got {value.shape}"
        )
    return _with_axes(value, rows)


def _with_axes(value: Array, rows: tuple[int, ...]) -> Array | Words:
    """An array that broadcasts to the rows, with as many axes and one more."""
    value = value.reshape((1,) * (len(rows) - value.ndim) + value.shape + (1,))
    if array_kind(value) != "numpy" or value.dtype.itemsize < 8:
        return value
    # Without `jax_enable_x64`, JAX would cut a number of 64 bits.
    dtype = "float64" if value.dtype.kind == "f" else "int64"
    little = np.ascontiguousarray(value.astype(f"<{'f' if dtype == 'float64' else 'i'}8"))
    return Words(little.view("<u4").reshape(*value.shape, 2), dtype)


def checked_seed(name: str, rows: tuple[int, ...], seed: Any) -> Array | Words:
    """The seed: an integer, integers of the rows, or keys of JAX, of which the last two words are the seed."""
    if array_kind(seed) in ("numpy", "jax") and seed.dtype == np.uint32 and seed.shape == (2,):
        raise TypeError(
            f"{name}: seed is the two words of a jax.random.PRNGKey, or seeds of two rows: call jax.random.key for a "
            "key, or give the seeds as a NumPy array of int64"
        )
    if array_kind(seed) != "jax" or not jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        return checked_of_rows(name, rows, "seed", seed, "int64", 0, LARGEST_INT64)
    if not broadcasts(seed.shape, rows):
        raise ValueError(f"{name}: seed must be a key or have one for each row, of shape {rows}; got {seed.shape}")
    data = jax.random.key_data(seed)
    # The last word of a key is the lower half of the seed that it was made of.
    words = data[..., ::-1][..., :2] if data.shape[-1] > 1 else jnp.pad(data, [(0, 0)] * seed.ndim + [(0, 1)])
    return Words(words.reshape((1,) * (len(rows) - seed.ndim) + seed.shape + (1, 2)), "int64")


def check_order(name: str, seed: Any, argument: str, logits: Any) -> None:
    """Raise an error for logits before the seed, the order of other functions; the arrays are the first arguments."""
    if _is_floating(seed) and not _is_floating(logits):
        raise TypeError(
            f"{name}: the seed comes first, as in jax.random: call {name}(seed, {argument}, ...); got floating-point "
            f"numbers of shape {seed.shape} as seed"
        )


def _is_floating(value: Any) -> bool:
    return array_kind(value) in ("numpy", "jax") and jnp.issubdtype(value.dtype, jnp.floating)


def checked_count(name: str, argument: str, value: Any, tokens: int, low: int = 0) -> int:
    """A number of tokens, at most those of a row."""
    number = checked_integer(name, argument, value)
    if not low <= number <= tokens:
        raise ValueError(f"{name}: {argument} must be from {low} to the {tokens} tokens of a row, got {value}")
    return number


def checked_tokens(name: str, argument: str, value: Any, shape: tuple[int, ...]) -> Array:
    """Token ids of a shape, int32; -1 for a number that does not fit."""
    found = as_labels(name, argument, value)
    if not jnp.issubdtype(found.dtype, jnp.integer):
        raise TypeError(f"{name}: {argument} must be an array of ints, got {found.dtype}")
    if found.shape != shape:
        raise ValueError(f"{name}: {argument} has shape {found.shape}, and must have {shape}")
    return column_of(found, 2**31 - 1)
