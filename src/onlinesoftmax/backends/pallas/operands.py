"""What a kernel reads: the arrays, which of their rows belongs to which, and the elements as an operation wants them.

Kernels see matrices.  An array that is broadcast along some of x's outer axes keeps its own rows, and a kernel
counts which of them goes with a row of x; so a mask of all heads is never written out for each.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ...arrays import Array
from ...scores import Scores, accumulator
from .ops import Op, Term
from .state import State


class Beside(NamedTuple):
    """Where an array lies beside x.

    Attributes:
        cols: Its columns: as many as x has, or 1.
        steps: For every outer axis of x, (rows of x from one index to the next, its size, rows of this array so).
    """

    cols: int
    steps: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, shape: tuple[int, ...], outer: tuple[int, ...]) -> Beside:
        """That of an array of this shape beside outer axes of x."""
        steps, mine, its = [], 1, 1
        for size, own in zip(outer[::-1], shape[-2::-1], strict=True):
            if own > 1:
                steps.append((its, size, mine))
            its, mine = its * size, mine * own
        return cls(shape[-1], tuple(steps))

    def rows(self, row: Array) -> Array:
        """Which of its rows go with these rows of x."""
        index = jnp.zeros_like(row)
        for step, size, own in self.steps:
            index = index + jax.lax.rem(jax.lax.div(row, jnp.int32(step)), jnp.int32(size)) * jnp.int32(own)
        return index


class Operands(NamedTuple):
    """The arrays of an operation, without the arrays.

    Attributes:
        op: The operation.
        spec: What its scores are made of.
        rows, cols: Of x.
        beside: Where an array of scales, bias and mask lie, in that order, as far as they are given.
        accumulator: The dtype that is computed in.
    """

    op: Op
    spec: Scores
    rows: int
    cols: int
    beside: tuple[Beside, ...]
    accumulator: Any

    @classmethod
    def of(cls, name: str, operands: tuple[Array, ...], spec: Scores, factor: float) -> Operands:
        """That of these arrays."""
        x = operands[0]
        outer = x.shape[:-1]
        beside = tuple(Beside.of(t.shape, outer) for t in operands[1 : 1 + spec.arrays])
        exact = operands[-1].dtype.itemsize > 2
        return cls(Op(name, factor, exact), spec, math.prod(outer), x.shape[-1], beside, accumulator(x))

    def matrices(self, operands: tuple[Array, ...]) -> list[Array]:
        """The same arrays as matrices; what has one number a row, or for all, as a vector."""
        found = []
        for i, t in enumerate(operands):
            if self.op.reduces or i <= self.spec.arrays:
                found.append(t.reshape(-1, t.shape[-1]))
        if not self.op.reduces:
            # m of each row's state, and t over its l in two parts, the second being what the first has rounded away.
            state, t = operands[-2:]
            m, l = state.reshape(-1, 2).T
            with jax.enable_x64(True):
                quotient = t.reshape(-1).astype(jnp.float64) / l.astype(jnp.float64)
                high = quotient.astype(m.dtype)
                low = (quotient - high.astype(jnp.float64)).astype(m.dtype)
                # Infinity is whole.
                found += [m, high, jnp.where(jnp.isnan(low), 0, low)]
        return found

    def sides(self, refs: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """What a kernel reads and what it writes: one array, or the two parts of a number a row."""
        written = 2 if self.op.per_row else 1
        return refs[:-written], refs[-written:]

    def load(self, refs: tuple[Any, ...], first: Any, col: Any, shape: tuple[int, int]) -> tuple[Array, Array, Array]:
        """(a, b, kept) of a tile: the elements, and whether they are there and no mask forbids them."""
        at, inside, row, column = self._tile(first, col, shape)
        x = pltriton.load(refs[0].at[at], mask=inside, other=0).astype(self.accumulator)
        if self.op.sums:
            b = pltriton.load(refs[1].at[at], mask=inside, other=0).astype(self.accumulator)
            return x, b, inside
        beside = iter(zip(refs[1 : 1 + self.spec.arrays], self.beside, strict=True))
        there = partial(self._beside, row=row, column=column, inside=inside)
        if self.spec.scale == "array":
            x = x * there(*next(beside)).astype(x.dtype)
        elif self.spec.scale != 1:
            x = x * float(self.spec.scale)
        if self.spec.softcap is not None:
            x = self.spec.softcap * tanh(x / self.spec.softcap)
        if self.spec.bias:
            x = x + there(*next(beside)).astype(x.dtype)
        kept = inside
        if self.spec.mask:
            kept = inside & (there(*next(beside)) != 0)
        return jnp.where(kept, x, -jnp.inf), x, kept

    def given(self, refs: tuple[Any, ...], first: Any, rows: int) -> Term:
        """What finishes each row, where none is reduced."""
        inside = self._rows(first, rows)[1]
        return self.op.given(
            *(
                pltriton.load(ref.at[pl.ds(first, rows)], mask=inside, other=0).astype(self.accumulator)[:, None]
                for ref in refs[1 + self.spec.arrays : 4 + self.spec.arrays]
            )
        )

    def store(self, ref: Any, first: Any, col: Any, tile: tuple[Array, Array, Array], term: Term) -> None:
        """Write a tile of the output."""
        a, b, kept = tile
        at, inside, _, _ = self._tile(first, col, a.shape)
        y = self.op.finish(a, b, term)
        if self.spec.mask and not self.op.sums:
            y = jnp.where(kept, y, self.op.masked)
        pltriton.store(ref.at[at], y.astype(ref.dtype), mask=inside)

    def store_parts(self, refs: tuple[Any, ...], first: Any, state: State) -> None:
        """Write the two parts of one number a row."""
        for ref, part in zip(refs, self.op.parts(state), strict=True):
            inside = self._rows(first, part.shape[0])[1]
            pltriton.store(ref.at[pl.ds(first, part.shape[0])], part[:, 0].astype(ref.dtype), mask=inside)

    def _rows(self, first: Any, count: int) -> tuple[Array, Array]:
        """Rows from the first on, and whether they are there."""
        row = jnp.int32(first) + jnp.arange(count, dtype=jnp.int32)
        return row, row < self.rows

    def _tile(self, first: Any, col: Any, shape: tuple[int, int]) -> tuple[Any, Array, Array, Array]:
        # With 64 bits on, Python's numbers would be of 64 beside those of 32.
        first, col = jnp.int32(first), jnp.int32(col)
        row, is_row = self._rows(first, shape[0])
        column = col + jnp.arange(shape[1], dtype=jnp.int32)
        inside = is_row[:, None] & (column < self.cols)[None, :]
        return (pl.ds(first, shape[0]), pl.ds(col, shape[1])), inside, row, column

    def _beside(self, ref: Any, place: Beside, row: Array, column: Array, inside: Array) -> Array:
        """What lies beside a tile: a tile, or a column of one element a row."""
        rows = place.rows(row)[:, None]
        if place.cols == 1:
            return pltriton.load(ref.at[rows, jnp.zeros_like(rows)], mask=(row < self.rows)[:, None], other=0)
        at = (jnp.broadcast_to(rows, inside.shape), jnp.broadcast_to(column[None, :], inside.shape))
        return pltriton.load(ref.at[at], mask=inside, other=0)


def tanh(x: Array) -> Array:
    """Tanh to a few units in the last place: a rational function near 0, exp farther out (Cephes, tanhf.c)."""
    if x.dtype == jnp.float64:
        return jnp.tanh(x)
    z = x * x
    near = x + x * z * _polynomial(z)
    far = 1 - 2 / (jnp.exp(2 * jnp.abs(x)) + 1)
    return jnp.where(jnp.abs(x) < 0.625, near, jnp.sign(x) * far)


def _polynomial(z: Array) -> Array:
    p = z * -5.70498872745e-3 + 2.06390887954e-2
    p = z * p - 5.37397155531e-2
    p = z * p + 1.33314422036e-1
    return z * p - 3.33332819422e-1
