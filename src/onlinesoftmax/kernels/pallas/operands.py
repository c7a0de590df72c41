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

from ...core.arrays import Array
from ...core.scores import Scores, accumulator
from .ops import Op, Term
from .state import State, in_two


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


class Tile(NamedTuple):
    """Where the elements of a tile lie: in matrices, or in long vectors in which rows begin anywhere.

    Attributes:
        at: Their places.
        inside: Which of them there are.
        row, column: Which rows and columns they are of.
    """

    at: Any
    inside: Array
    row: Array
    column: Array

    @classmethod
    def of_matrix(cls, first: Array, col: Array, shape: tuple[int, int], rows: int, cols: int) -> Tile:
        """Neighbouring columns of neighbouring rows."""
        row, column = first + _lanes(shape, 0), col + _lanes(shape, 1)
        at = (pl.ds(first, shape[0]), pl.ds(col, shape[1]))
        return cls(at, (row < rows) & (column < cols), row, column)

    @classmethod
    def of_body(cls, row: Array, col: Array, block: int, cols: int, vector: int) -> Tile:
        """Neighbouring columns of a ragged row, from its first whole 16 bytes on, as far as they are whole.

        Triton moves 16 bytes at once where it sees that they begin on 16 bytes, and that one mask holds for them.
        """
        begin, body, end = cls._bounds(row, cols, vector)
        at = body + col + _lanes((1, block), 1)
        return cls(at, col + _lanes((1, block), 1) < end - body, jnp.full((1, 1), row), at - begin)

    @classmethod
    def of_edges(cls, row: Array, cols: int, vector: int) -> Tile:
        """What lies before the body of a ragged row, and behind it."""
        begin, body, end = cls._bounds(row, cols, vector)
        lane = _lanes((1, 2 * vector), 1)
        at = jnp.where(lane < vector, begin + lane, end - vector + lane)
        return cls(at, (at < body) | (at >= end) & (at < begin + cols), jnp.full((1, 1), row), at - begin)

    @staticmethod
    def _bounds(row: Array, cols: int, vector: int) -> tuple[Array, Array, Array]:
        """Where a ragged row begins, and where what of it is whole 16 bytes begins and ends."""
        begin, width = row * cols, jnp.int32(vector)
        body, end = (jax.lax.div(at, width) * width for at in (begin + (vector - 1), begin + cols))
        return begin, body, end


def _lanes(shape: tuple[int, int], axis: int) -> Array:
    """0, 1, ... along an axis of a tile, of 32 bits where JAX has 64 too."""
    lanes = jnp.arange(shape[axis], dtype=jnp.int32)
    return lanes[:, None] if axis == 0 else lanes[None, :]


