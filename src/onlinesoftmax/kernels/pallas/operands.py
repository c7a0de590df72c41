"""The arrays of a kernel: where the elements of a tile lie in each of them, and how scores are made and outputs stored.

Kernels see matrices.  An array that is broadcast along some of x's outer axes keeps its own rows, and the kernel
computes which of them belongs to a row of x; so a mask that all heads share is never written out for each head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ...core.arrays import Array, accumulator
from ...core.options import Functions, ScoreOptions, scores, softcap_slope
from .formulas import Op, RowConstants
from .state import State


class RowMap(NamedTuple):
    """The rows of an array that is broadcast to x.

    Attributes:
        cols: Number of columns: as many as x has, or 1.
        steps: For every outer axis of x along which the array is not broadcast: (rows of x from one index to the next,
            size of the axis, rows of the array from one index to the next).
    """

    cols: int
    steps: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, shape: tuple[int, ...], outer: tuple[int, ...]) -> RowMap:
        """The map for an array of this shape and an x with these outer axes."""
        steps, mine, its = [], 1, 1
        for size, own in zip(outer[::-1], shape[-2::-1], strict=True):
            if own > 1:
                steps.append((its, size, mine))
            its, mine = its * size, mine * own
        return cls(shape[-1], tuple(steps))

    def rows(self, row: Array) -> Array:
        """The array's rows for these rows of x."""
        index = jnp.zeros_like(row)
        for step, size, own in self.steps:
            index = index + jax.lax.rem(jax.lax.div(row, jnp.int32(step)), jnp.int32(size)) * jnp.int32(own)
        return index


class Tile(NamedTuple):
    """The elements of a tile, in a matrix; unaligned rows lie in one long vector.

    Attributes:
        at: Index of the elements.
        inside: True for the elements that exist and belong to this tile.
        row, column: Row and column of each element.
    """

    at: Any
    inside: Array
    row: Array
    column: Array

    @classmethod
    def of_matrix(cls, first: Array, col: Array, shape: tuple[int, int], rows: int, cols: int) -> Tile:
        """A rectangle of a matrix: `shape` elements from row `first` and column `col` on."""
        row, column = first + _lanes(shape, 0), col + _lanes(shape, 1)
        at = (pl.ds(first, shape[0]), pl.ds(col, shape[1]))
        return cls(at, (row < rows) & (column < cols), row, column)

    @classmethod
    def of_body(cls, row: Array, col: Array, block: int, cols: int, vector: int) -> Tile:
        """`block` elements of the aligned body of an unaligned row, from the body's column `col` on.

        Triton moves 16 bytes at once where it can prove that they begin on 16 bytes and share one mask value.
        """
        begin, body, end = cls._bounds(row, cols, vector)
        at = body + col + _lanes((1, block), 1)
        return cls(at, col + _lanes((1, block), 1) < end - body, jnp.full((1, 1), row), at - begin)

    @classmethod
    def of_edges(cls, row: Array, cols: int, vector: int, enabled: Any) -> Tile:
        """The head and the tail of an unaligned row: the elements before and after its aligned body.

        It has no element where `enabled` is False.
        """
        begin, body, end = cls._bounds(row, cols, vector)
        lane = _lanes((1, 2 * vector), 1)
        at = jnp.where(lane < vector, begin + lane, end - vector + lane)
        inside = (at < body) | (at >= end) & (at < begin + cols)
        return cls(at, inside & enabled, jnp.full((1, 1), row), at - begin)

    @staticmethod
    def _bounds(row: Array, cols: int, vector: int) -> tuple[Array, Array, Array]:
        """Beginning of an unaligned row, and beginning and end of its aligned body, in the long vector."""
        begin, width = row * cols, jnp.int32(vector)
        body, end = (jax.lax.div(at, width) * width for at in (begin + (vector - 1), begin + cols))
        return begin, body, end


def _lanes(shape: tuple[int, int], axis: int) -> Array:
    """0, 1, ... along an axis of a tile, as 32-bit integers also where JAX's default is 64."""
    lanes = jnp.arange(shape[axis], dtype=jnp.int32)
    return lanes[:, None] if axis == 0 else lanes[None, :]


