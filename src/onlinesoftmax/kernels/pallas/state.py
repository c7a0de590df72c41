"""The state in Pallas: the recurrence, written once for this language.

A state is the maximum m of a slice of a row and one or more sums of w * exp(z - m) over its scores z.  The first sum
is l, whose weight w is 1.  The functions here handle rescaled sums; `Op` in formulas.py adds plain sums.  These
functions obey the table of laws in tests/laws.py, which NumPy, torch, JAX, Triton and CUDA share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...core.arrays import Array

State = tuple[Array, ...]
"""(m, l) or (m, l, further sums), of one slice or of many."""

Terms = Callable[[Array, Array, Array], tuple[Array, ...]]
"""Makes the terms of the sums from scores z, from w = z - m and from e = exp(w)."""

STEP = 4
"""Tiles that one step of a loop over tiles reads."""


def only_l(z: Array, w: Array, e: Array) -> tuple[Array, ...]:
    """The term of l alone."""
    return (e,)


def identity(shape: tuple[int, ...], dtype: Any, sums: int = 1) -> State:
    """The states of empty slices."""
    return jnp.full(shape, -jnp.inf, dtype), *(jnp.zeros(shape, dtype) for _ in range(sums))


def shift(m: Array) -> Array:
    """The finite number nearest to m, which is subtracted before exp.

    An infinite m would give m - m = NaN.  With the finite shift, a slice of -inf alone has l = 0, and a slice with
    +inf has l = inf, which is what their logsumexp needs.
    """
    return jnp.clip(m, jnp.finfo(m.dtype).min, jnp.finfo(m.dtype).max)


def total(*parts: Array, axis: int | None = -1) -> Array:
    """The sum of parts along an axis, kept with size 1; with axis None the sum of all elements as a number."""
    return reduce(jnp.add, (jnp.sum(v, axis=axis, keepdims=axis is not None) for v in parts))


def reciprocal(l: Array) -> tuple[Array, Array]:
    """1 / l as a number and its rounding error: a GPU's division is wrong by up to two units in the last place."""
    t = 1 / l
    return t, t * _remainder(1, t, l)


def quotient(x: Array, l: Array) -> tuple[Array, Array]:
    """The quotient x / l as a number and its rounding error, as in `reciprocal`."""
    t = x / l
    return t, _remainder(x, t, l) / l


def _remainder(x: Array | int, t: Array, l: Array) -> Array:
    """The remainder x - t * l, where t is about x / l.

    The product is computed exactly, after Dekker (1971): halves of 12 bits multiply without rounding.
    """
    (l_high, l_low), (t_high, t_low) = _halves(l), _halves(t)
    product = l * t
    error = ((l_high * t_high - product) + l_high * t_low + l_low * t_high) + l_low * t_low
    return (x - product) - error


def with_rounding_error(x: Array, dtype: Any) -> tuple[Array, Array]:
    """A number as two numbers of a narrower dtype: the rounded number and the rounding error."""
    high = x.astype(dtype)
    # Infinity has no rounding error, and inf - inf would be NaN.
    return high, jnp.where(jnp.abs(high) < jnp.inf, x - high.astype(x.dtype), 0).astype(dtype)


def _coarse(x: Array) -> Array:
    """Float64 numbers rounded down to multiples of 2**-32: numbers up to 1 then add up without rounding."""
    return jnp.floor(x * 2.0**32) * 2.0**-32


def _halves(x: Array) -> tuple[Array, Array]:
    c = x * (4097.0 if x.dtype == jnp.float32 else 134217729.0)
    high = c - (c - x)
    return high, x - high


def of(*parts: Array, axis: int | None = -1, exact: bool = False, terms: Terms = only_l) -> State:
    """The states of rows of scores.

    Args:
        parts: The scores of the same rows, in tiles that may differ in width.
        axis: The axis of the row, kept with size 1; None for one row, whose state is made of numbers.
        exact: Add float32 terms in float64.
        terms: Makes the terms of the sums.
    """
    m = reduce(jnp.maximum, (jnp.max(x, axis=axis, keepdims=axis is not None) for x in parts))
    s = shift(m)
    found = [terms(x, x - s, jnp.exp(x - s)) for x in parts]
    return m, *(_sum(of_one, axis, exact) for of_one in zip(*found, strict=True))


