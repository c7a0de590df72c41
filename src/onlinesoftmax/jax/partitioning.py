"""Kernels under jit on several devices: each device computes the rows that it holds.

XLA partitions its own operations by itself.  It knows nothing of a kernel, and would bring all rows to every device.
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
"""Primitives whose lowering needs the devices; JAX has no public name for the set."""


def register(primitive: Any) -> None:
    """Tell JAX that the lowering of a primitive uses `by_rows`."""
    if _LOWERED_WITH_DEVICES is not None:
        _LOWERED_WITH_DEVICES.add(primitive)


def by_rows(function: Callable[..., Array], result: jax.ShapeDtypeStruct, *operands: Array) -> Array:
    """Apply a function of rows on the devices that hold the rows.

    Args:
        function: Function of the arrays, or of the parts of them that one device holds; it is called for both.
        result: Shape and dtype of the result for whole arrays.
        operands: x, whose last axis is a row, and arrays beside it.  Their axes are those of x; the last ones may be
            missing, and an axis may have size 1.

    Returns:
        The result of the function, partitioned over the devices as x is.  An array that is partitioned along its rows
        is gathered first.
    """
    # Under shard_map the arrays are the part of one device already.
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if manual or not getattr(jax.config, "jax_use_shardy_partitioner", False) or _LOWERED_WITH_DEVICES is None:
        return function(*operands)
    rows = operands[0].shape[:-1]

    def whole_rows(shape: tuple[int, ...], sharding: Any) -> NamedSharding:
        """The sharding without the axes that every device needs whole: the row, and axes of size 1."""
        spec = (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
        along = [part if axis < len(rows) and shape[axis] > 1 else None for axis, part in enumerate(spec)]
        return NamedSharding(sharding.mesh, PartitionSpec(*along))

    def partition(mesh: Any, arguments: Any, given: Any) -> Any:
        *shardings, to = (whole_rows(t.shape, t.sharding) for t in (*arguments, given))
        return mesh, function, to, tuple(shardings)

    partitioned = custom_partitioning(function)
    sides = [_factors(i, t.shape, rows) for i, t in enumerate((*operands, result))]
    rule = f"{', '.join(map(' '.join, sides[:-1]))} -> {' '.join(sides[-1])}"
    own = {name for side in sides for name in side if name.startswith("own")}
    partitioned.def_partition(partition, sharding_rule=rule, need_replication_factors=tuple(sorted(own)))
    y: Array = partitioned(*operands)
    return y


def _factors(i: int, shape: tuple[int, ...], rows: tuple[int, ...]) -> list[str]:
    """The name of each axis of an array in Shardy's rule: the outer axes of x share a name, others have their own."""
    together = [axis < len(rows) and size == rows[axis] for axis, size in enumerate(shape)]
    return [f"axis{axis}" if along else f"own{i}_{axis}" for axis, along in enumerate(together)]