class Operands(NamedTuple):
    """The operands and outputs of one launch, without their data.

    Attributes:
        op: The operation.
        options: The score options; ARRAY stands for an array.
        rows, cols: Size of x as a matrix.
        maps: Rows of each array of the options, in the order of `options.arrays`.
        accumulator: Dtype of the computation.
        vector: Elements of 16 bytes where unaligned rows are split into head, body and tail; else 1.
    """

    op: Op
    options: ScoreOptions
    rows: int
    cols: int
    maps: tuple[RowMap, ...]
    accumulator: Any
    vector: int

    @classmethod
    def of(cls, op: Op, operands: Mapping[str, Array], options: ScoreOptions, vector: int) -> Operands:
        """The description of these arrays: the inputs, the arrays of the options, and a given state."""
        x = operands["x"]
        outer = x.shape[:-1]
        maps = tuple(RowMap.of(operands[name].shape, outer) for name in options.arrays)
        return cls(op, options, math.prod(outer), x.shape[-1], maps, accumulator(x), vector)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in which a kernel sees arrays of x's shape."""
        return (self.rows, self.cols) if self.vector == 1 else (self.rows * self.cols,)

    @property
    def body(self) -> int:
        """Columns that the tiles of a row must cover; the head and the tail of an unaligned row are not among them."""
        return self.cols // self.vector * self.vector

    def matrices(self, operands: Mapping[str, Array]) -> list[Array]:
        """The operands as a kernel takes them: matrices, and vectors for unaligned rows and per-row values."""
        matrices = [operands[name].reshape(self.shape) for name in self.op.operation.element_operands]
        beside = [operands[name] for name in self.options.arrays]
        per_row = self.op.row_operands(operands)
        vectors = [per_row[name] for name in self.op.row_operand_names]
        return [*matrices, *(t.reshape(-1, t.shape[-1]) for t in beside), *vectors]

    def outputs(self, x: Any, dtype: Any) -> list[jax.ShapeDtypeStruct]:
        """The arrays that a kernel writes: per element first, then per row.

        Args:
            x: Dtype of the input.
            dtype: Dtype of the main output.
        """
        written = self.op.operation.written(self.op.written)
        return [
            jax.ShapeDtypeStruct(
                self.shape if output.kind == "element" else (self.rows,), output.dtype_of(x.name, dtype.name)
            )
            for output in sorted(written, key=lambda output: output.kind)
        ]

    def sides(self, refs: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """The references of a kernel: operands, output per element (one or none), outputs per row."""
        per_row = len(refs) - len(self.op.row_outputs)
        per_element = per_row - int(self.op.writes_elements)
        return refs[:per_element], refs[per_element:per_row], refs[per_row:]

    def tile(self, first: Any, col: Any, shape: tuple[int, int]) -> Tile:
        """`shape` elements from a row and a column on; in an unaligned row, from a column of its body on."""
        # With 64-bit types on, Python's integers would become 64-bit beside 32-bit ones.
        first, col = jnp.int32(first), jnp.int32(col)
        if self.vector > 1:
            return Tile.of_body(first, col, shape[1], self.cols, self.vector)
        return Tile.of_matrix(first, col, shape, self.rows, self.cols)

    def edges(self, row: Any, enabled: Any = True) -> list[Tile]:
        """The tile of the head and the tail of an unaligned row; it has no element where `enabled` is False."""
        if self.vector == 1:
            return []
        return [Tile.of_edges(jnp.int32(row), self.cols, self.vector, enabled)]

    def load(self, refs: tuple[Any, ...], tile: Tile) -> tuple[Array, Array, Array]:
        """(a, b, kept) of a tile: the pairs of formulas.py, and True where an element exists and no mask forbids it."""
        x, *more = (
            pltriton.load(ref.at[tile.at], mask=tile.inside, other=0).astype(self.accumulator)
            for ref in refs[: self.op.operation.inputs]
        )
        if not self.op.operation.scores:
            return x, more[0], tile.inside
        z, kept = self.make_scores(x, refs, tile)
        return z, x, kept

    def make_scores(self, x: Array, refs: tuple[Any, ...], tile: Tile) -> tuple[Array, Array]:
        """The scores of logits, -inf where there is no element or a mask forbids it; and False there."""
        inputs, options = self.op.operation.inputs, self.options
        arrays = [self._beside(ref, rows, tile) for ref, rows in zip(refs[inputs:], self.maps, strict=False)]
        options = options.filled(arrays)
        kept = tile.inside if options.mask is None else tile.inside & (options.mask.astype(jnp.int32) != 0)
        return scores(FUNCTIONS, x, ScoreOptions(options.scale, options.softcap, options.bias, kept)), kept

    def row_constants(self, state: State) -> RowConstants:
        """Values for the element output of each row, from its state."""
        op, state = self.op, tuple(part.astype(self.accumulator) for part in state)
        if op.target is not None and op.target.dy is not None and self.options.mask is not None:
            # A row that the mask leaves without a class counts for nothing.
            dy = jnp.where(state[1] == 0, jnp.zeros_like(op.target.dy), op.target.dy)
            op = op._replace(target=op.target._replace(dy=dy))
        return op.row_constants(state)

    def given_state(self, refs: tuple[Any, ...], first: Any, rows: int) -> RowConstants:
        """The same where the state of each row is given."""
        inside = self._rows(first, rows)
        loaded = [
            pltriton.load(ref.at[pl.ds(first, rows)], mask=inside, other=0)[:, None]
            for ref in self.row_operand_refs(refs)
        ]
        floating = [value if value.dtype == jnp.int32 else value.astype(self.accumulator) for value in loaded]
        return self.op.given_constants(floating)

    def row_operand_refs(self, refs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The references of the operands per row."""
        at = self.op.operation.inputs + len(self.maps)
        return refs[at : at + len(self.op.row_operand_names)]

    def at_targets(self, refs: tuple[Any, ...], first: Any, rows: int) -> Operands:
        """The operands, with the targets of the rows from `first` on where the operation reduces rows with targets.

        The targets of several rows are columns of a tile; that of a single row is a number, as its state is.
        """
        if not (self.op.reduces and self.op.row_operand_names):
            return self
        row = jnp.int32(first) + _lanes((rows, 1), 0) if rows > 1 else jnp.int32(first)
        inside = row < self.rows
        row_values = {
            name: pltriton.load(ref.at[row], mask=inside, other=0)
            for name, ref in zip(self.op.row_operand_names, self.row_operand_refs(refs), strict=True)
        }
        column, dy = row_values["target"], row_values.get("dy")
        there = jnp.clip(column, 0, self.cols - 1)
        at = (row, there) if self.vector == 1 else row * self.cols + there
        z_target, _, _ = self.load(refs, Tile(at, inside, row, there))
        return self._replace(op=self.op.at_target(column, z_target, self.cols, dy))

    def store(self, ref: Any, tile: Tile, loaded: tuple[Array, Array, Array], constants: RowConstants) -> None:
        """Write a tile of the element output."""
        a, b, kept = loaded
        y = self.op.output(a, b, constants, tile.column)
        if self.op.target is not None and self.options.softcap is not None:
            # A forward operation writes the gradient in the logits b.  A row that counts for nothing may hold NaN.
            y = jnp.where(y == 0, jnp.zeros_like(y), y * softcap_slope(FUNCTIONS, b, self.options))
        if self.options.mask is not None:
            y = jnp.where(kept, y, self.op.masked)
        pltriton.store(ref.at[tile.at], y.astype(ref.dtype), mask=tile.inside)

    def store_rows(self, refs: tuple[Any, ...], first: Any, state: State, enabled: Any = True) -> None:
        """Write the outputs per row from row `first` on, if any; nothing where `enabled` is False."""
        for ref, values in zip(refs, self.op.row_results(state) if refs else (), strict=True):
            count = values.size
            inside = self._rows(first, count) if enabled is True else self._rows(first, count) & enabled
            pltriton.store(ref.at[pl.ds(first, count)], values.astype(ref.dtype).reshape(count), mask=inside)

    def _rows(self, first: Any, count: int) -> Array:
        """True for the rows from `first` on that exist."""
        return jnp.int32(first) + jnp.arange(count, dtype=jnp.int32) < self.rows

    def _beside(self, ref: Any, rows: RowMap, tile: Tile) -> Array:
        """The elements of a broadcast array for a tile: a tile, or one element per row."""
        row = rows.rows(tile.row)
        if rows.cols == 1:
            return pltriton.load(ref.at[row, jnp.zeros_like(row)], mask=tile.row < self.rows, other=ref.dtype.type(0))
        at = (jnp.broadcast_to(t, tile.inside.shape) for t in (row, tile.column))
        return pltriton.load(ref.at[tuple(at)], mask=tile.inside, other=ref.dtype.type(0))


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


FUNCTIONS = Functions(tanh, jnp.where, lambda t, dtype: t.astype(dtype))
"""The functions with which a kernel computes the score formula of core/options.py."""
