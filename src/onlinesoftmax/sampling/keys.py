"""Scores as integers in their order; thresholds by these, for NumPy and for JAX with 64-bit types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..core.arrays import Array
from .formulas import Functions


class Keys(NamedTuple):
    """The order of scores by integers.  No row is sorted for a filter: its threshold is found one bit after the other.

    Each bit takes a sum over the row, which a compiler can divide over devices.

    Attributes:
        of: Functions of the library.
        keys: `ordered` of the scores.
        top: top(keys, k): columns of the k largest integers, of equal ones the lower column first.
        fold: fold(step, start, values) is functools.reduce(step, values, start).
    """

    of: Functions
    keys: Array
    top: Callable[[Array, int], Array]
    fold: Callable[[Callable[[Array, Array], Array], Array, Array], Array]

    def best(self) -> Array:
        # Hazard: XLA's maximum of a row on a CPU may leave a NaN out.  Of the integers, that of NaN is the largest.
        return self.keys.argmax(-1, keepdims=True)

    def largest(self, k: int) -> Array:
        return self.top(self.keys, k)

    def rank_of(self, target: Array) -> Array:
        """The rank, (rows,), of a token of each row, (rows, 1), from 1; 0 where the target is no token."""
        of, keys = self.of, self.keys
        columns, inside = of.arange(0, keys.shape[-1], keys), (target >= 0) & (target < keys.shape[-1])
        at = of.xp.where(inside, target, 0)
        own = of.take(keys, at, -1)
        rank = ((keys > own) | ((keys == own) & (columns < at))).sum(-1, keepdims=True) + 1
        return of.xp.where(inside, rank, 0)[..., 0]

    def leading(self, kept: Array, weights: Array | None, wanted: Array, first: bool) -> Array:
        xp, keys = self.of.xp, self.keys
        weights = self.of.cast(kept, xp.int64) if weights is None else weights
        threshold = self._threshold(keys, weights, wanted)
        if not first:
            return kept & (keys >= threshold)
        above, ties = kept & (keys > threshold), kept & (keys == threshold)
        missing = wanted - xp.sum(xp.where(above, weights, 0), -1, keepdims=True)
        number = -(-missing // xp.max(xp.where(ties, weights, 1), -1, keepdims=True))
        low_ids_first = -xp.arange(keys.shape[-1], dtype=xp.int32)
        return above | (ties & (low_ids_first >= self._threshold(low_ids_first, ties, number)))

    def _threshold(self, keys: Array, weights: Array, wanted: Array) -> Array:
        """The largest t, (rows, 1), for which the weights of the keys >= t have a sum of at least `wanted`."""
        xp, smallest = self.of.xp, int(self.of.xp.iinfo(keys.dtype).min)
        bits = xp.asarray([smallest, *(1 << i for i in reversed(range(xp.iinfo(keys.dtype).bits - 1)))], keys.dtype)

        def step(threshold: Array, bit: Array) -> Array:
            # The threshold begins at the smallest integer: the first step clears its sign bit, the others set a bit.
            higher = threshold ^ bit
            enough = xp.sum(xp.where(keys >= higher, weights, 0), -1, keepdims=True) >= wanted
            return xp.where(enough, higher, threshold)

        return self.fold(step, xp.full(wanted.shape, smallest, keys.dtype), bits)

    def log_sum(self, z: Array, kept: Array) -> Array:
        xp = self.of.xp
        return xp.log(xp.sum(xp.where(kept, xp.exp(z), 0.0), -1, keepdims=True))


def ordered(xp: Any, scores: Array) -> Array:
    """Integers of the same size in the order of the scores: 0 equals -0, and NaN is above all.

    Args:
        xp: torch, numpy or jax.numpy.
        scores: float32 or float64.
    """
    dtype = xp.int64 if scores.dtype == xp.float64 else xp.int32
    bits, limits = scores.view(dtype), xp.iinfo(dtype)
    bits = xp.where(bits == int(limits.min), 0, bits)
    return xp.where(xp.isnan(scores), int(limits.max), turned(xp, bits))


def turned(xp: Any, bits: Array) -> Array:
    """Bits of scores as integers in their order, and the other way round.

    The bits of a negative number grow with its magnitude, so all but the sign are turned.
    """
    limits = xp.iinfo(bits.dtype)
    return bits ^ (bits >> limits.bits - 1 & int(limits.max))