class Operands(NamedTuple):
    """The arrays of an operation, without the arrays.

    Attributes:
        op: The operation.
        spec: What its scores are made of.
        rows, cols: Of x.
        beside: Where an array of scales, bias and mask lie, in that order, as far as they are given.
        accumulator: The dtype that is computed in.
        vector: Elements of 16 bytes where rows begin anywhere in long vectors, and are cut there; else 1.
    """

    op: Op
    spec: Scores
    rows: int
    cols: int
    beside: tuple[Beside, ...]
    accumulator: Any
    vector: int

    @classmethod
    def of(cls, name: str, operands: tuple[Array, ...], spec: Scores, factor: float, vector: int) -> Operands:
        """That of these arrays."""
        x = operands[0]
        outer = x.shape[:-1]
        beside = tuple(Beside.of(t.shape, outer) for t in operands[1 : 1 + spec.arrays])
        exact = operands[-1].dtype.itemsize > 2
        return cls(Op(name, factor, exact), spec, math.prod(outer), x.shape[-1], beside, accumulator(x), vector)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of arrays that lie as x does."""
        return (self.rows, self.cols) if self.vector == 1 else (self.rows * self.cols,)

    @property
    def body(self) -> int:
        """Columns of a row, at most, that its tiles have to cover beside its edges."""
        return self.cols // self.vector * self.vector

    def matrices(self, operands: tuple[Array, ...]) -> list[Array]:
        """The same arrays as matrices; as vectors those of ragged rows, and what has one number a row or for all."""
        found = []
        for i, t in enumerate(operands):
            if self.op.reduces or i <= self.spec.arrays:
                like_x = i == 0 or self.op.sums
                found.append(t.reshape(self.shape) if like_x else t.reshape(-1, t.shape[-1]))
        if not self.op.reduces:
            # m of each row's state, and t over its l in two parts, the second being what the first has rounded away.
            state, t = operands[-2:]
            m, l = state.reshape(-1, 2).T
            with jax.enable_x64(True):
                found += [m, *in_two(t.reshape(-1).astype(jnp.float64) / l.astype(jnp.float64), m.dtype)]
        return found

    def sides(self, refs: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """What a kernel reads and what it writes: one array, or the two parts of a number a row."""
        written = 2 if self.op.per_row else 1
        return refs[:-written], refs[-written:]

    def tile(self, first: Any, col: Any, shape: tuple[int, int]) -> Tile:
        """Neighbouring columns of neighbouring rows; of ragged rows counted from where their bodies begin."""
        # With 64 bits on, Python's numbers would be of 64 beside those of 32.
        first, col = jnp.int32(first), jnp.int32(col)
        if self.vector > 1:
            return Tile.of_body(first, col, shape[1], self.cols, self.vector)
        return Tile.of_matrix(first, col, shape, self.rows, self.cols)

    def edges(self, row: Any, here: Any = True) -> list[Tile]:
        """What tiles leave of a ragged row, if it is wanted here."""
        if self.vector == 1:
            return []
        tile = Tile.of_edges(jnp.int32(row), self.cols, self.vector)
        return [tile._replace(inside=tile.inside & here)]

    def load(self, refs: tuple[Any, ...], tile: Tile) -> tuple[Array, Array, Array]:
        """(a, b, kept) of a tile: the elements, and whether they are there and no mask forbids them."""
        x = pltriton.load(refs[0].at[tile.at], mask=tile.inside, other=0).astype(self.accumulator)
        if self.op.sums:
            b = pltriton.load(refs[1].at[tile.at], mask=tile.inside, other=0).astype(self.accumulator)
            return x, b, tile.inside
        beside = iter(zip(refs[1 : 1 + self.spec.arrays], self.beside, strict=True))
        there = partial(self._beside, tile=tile)
        if self.spec.scale == "array":
            x = x * there(*next(beside)).astype(x.dtype)
        elif self.spec.scale != 1:
            x = x * float(self.spec.scale)
        if self.spec.softcap is not None:
            x = self.spec.softcap * tanh(x / self.spec.softcap)
        if self.spec.bias:
            x = x + there(*next(beside)).astype(x.dtype)
        kept = tile.inside
        if self.spec.mask:
            kept = kept & (there(*next(beside)) != 0)
        return jnp.where(kept, x, -jnp.inf), x, kept

    def term(self, state: State) -> Term:
        """What finishes each row, from its state."""
        m, l = (part.astype(self.accumulator) for part in state)
        return self.op.term((m, l))

    def given(self, refs: tuple[Any, ...], first: Any, rows: int) -> Term:
        """What finishes each row, where none is reduced."""
        inside = self._rows(first, rows)
        return self.op.given(
            *(
                pltriton.load(ref.at[pl.ds(first, rows)], mask=inside, other=0).astype(self.accumulator)[:, None]
                for ref in refs[1 + self.spec.arrays : 4 + self.spec.arrays]
            )
        )

    def store(self, ref: Any, tile: Tile, loaded: tuple[Array, Array, Array], term: Term) -> None:
        """Write a tile of the output."""
        a, b, kept = loaded
        y = self.op.finish(a, b, term)
        if self.spec.mask and not self.op.sums:
            y = jnp.where(kept, y, self.op.masked)
        pltriton.store(ref.at[tile.at], y.astype(ref.dtype), mask=tile.inside)

    def store_parts(self, refs: tuple[Any, ...], first: Any, state: State) -> None:
        """Write the two parts of one number a row."""
        for ref, part in zip(refs, self.op.parts(state), strict=True):
            count = part.size
            values = part.astype(ref.dtype).reshape(count)
            pltriton.store(ref.at[pl.ds(first, count)], values, mask=self._rows(first, count))

    def _rows(self, first: Any, count: int) -> Array:
        """Whether rows from the first on are there."""
        return jnp.int32(first) + jnp.arange(count, dtype=jnp.int32) < self.rows

    def _beside(self, ref: Any, place: Beside, tile: Tile) -> Array:
        """What lies beside a tile: a tile, or a column of one element a row."""
        rows = place.rows(tile.row)
        if place.cols == 1:
            return pltriton.load(ref.at[rows, jnp.zeros_like(rows)], mask=tile.row < self.rows, other=0)
        at = (jnp.broadcast_to(t, tile.inside.shape) for t in (rows, tile.column))
        return pltriton.load(ref.at[tuple(at)], mask=tile.inside, other=0)


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
