"""Varying axes and sharding: what a JAX array's type has besides shape and dtype.

Inside `shard_map`, an array varies along a mesh axis if its values may differ between the devices of that axis.  All
operands of a primitive must vary along the same axes.  On an explicit mesh, the type has the sharding of the array.
The lowering of a primitive ignores both, because kernels and formulas work on plain arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import config
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from ..core.arrays import Array

_CHECKS_VARYING: Any = getattr(config, "_check_vma", None)
"""JAX's switch for the check of varying axes (`check_vma` of `shard_map`); it has no public name."""


def varying(t: Array) -> frozenset[str]:
    """The axes of `shard_map` along which an array varies; empty if JAX does not check varying axes."""
    kind = jax.typeof(t)
    # Older JAX: `vma`; newer: `mat.varying`.
    found: frozenset[str] = kind.vma if hasattr(kind, "vma") else kind.mat.varying
    return found


def checks_varying() -> bool:
    """False inside `shard_map(..., check_vma=False)`."""
    return _CHECKS_VARYING is None or bool(_CHECKS_VARYING.value)


def vary(t: Array, names: frozenset[str]) -> Array:
    """The array with these axes added to its varying axes; unchanged if JAX does not check varying axes."""
    if not checks_varying():
        # Older JAX: `pvary` would bind its primitive even without the check.  The transpose of `pvary` is a psum, which
        # would sum the gradient over the devices.
        return t
    manual = frozenset(jax.sharding.get_abstract_mesh().manual_axes)
    missing = tuple(sorted((names & manual) - varying(t)))
    if not missing:
        return t
    # Older JAX: `pvary`; newer: `pcast` with to="varying".
    cast: Callable[..., Array] = getattr(jax.lax, "pvary", None) or partial(jax.lax.pcast, to="varying")
    return cast(t, missing)


def alike(operands: tuple[Array, ...]) -> tuple[Array, ...]:
    """The operands, all with the same varying axes."""
    each = [varying(t) for t in operands]
    every = frozenset().union(*each)
    return operands if all(one == every for one in each) else tuple(vary(t, every) for t in operands)


def result_type(x: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """The type of a result per element or per row of the array type x.  It varies and is sharded as x is.

    Args:
        x: Type of the array whose last axis is a row.
        shape: Shape of the result.
        dtype: Dtype of the result.
    """
    sharding = NamedSharding(x.sharding.mesh, PartitionSpec(*list(x.sharding.spec)[: len(shape)]))
    return x.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def take(t: Array, places: Array, axis: int) -> Array:
    """`take_along_axis`, also along an axis that is sharded on an explicit mesh, which JAX refuses."""
    return jnp.take_along_axis(unsharded(t, axis), places, axis=axis)


def unsharded(t: Array, axis: int | None = None) -> Array:
    """On an explicit mesh, the array with this axis, or every axis, whole on every device; elsewhere the array."""
    sharding = jax.typeof(t).sharding
    spec = [None if axis is None or i == axis % t.ndim else part for i, part in enumerate(sharding.spec)]
    return resharded(t, NamedSharding(sharding.mesh, PartitionSpec(*spec)))


def resharded(t: Array, sharding: NamedSharding) -> Array:
    """On an explicit mesh, the array with this sharding, that of an array type; elsewhere the array."""
    if jax.typeof(t).sharding.spec == sharding.spec:
        return t
    moved: Array = jax.sharding.reshard(t, sharding)
    return moved


def sharded_as(t: Array, x: Array) -> Array:
    """Return t sharded as x along the axes where their sizes agree; without an explicit mesh, t as it is.

    The gradient of x must have the sharding of x alone, so no operand may bring another.
    """
    of_x, own = jax.typeof(x).sharding, jax.typeof(t).sharding
    mesh = own.mesh if of_x.mesh.empty else of_x.mesh
    spec = [part if n == size else None for part, n, size in zip(of_x.spec, t.shape, x.shape, strict=False)]
    return resharded(t, NamedSharding(mesh, PartitionSpec(*spec)))


def of_plain_arrays(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """A lowering rule for operands of any type, from a rule for arrays that have only a shape and a dtype."""

    def lower(context: Any, *values: Any, **params: Any) -> Any:
        plain = [jax.core.ShapedArray(t.shape, t.dtype) for t in context.avals_in]
        with _unchecked():
            return lowering(context.replace(avals_in=plain), *values, **params)

    return lower


def without_mesh() -> AbstractContextManager[Any]:
    """A context without a mesh, except under shard_map: equations traced in it can be lowered for any mesh."""
    if jax.sharding.get_abstract_mesh().manual_axes:
        return nullcontext()
    context: AbstractContextManager[Any] = jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
    return context


@contextmanager
def _unchecked() -> Iterator[None]:
    """A context without the check of varying axes and without explicit mesh axes."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = tuple(AxisType.Auto if kind == AxisType.Explicit else kind for kind in mesh.axis_types)
    without_checks = nullcontext() if _CHECKS_VARYING is None else _CHECKS_VARYING(False)
    with jax.sharding.use_abstract_mesh(mesh.update(axis_types=kinds)), without_checks:
        yield
