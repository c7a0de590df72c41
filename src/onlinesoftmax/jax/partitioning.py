"""Kernels under jit on several devices: each computes the rows that lie there.

XLA cuts its own operations by itself; of a kernel it knows nothing, and would bring all rows to every device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax._src import dispatch
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from ..core.arrays import Array

_LOWERED_WITH_DEVICES: set[Any] | None = getattr(dispatch, "prim_requires_devices_during_lowering", None)
"""JAX has no public name for this."""


def register(primitive: Any) -> None:
    """Tell JAX that a primitive uses `by_rows` where it is lowered."""
    if _LOWERED_WITH_DEVICES is not None:
        _LOWERED_WITH_DEVICES.add(primitive)


def by_rows(function: Callable[..., Array], result: jax.ShapeDtypeStruct, *operands: Array) -> Array:
    """A function that takes the rows of arrays one by one, computed where they lie.

    Args:
        function: Of the arrays, or of what one device has of them; it is called for both.
        result: What it gives for all.
        operands: x, whose last axis is a row, and others with its axes; an axis of theirs may be missing at the end,
            or have one element for all of x's.

    Returns:
        The function's result, cut over the devices as x is.  What is cut along its rows is brought together.
    """
    # Under shard_map this is one device's part already.
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if manual or not getattr(jax.config, "jax_use_shardy_partitioner", False) or _LOWERED_WITH_DEVICES is None:
        return function(*operands)
    rows = operands[0].shape[:-1]

    def uncut(shape: tuple[int, ...], sharding: Any) -> NamedSharding:
        """Without a cut of what every device needs whole: rows, and what is one for all."""
        spec = (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
        along = [part if axis < len(rows) and shape[axis] > 1 else None for axis, part in enumerate(spec)]
        return NamedSharding(sharding.mesh, PartitionSpec(*along))

    def partition(mesh: Any, arguments: Any, given: Any) -> Any:
        *cut, to = (uncut(t.shape, t.sharding) for t in (*arguments, given))
        return mesh, function, to, tuple(cut)

    partitioned = custom_partitioning(function)
    sides = [_factors(i, t.shape, rows) for i, t in enumerate((*operands, result))]
    rule = f"{', '.join(map(' '.join, sides[:-1]))} -> {' '.join(sides[-1])}"
    own = {name for side in sides for name in side if name.startswith("own")}
    partitioned.def_partition(partition, sharding_rule=rule, need_replication_factors=tuple(sorted(own)))
    y: Array = partitioned(*operands)
    return y


def _factors(i: int, shape: tuple[int, ...], rows: tuple[int, ...]) -> list[str]:
    """The name of each axis of an array in Shardy's rule: those of rows are one for all arrays, others its own."""
    together = [axis < len(rows) and size == rows[axis] for axis, size in enumerate(shape)]
    return [f"axis{axis}" if along else f"own{i}_{axis}" for axis, along in enumerate(together)]
