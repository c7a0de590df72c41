"""Kernels under jit on several devices: each device computes the rows, or the columns of rows, that it holds.

XLA partitions its own operations by itself.  It knows nothing of a kernel, and would bring all rows to every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax._src import dispatch
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..core.arrays import Array

_LOWERED_WITH_DEVICES: set[Any] | None = getattr(dispatch, "prim_requires_devices_during_lowering", None)
"""Primitives whose lowering needs the devices; JAX has no public name for the set."""


def register(primitive: Any) -> None:
    """Tell JAX that the lowering of a primitive uses `by_rows`."""
    if _LOWERED_WITH_DEVICES is not None:
        _LOWERED_WITH_DEVICES.add(primitive)


def by_rows(function: Callable[..., Any], result: Any, has_row: Sequence[bool], *operands: Array) -> Any:
    """Apply a function of rows on the devices that hold the rows, or parts of their columns.

    Args:
        function: Function of the names of the mesh axes along which rows are sharded, and of the arrays, or of the
            parts of them that one device holds.
        result: Shape and dtype of the result for whole arrays, or a tuple of them for several results.
        has_row: True for the arrays whose last axis is a row, in the order of the operands and the results; the others
            have values per row.
        operands: x, whose last axis is a row, and arrays beside it.  Their axes are those of x; the last ones may be
            missing, and an axis may have size 1.

    Returns:
        The result of the function, partitioned over the devices as x is.
    """
    # Under shard_map the arrays are the part of one device already.
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if manual or not getattr(jax.config, "jax_use_shardy_partitioner", False) or _LOWERED_WITH_DEVICES is None:
        return function((), *operands)
    shape, (results, kind) = operands[0].shape, jax.tree.flatten(result)

    def partition(mesh: Any, arguments: Any, given: Any) -> Any:
        mesh = _mesh_of(arguments[0].sharding)
        shared = _along(arguments[0].shape, arguments[0].sharding, mesh)
        names = names_in(shared[-1])
        shardings = [
            NamedSharding(mesh, PartitionSpec(*_of_axes(t.shape, shape, along_row, shared, [None] * len(t.shape))))
            for t, along_row in zip((*arguments, *jax.tree.leaves(given)), has_row, strict=True)
        ]
        inputs, outputs = shardings[: len(arguments)], shardings[len(arguments) :]
        return mesh, partial(function, names), jax.tree.unflatten(kind, outputs), tuple(inputs)

    whole = partial(function, ())
    partitioned = custom_partitioning(whole)
    factors = [f"axis{axis}" for axis in range(len(shape))]
    sides = [
        _of_axes(t.shape, shape, along_row, factors, [f"own{i}_{axis}" for axis in range(len(t.shape))])
        for i, (t, along_row) in enumerate(zip((*operands, *results), has_row, strict=True))
    ]
    read, written = (", ".join(map(" ".join, some)) for some in (sides[: len(operands)], sides[len(operands) :]))
    rule = f"{read} -> {written}"
    own = {name for side in sides for name in side if name.startswith("own")}
    partitioned.def_partition(partition, sharding_rule=rule, need_replication_factors=tuple(sorted(own)))
    return partitioned(*operands)


def by_factors(
    function: Callable[..., Any], results: Sequence[Any], factors: Sequence[Sequence[str | None]], *operands: Array
) -> Any:
    """Apply a function on the devices that hold parts of the arrays along named factors.

    Args:
        function: Function of a mapping from each factor to the names of the mesh axes that divide it, and of the
            arrays, or of the parts of them that one device holds.
        results: Shapes and dtypes of the results for whole arrays.
        factors: The factor of each axis of the operands and the results; None for an axis that is whole on every
            device.  The first operand that has a factor says how it is divided.  A mesh axis that divides two factors
            divides the first one, and the arrays of the second are gathered along it.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if manual or not getattr(jax.config, "jax_use_shardy_partitioner", False) or _LOWERED_WITH_DEVICES is None:
        return function({}, *operands)

    def partition(mesh: Any, arguments: Any, given: Any) -> Any:
        mesh = _mesh_of(arguments[0].sharding)
        divided: dict[str | None, tuple[str, ...]] = {}
        for t, of_axes in zip(arguments, factors, strict=False):
            for factor, size, part in zip(of_axes, t.shape, _spec(t.shape, t.sharding), strict=True):
                if factor is not None and factor not in divided:
                    taken = {name for names in divided.values() for name in names}
                    names = tuple(name for name in names_in(part) if name not in taken)
                    is_even = size % math.prod(mesh.shape[name] for name in names) == 0
                    divided[factor] = names if is_even else ()
        every = [
            NamedSharding(mesh, PartitionSpec(*(divided.get(factor) or None for factor in of_axes)))
            for of_axes in factors
        ]
        return mesh, partial(function, divided), every[len(arguments) :], tuple(every[: len(arguments)])

    partitioned = custom_partitioning(partial(function, {}))
    sides = [
        [factor or f"own{i}_{axis}" for axis, factor in enumerate(of_axes)] for i, of_axes in enumerate(factors)
    ]  # fmt: skip
    read, written = (", ".join(map(" ".join, some)) for some in (sides[: len(operands)], sides[len(operands) :]))
    # In the order of the sides, which Shardy asks for.
    own = tuple(name for side in sides for name in side if name.startswith("own"))
    partitioned.def_partition(partition, sharding_rule=f"{read} -> {written}", need_replication_factors=own)
    return partitioned(*operands)


def _of_axes(
    shape: tuple[int, ...], of_x: tuple[int, ...], has_row: bool, shared: Sequence[Any], own: Sequence[Any]
) -> list[Any]:
    """An item for each axis of an array: that of x's axis where the two go together, else its own."""
    along = len(of_x) if has_row else len(of_x) - 1
    return [shared[i] if i < along and size == of_x[i] else own[i] for i, size in enumerate(shape)]


def _along(shape: tuple[int, ...], sharding: Any, mesh: Mesh) -> list[Any]:
    """The mesh axes along which each axis of x is sharded; None for a row that is not cut into equal parts."""
    spec = _spec(shape, sharding)
    devices = math.prod(mesh.shape[name] for name in names_in(spec[-1]))
    return spec if shape[-1] % devices == 0 else [*spec[:-1], None]


def _mesh_of(sharding: Any) -> Mesh:
    """The mesh of a sharding, or one of all its devices.

    An array that was made before `jax.set_mesh` has a sharding without a mesh: each of the devices has all of it.
    """
    return getattr(sharding, "mesh", None) or Mesh(sorted(sharding.device_set, key=lambda one: one.id), ("device",))


def _spec(shape: tuple[int, ...], sharding: Any) -> list[Any]:
    """An item of a PartitionSpec for each axis of an array."""
    spec = getattr(sharding, "spec", ())
    return [*spec, *[None] * (len(shape) - len(spec))]


def names_in(part: Any) -> tuple[str, ...]:
    """The names of the mesh axes in one item of a PartitionSpec."""
    if part is None:
        return ()
    return part if isinstance(part, tuple) else (part,)
