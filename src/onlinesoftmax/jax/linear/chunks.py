"""The products of a chunk, and the loop over the chunks, whose results are added up, merged, or placed side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...core.arrays import Array
from ..signature import Values


def product(a: Array, b: Array, axes: tuple[int, int], dtype: Any) -> Array:
    """The product of two matrices; `axes` are the axis of a and that of b that are summed over.

    XLA adds up in `dtype` at least, and the result has this dtype.
    """
    return jax.lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((), ())), preferred_element_type=dtype)


def logits_of(x: Array, weight: Array, bias: Array | None, padding: int = 0) -> Array:
    """The logits x · weightᵀ + bias in the dtype of x; those of the last classes, which are padding, are -inf."""
    z = product(x, weight, (1, 1), x.dtype)
    z = z if bias is None else z + bias[None]
    if not padding:
        return z
    # XLA writes a slice in place.  A bias of -inf would be a pass over all logits.
    last = jnp.full((z.shape[0], padding), -jnp.inf, z.dtype)
    return jax.lax.dynamic_update_slice_in_dim(z, last, z.shape[1] - padding, 1)


def pad_classes(t: Array, padding: int) -> Array:
    """An array of classes with zeros for as many more."""
    return jnp.pad(t, [(0, padding), *[(0, 0)] * (t.ndim - 1)])


TILE = 64
"""Tokens or columns of a tile of a product."""


def in_chunks(
    size: int, chunk: int, of_chunk: Callable[[Any, int], Values], sums: tuple[str, ...],
    merge: Callable[[Values, Values], Values] | None = None,
) -> Values:  # fmt: skip
    """The results of all chunks along one axis.

    Args:
        size: Size of the axis.
        chunk: Most elements of a chunk.  The first one has what the others leave, so that these are one loop.
        of_chunk: Function of the beginning and the size of a chunk.
        sums: Names of the results that are added up.  The others are slices along their first axis.
        merge: Function of the results of two chunks that gives those of both, in place of the above.
    """
    # A size of jax.export may be a symbol.
    loops = 0 if size == chunk else -(-size // chunk) - 1
    if loops == 1 and size > 2:
        # XLA unrolls a loop of one step, and may then hold the logits of two chunks.
        loops, chunk = 2, (size // 3 // TILE * TILE if size >= 12 * TILE else size // 3)
    before = size - loops * chunk
    found = of_chunk(0, before)
    if not loops:
        return found

    def with_chunk(i: Any, whole: Values) -> Values:
        first = before + i * chunk
        found = of_chunk(first, chunk)
        if merge is not None:
            return merge(whole, found)
        return {
            name: whole[name] + t if name in sums else jax.lax.dynamic_update_slice_in_dim(whole[name], t, first, 0)
            for name, t in found.items()
        }

    if merge is None:
        room = [(0, size - before)]
        found = {
            name: t if name in sums else jnp.pad(t, [*room, *[(0, 0)] * (t.ndim - 1)]) for name, t in found.items()
        }
    return jax.lax.fori_loop(0, loops, with_chunk, found)
