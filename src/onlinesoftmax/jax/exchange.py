"""The exchange between devices that each hold some columns of every row: one collective merges their states.

Every device sends the states of its columns, receives those of all devices, and merges them in the same order.  So the
results have the same bits on every device.  The devices hold equally many columns, in the order of their index along
the axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..core.arrays import Array
from . import array_types
from .signature import Names

LOWEST_EXPONENT = -1000.0
"""Lower bound for exponents: exp(-1000) is 0 in every dtype."""


class RowStates(NamedTuple):
    """One state per row, in the dtype of the computation.  A number that is not needed is None.

    Attributes:
        m: Maximum of the scores, made finite.
        l: sum(exp(z - m)).
        zl: sum((z - m) * exp(z - m)), from which the entropy is computed.
        mean: Mean of z - m, for label smoothing.
        z_target: Score of the target, 0 where another device has it.
    """

    m: Array
    l: Array
    zl: Array | None = None
    mean: Array | None = None
    z_target: Array | None = None


def checked_names(name: str, axis_name: Any) -> Names:
    """The names of the axes of a call; none where rows are whole.

    Raises:
        TypeError: axis_name is neither a name nor a tuple of names.
        ValueError: the call is not inside a `shard_map` with these axes, or an axis is named twice.
    """
    if axis_name is None:
        return ()
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(isinstance(one, str) for one in names):
        raise TypeError(f"{name}: axis_name must be a name or a tuple of names, not {axis_name!r}")
    if len(set(names)) < len(names):
        raise ValueError(f"{name}: axis_name {axis_name!r} names an axis twice")
    try:
        devices(names)
    except NameError:
        raise ValueError(
            f"{name}: axis_name {axis_name!r}: no such axis here; call the function inside jax.shard_map over that axis"
        ) from None
    return names


def devices(names: Names) -> int:
    """Number of devices that share a row."""
    return int(jax.lax.axis_size(names))


def whole_target(target: Array, cols: int, names: Names) -> Array:
    """The target column of each row as a signed integer of 32 bits or more; -1 where no device has it.

    Args:
        target: Column in the whole row.
        cols: Number of columns of each device.
        names: Axes along which rows are sharded.
    """
    wide = signed(target)
    return jnp.where((wide >= 0) & (wide // cols < devices(names)), wide, -1)


def column_of(target: Array, cols: int) -> Array:
    """Targets as indices of columns, int32; -1 for one that is no column."""
    wide = signed(target)
    return jnp.where((wide >= 0) & (wide < cols), wide, -1).astype(jnp.int32)


def signed(target: Array) -> Array:
    """Targets as signed integers of 32 bits or more.

    Numbers such as -1 and the number of columns may not fit into the dtype of the targets: JAX would take them modulo
    its range.  No signed integer has all numbers of uint64; the largest become negative, and are no columns either.
    """
    return target.astype(jnp.int64 if target.dtype == jnp.uint64 else jnp.promote_types(target.dtype, jnp.int32))


def local_target(target: Array, cols: int, names: Names) -> Array:
    """Converts the result of `whole_target` to a local column.

    The local column is `cols` where another device has the target, and -1 where no device has it.
    """
    is_local = target // cols == jax.lax.axis_index(names)
    return jnp.where(target < 0, -1, jnp.where(is_local, target % cols, cols)).astype(jnp.int32)


def merged(local: RowStates, names: Names) -> RowStates:
    """The states of whole rows, from those of the columns of all devices."""
    present = [field for field, t in zip(RowStates._fields, local, strict=True) if t is not None]
    # One array travels, so that there is one collective.
    packed = jnp.stack([t for t in local if t is not None])
    return joined(dict(zip(present, jnp.moveaxis(gathered(packed, names), 1, 0), strict=True)))


def joined(parts: Mapping[str, Array]) -> RowStates:
    """The states of whole rows, from those of parts of their columns, which lie along the first axis of each field.

    Args:
        parts: The fields of `RowStates` that are not None, by name; with "mean", all parts have equally many columns.
    """
    m, l = jnp.max(parts["m"], axis=0), parts["l"]
    lower = parts["m"] - m
    factor = jnp.exp(lower)
    found = {"m": m, "l": jnp.sum(l * factor, axis=0)}
    if "zl" in parts:
        # The clamp keeps `lower * l` finite for finite l, so 0 * inf does not arise.
        found["zl"] = jnp.sum((parts["zl"] + jnp.maximum(lower, LOWEST_EXPONENT) * l) * factor, axis=0)
    if "mean" in parts:
        found["mean"] = jnp.mean(parts["mean"] + lower, axis=0)
    if "z_target" in parts:
        found["z_target"] = jnp.sum(parts["z_target"], axis=0)
    return RowStates(**found)


def gathered(t: Array, names: Names) -> Array:
    """The arrays of all devices, stacked along a new first axis."""
    gather: Callable[..., Array] = jax.lax.all_gather
    if array_types.varying(t).issuperset(names):
        # Use the all_gather whose result type is "not varying", so that `shard_map` accepts it as equal on all devices.
        # Older JAX: `all_gather_invariant`; newer: `all_gather` with to="invarying".
        gather = getattr(jax.lax, "all_gather_invariant", None) or partial(gather, to="invarying")
    return gather(t, names)
