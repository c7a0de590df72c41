"""The state (m, l) in Pallas: the recurrence, written once for this language.

Every strategy in this folder reduces with `of`, `of_tiles`, `merge` and `merge_all`, and nothing else.  The laws these
functions obey are the table in tests/laws.py, shared with NumPy, torch, JAX, Triton and CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...core.arrays import Array

State = tuple[Array, Array]
"""(m, l), of one slice or of many."""

STEP = 4
"""Tiles that a step of a loop over tiles takes."""


def identity(shape: tuple[int, ...], dtype: Any) -> State:
    """The states of nothing."""
    return jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype)


def shift(m: Array) -> Array:
    """What is subtracted before exp: the finite number nearest to m.

    An infinite m would give m - m = NaN; so shifted, a slice of nothing but -inf has l = 0, and one with +inf has
    l = inf, which is what their logsumexp needs.
    """
    return jnp.clip(m, jnp.finfo(m.dtype).min, jnp.finfo(m.dtype).max)


def total(*parts: Array, axis: int | None = -1) -> Array:
    """The sum of parts along an axis, which it keeps with size 1, or of all of them as a number."""
    return reduce(jnp.add, (jnp.sum(v, axis=axis, keepdims=axis is not None) for v in parts))


def reciprocal(l: Array) -> tuple[Array, Array]:
    """1 / l in two parts, the second being what the first leaves over: GPUs divide to two units in the last place.

    It is computed exactly, after Dekker (1971): halves of 12 bits multiply without rounding.
    """
    t = 1 / l
    (l_high, l_low), (t_high, t_low) = _halves(l), _halves(t)
    product = l * t
    error = ((l_high * t_high - product) + l_high * t_low + l_low * t_high) + l_low * t_low
    return t, t * ((1 - product) - error)


def in_two(x: Array, dtype: Any) -> tuple[Array, Array]:
    """A wider number in two of a dtype: what it is rounded to, and the rest."""
    high = x.astype(dtype)
    # Infinity is whole.
    return high, jnp.where(jnp.abs(high) < jnp.inf, x - high.astype(x.dtype), 0).astype(dtype)


def _coarse(x: Array) -> Array:
    """What of numbers of float64 up to 1 is whole 2**-32, so that their sum is exact."""
    return jnp.floor(x * 2.0**32) * 2.0**-32


def _halves(x: Array) -> tuple[Array, Array]:
    c = x * (4097.0 if x.dtype == jnp.float32 else 134217729.0)
    high = c - (c - x)
    return high, x - high


def of(*parts: Array, axis: int | None = -1, exact: bool = False) -> State:
    """The states of rows in parts, along an axis, which they keep with size 1, or of all of them as numbers.

    Exact adds terms in float64, and those of float64 in two parts: a thread adds all of its own one after another.
    """
    m = reduce(jnp.maximum, (jnp.max(x, axis=axis, keepdims=axis is not None) for x in parts))
    s = shift(m)
    terms = [jnp.exp(x - s) for x in parts]
    if m.dtype == jnp.float64:
        coarse = [_coarse(term) for term in terms]
        rest = (jnp.where(term < jnp.inf, term - high, 0) for term, high in zip(terms, coarse, strict=True))
        return m, total(*coarse, axis=axis) + total(*rest, axis=axis)
    with jax.enable_x64(exact):
        wide = jnp.float64 if exact else m.dtype
        return m, total(*(term.astype(wide) for term in terms), axis=axis).astype(m.dtype)


class Tiles(NamedTuple):
    """A slice in tiles of one shape, each of which is made where it is used rather than held.

    Attributes:
        edges: Makes those that are like no other.
        inner: Makes the others, from their number.
        start: The first of these.
        stop: The number after the last.
    """

    edges: Sequence[Callable[[], Any]]
    inner: Callable[[Any], Any]
    start: int
    stop: int

    def fold(self, combine: Callable[[Array, Array], Array], of: Callable[[Any], Array]) -> Array:
        """What is made of each tile, combined: in a loop, so that few are in registers at a time.

        Those of a step are combined first: of the roundings of a sum, few are then of all that came before.
        """
        alone = self.start + (self.stop - self.start) % STEP
        if not self.edges and alone == self.start:
            alone += STEP
        found = reduce(combine, map(of, [*(edge() for edge in self.edges), *map(self.inner, range(self.start, alone))]))
        steps = (self.stop - alone) // STEP
        if not steps:
            return found

        def step(i: Array, found: Array) -> Array:
            return combine(found, reduce(combine, (of(self.inner(alone + i * STEP + k)) for k in range(STEP))))

        folded: Array = jax.lax.fori_loop(jnp.int32(0), jnp.int32(steps), step, found)
        return folded


def of_tiles(tiles: Tiles, dtype: Any, score: Callable[[Any], Array]) -> State:
    """The state of the scores of a slice: m as a number of a dtype, l as what each place in a tile adds to it."""
    # A maximum of 16 bits is as exact as of 32.
    m = jnp.max(tiles.fold(jnp.maximum, score).astype(dtype))
    s = shift(m)
    return m, tiles.fold(jnp.add, lambda tile: jnp.exp(score(tile).astype(dtype) - s))


def merge(a: State, b: State) -> State:
    """The states of two slices laid end to end."""
    m = jnp.maximum(a[0], b[0])
    s = shift(m)
    return m, a[1] * jnp.exp(a[0] - s) + b[1] * jnp.exp(b[0] - s)


def merge_slices(slices: Sequence[State]) -> State:
    """The states of slices laid end to end, of which there are a power of two."""
    m = reduce(jnp.maximum, [m for m, _ in slices])
    s = shift(m)
    return m, by_twos([l * jnp.exp(m - s) for m, l in slices])


def by_twos(terms: Sequence[Array]) -> Array:
    """The sum of a power of two of terms, each of which is rounded as few times as can be."""
    while len(terms) > 1:
        terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def merge_all(a: State, axis: int | None = -1) -> State:
    """The states of all the slices along an axis, which they keep with size 1, or of all of them as numbers."""
    keep = axis is not None
    m = jnp.max(a[0], axis=axis, keepdims=keep)
    return m, jnp.sum(a[1] * jnp.exp(a[0] - shift(m)), axis=axis, keepdims=keep)
