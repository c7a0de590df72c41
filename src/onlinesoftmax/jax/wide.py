"""Formulas whose results are the same to the last bit in every library, as primitives that have 64-bit types.

JAX has no 64-bit types by default.  A primitive is lowered as a whole, so that the types inside it are seen by no other
operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching
from jax.sharding import NamedSharding, PartitionSpec

from ..core.arrays import Array
from ..sampling import formulas
from ..sampling.keys import Keys, ordered, turned
from . import array_types, custom_op


def order_of(scores: Array, filtered: bool = False) -> Keys:
    """The order of scores (..., tokens)."""
    return Keys(FUNCTIONS, ordered(jnp, scores), _largest, _fold)


def _largest(keys: Array, k: int) -> Array:
    # On a CPU, XLA sorts whole rows of integers, but not those of float32.
    dtype = jnp.float32 if keys.dtype == jnp.int32 else jnp.float64
    return jax.lax.top_k(jax.lax.bitcast_convert_type(turned(jnp, keys), dtype), k)[1]


def _fold(step: Callable[[Array, Array], Array], start: Array, values: Array) -> Array:
    return jax.lax.scan(lambda carry, value: (step(carry, value), None), start, values)[0]


# Hazard: XLA fuses a product of float32 numbers with an addition, and may leave out a pair of conversions.
FUNCTIONS = formulas.Functions(
    jnp,
    cast=lambda t, dtype: t.astype(dtype),
    float32=lambda t: jax.lax.reduce_precision(t, 8, 23),
    take=lambda t, places, axis: jnp.take_along_axis(t, places, axis),
    arange=lambda first, end, _: jnp.arange(first, end),
    order=order_of,
)
"""JAX's functions for the formulas."""


@contextmanager
def with_64_bits() -> Iterator[None]:
    """A context in which JAX has 64-bit types, and no settings of the caller for other formulas."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def check_sizes(name: str, shape: tuple[Any, ...]) -> None:
    """Raise an error for sizes that are symbols, where JAX computes with them in integers of 32 bits."""
    if not all(isinstance(size, int) for size in shape) and jnp.result_type(int) != jnp.int64:
        raise NotImplementedError(f"{name}: jax.export with sizes that are symbols needs jax_enable_x64")


def _platform(divides: bool, platform: str, context: Any) -> str:
    """The platform of a lowering; "any" where a program calls none of our kernels.

    A program of `jax.export` has no custom calls of other libraries.  XLA divides its own operations over devices; for
    a kernel, it would gather the arrays, unless the lowering `divides` them itself.
    """
    module = context.module_context
    axes = module.axis_context
    # In `shard_map`, arrays are those of one device.
    is_whole = axes.num_devices == 1 if hasattr(axes, "num_devices") else axes.manual_axes == {*axes.mesh.axis_names}
    return platform if (divides or is_whole) and not module.lowering_parameters.for_export else "any"


def primitive(
    name: str, lowered: Callable[..., list[Array]], shared: tuple[str, ...] = (), divides: bool = False
) -> Primitive:
    """A primitive without derivatives whose results have the leading axes of the first operand, or 1 in their place.

    Args:
        name: Its name.
        lowered: Function of a platform, the operands and the parameters `names` and `call`, which returns the results;
            it is traced with 64-bit types.  A batch is one more axis of all operands, the first.
        shared: Names of the operands whose axis of a batch may have size 1.
        divides: True where `lowered` divides the arrays of several devices itself.
    """

    def abstract(*avals: Any, **params: Any) -> list[Any]:
        whole, x = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals], avals[0]
        with with_64_bits():
            results = jax.eval_shape(partial(lowered, "any", **params), *whole)
        along_rows = list(x.sharding.spec)[: x.ndim - 1]
        found = []
        for t in results:
            along = [part if n == own else None for part, n, own in zip(along_rows, t.shape, x.shape, strict=False)]
            sharding = NamedSharding(x.sharding.mesh, PartitionSpec(*along))
            found.append(x.update(shape=t.shape, dtype=t.dtype, weak_type=False, sharding=sharding))
        return found

    def batch(arrays: tuple[Array, ...], axes: tuple[int | None, ...], **params: Any) -> tuple[list[Array], list[int]]:
        size = next(t.shape[axis] for t, axis in zip(arrays, axes, strict=True) if axis is not None)

        def to_front(operand: str, t: Array, axis: int | None) -> Array:
            if axis is not None:
                return jnp.moveaxis(t, axis, 0)
            return t[None] if operand in shared else jnp.broadcast_to(t[None], (size, *t.shape))

        operands = list(map(to_front, params["names"], arrays, axes))
        results = made.bind(*array_types.alike(tuple(operands)), **params)
        return results, [0] * len(results)

    made = custom_op.primitive(name, lowered, abstract, with_64_bits, partial(_platform, divides))
    batching.primitive_batchers[made] = batch
    return made
