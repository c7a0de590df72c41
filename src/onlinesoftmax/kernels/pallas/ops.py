"""What an operation does with the elements of a row: before they are reduced, as they are, and after.

A strategy makes a state of each tile (`of`, `of_tiles`), merges until a row has one, then calls `term` once for the
row and `finish` for each element, or `parts` where the operation gives one number a row.
Elements come in pairs (a, b): a score and nothing, or for a gradient the saved output and that of it.

A gradient needs one sum over its row, and keeps it as the l of a state whose m nobody asks for:
    softmax           factor · y (t - l)        l = Σ y t
    log_softmax       factor · (t - exp(y) l)   l = Σ t
    logsumexp         factor · l exp(z - m)     m and l = t / Σ exp(z - m): given, not reduced
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...core.arrays import Array
from ...core.operations import OPERATIONS
from . import state
from .state import State, Tiles


class Term(NamedTuple):
    """What finishes a row.

    Attributes:
        shift: What is subtracted before exp.
        t: What the operation makes of the row's l.
        low: What t has rounded away, where the output would show it.
    """

    shift: Array
    t: Array
    low: Array | None = None


class Op(NamedTuple):
    """An operation and its number.

    Attributes:
        name: In OPERATIONS.
        factor: What a gradient is multiplied by.
        exact: Whether the output has 24 bits, which 16 would not show.
    """

    name: str
    factor: float = 1.0
    exact: bool = False

    @property
    def sums(self) -> bool:
        """Whether its state holds a plain sum."""
        return OPERATIONS[self.name].inputs > 1

    @property
    def reduces(self) -> bool:
        """Whether a row's state is made from its elements."""
        return OPERATIONS[self.name].reduces

    @property
    def per_row(self) -> bool:
        """Whether a row gives one number."""
        return OPERATIONS[self.name].per_row

    def _part(self, a: Array, b: Array) -> Array:
        return a * b if self.name == "softmax_backward" else b

    def identity(self, shape: tuple[int, ...], dtype: Any) -> State:
        """The states of nothing."""
        if self.sums:
            with jax.enable_x64(self.exact):
                l = jnp.zeros(shape, self.sum_dtype(dtype))
            return l, l
        return state.identity(shape, dtype)

    def sum_dtype(self, dtype: Any) -> Any:
        """What a plain sum is kept in: a gradient subtracts it, which may cancel all but its last places."""
        return jnp.float64 if self.exact else dtype

    def of(self, *pairs: tuple[Array, Array]) -> State:
        """The states of rows in tiles of pairs, or of the only row as numbers.

        As an array of one element it would have a layout, which Triton may give to all that it is made of.
        """
        axis = None if pairs[0][0].shape[0] == 1 else -1
        if self.sums:
            with jax.enable_x64(self.exact):
                l = state.total(*(self._part(a, b).astype(self.sum_dtype(a.dtype)) for a, b in pairs), axis=axis)
            return l, l
        return state.of(*(a for a, _ in pairs), axis=axis, exact=self.exact)

    def of_tiles(self, tiles: Tiles, dtype: Any) -> State:
        """The state of a slice in tiles of pairs, as numbers: m of a dtype, l of `sum_dtype`."""
        if self.sums:
            lanes = tiles.fold(jnp.add, lambda pair: self._part(*(t.astype(dtype) for t in pair)))
            m = jnp.asarray(0, dtype)
        else:
            m, lanes = state.of_tiles(tiles, dtype, lambda pair: pair[0])
        return m, jnp.sum(lanes.astype(self.sum_dtype(dtype)))

    def slice_dtype(self, dtype: Any) -> Any:
        """What the l of a slice in tiles is kept in.

        Softmax and log_softmax hold their elements while they merge, and have no registers for more.
        """
        return dtype if self.name in ("softmax", "log_softmax") else self.sum_dtype(dtype)

    def merge(self, one: State, other: State) -> State:
        """The states of two slices laid end to end."""
        if self.sums:
            with jax.enable_x64(self.exact):
                l = one[1] + other[1]
            return l, l
        return state.merge(one, other)

    def merge_slices(self, slices: Sequence[State]) -> State:
        """The states of slices laid end to end, of which there are a power of two."""
        if self.sums:
            return slices[0][0], state.by_twos([l for _, l in slices])
        return state.merge_slices(slices)

    def merge_all(self, a: State, axis: int | None = -1) -> State:
        """The states of all slices along an axis, or of all of them as numbers."""
        if self.sums:
            with jax.enable_x64(self.exact):
                l = state.total(a[1], axis=axis)
            return l, l
        return state.merge_all(a, axis)

    def packed(self, a: State, dtype: Any) -> State:
        """A state in two numbers of a dtype: a sum, of whose m nobody asks, in what it is rounded to and the rest."""
        if not self.sums:
            return a
        with jax.enable_x64(self.exact):
            return state.in_two(a[1], dtype)

    def unpacked(self, a: State) -> State:
        """The state again."""
        if not self.sums:
            return a
        with jax.enable_x64(self.exact):
            wide = self.sum_dtype(a[0].dtype)
            l = a[0].astype(wide) + a[1].astype(wide)
        return l, l

    def term(self, a: State) -> Term:
        """What of `finish` is the same along a row; NaN where the maximum is infinite, as in jax.nn."""
        m, l = a
        if self.name not in ("softmax", "log_softmax"):
            return Term(m, l)
        t, low = state.reciprocal(l) if self.name == "softmax" else (jnp.log(l), None)
        return Term(state.shift(m), jnp.where(jnp.abs(m) == jnp.inf, jnp.nan, t), low if self.exact else None)

    def given(self, m: Array, t: Array, low: Array) -> Term:
        """That of a row whose state is given, not reduced."""
        return Term(m, t, low if self.exact else None)

    def finish(self, a: Array, b: Array, term: Term) -> Array:
        """The output for the elements (a, b)."""
        s, t, low = term
        if self.name in ("softmax", "logsumexp_backward"):
            e = jnp.exp(a - s)
            y = e * t if low is None else e * t + e * low
            return y if self.name == "softmax" else self.factor * y
        if self.name == "log_softmax":
            return (a - s) - t
        if self.name == "softmax_backward":
            return self.factor * (a * (b - t))
        if self.name == "log_softmax_backward":
            return self.factor * (b - jnp.exp(a) * t)
        raise ValueError(f"{self.name} writes no element")

    def parts(self, a: State) -> State:
        """What is kept of a state: m made finite, so that logsumexp is m + log(l) in every case."""
        return state.shift(a[0]), a[1]

    @property
    def masked(self) -> float:
        """The output where a mask forbids the element."""
        return -jnp.inf if self.name == "log_softmax" else 0.0