def _sum(terms: Sequence[Array], axis: int | None, exact: bool) -> Array:
    """The sum of one kind of terms, in their dtype."""
    dtype = terms[0].dtype
    if dtype == jnp.float64:
        # A thread adds its terms one after another, so float64 terms are added in two parts.
        coarse = [_coarse(term) for term in terms]
        rest = (jnp.where(term < jnp.inf, term - high, 0) for term, high in zip(terms, coarse, strict=True))
        return total(*coarse, axis=axis) + total(*rest, axis=axis)
    with jax.enable_x64(exact):
        wide = jnp.float64 if exact else dtype
        return total(*(term.astype(wide) for term in terms), axis=axis).astype(dtype)


class Tiles(NamedTuple):
    """A slice as tiles of one shape.  A tile is made when it is used, so that few tiles are in registers.

    Attributes:
        edges: Functions that make the tiles at the ends of the slice.
        inner: Makes any other tile from its number.
        start: Number of the first inner tile.
        stop: Number after the last inner tile.
    """

    edges: Sequence[Callable[[], Any]]
    inner: Callable[[Any], Any]
    start: int
    stop: int

    def fold(self, combine: Callable[[Any, Any], Any], of: Callable[[Any], Any]) -> Any:
        """Apply `of` to each tile and combine the results.

        The tiles of one step are combined with each other first: fewer roundings then involve the whole sum.
        """
        alone = self.start + (self.stop - self.start) % STEP
        if not self.edges and alone == self.start:
            alone += STEP
        found = reduce(combine, map(of, [*(edge() for edge in self.edges), *map(self.inner, range(self.start, alone))]))
        steps = (self.stop - alone) // STEP
        if not steps:
            return found

        def step(i: Array, found: Any) -> Any:
            return combine(found, reduce(combine, (of(self.inner(alone + i * STEP + k)) for k in range(STEP))))

        return jax.lax.fori_loop(jnp.int32(0), jnp.int32(steps), step, found)


def added(a: Sequence[Array], b: Sequence[Array]) -> tuple[Array, ...]:
    """Plain sums of two slices, merged."""
    return tuple(x + y for x, y in zip(a, b, strict=True))


def of_tiles(tiles: Tiles, dtype: Any, score: Callable[[Any], Array], terms: Terms = only_l) -> State:
    """The state of a slice in tiles: m as a number; of each sum, a tile whose elements add up to the sum."""
    # The maximum of 16-bit scores is exact in 16 bits.
    m = jnp.max(tiles.fold(jnp.maximum, score).astype(dtype))
    s = shift(m)

    def of_tile(tile: Any) -> tuple[Array, ...]:
        z = score(tile).astype(dtype)
        return terms(z, z - s, jnp.exp(z - s))

    return m, *tiles.fold(added, of_tile)


def merge(*slices: State) -> State:
    """The state of slices together; their number is a power of two."""
    m = reduce(jnp.maximum, [m for m, *_ in slices])
    s = shift(m)
    factors = [jnp.exp(m - s) for m, *_ in slices]
    sums = zip(*(sums for _, *sums in slices), strict=True)
    return m, *(pairwise_sum([x * factor for x, factor in zip(parts, factors, strict=True)]) for parts in sums)


def pairwise_sum(terms: Sequence[Array]) -> Array:
    """The sum of terms whose number is a power of two, as a tree: each term is rounded as few times as possible."""
    while len(terms) > 1:
        terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def merge_all(a: State, axis: int | None = -1) -> State:
    """The state of all slices along an axis, kept with size 1; with axis None of all slices, as numbers."""
    keep = axis is not None
    m = jnp.max(a[0], axis=axis, keepdims=keep)
    factors = jnp.exp(a[0] - shift(m))
    return m, *(jnp.sum(x * factors, axis=axis, keepdims=keep) for x in a[1:])
