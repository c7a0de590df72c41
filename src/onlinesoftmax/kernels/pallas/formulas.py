"""The formulas of the operations in Pallas: terms of the sums, element outputs and per-row outputs.

A strategy makes a state of each tile (`of`, `of_tiles`) and merges until a row has one state.  It then calls
`row_constants` once per row and `output` for each element, `row_results` once per row, or both.
Elements come in pairs (a, b): (score, unused), or (saved output, dy) in the gradients of softmax and log_softmax.

The gradients of softmax and log_softmax need one plain sum over their row, and are the formulas of their
declarations, times the factor.  The other gradients are given the state (m, l) and do not reduce:
    logsumexp         t exp(z - m)                 t = factor * dy / l
    with a target     the formula is in loss_formulas.py

The state of an operation is the maximum m with the rescaled sums, followed by the plain sums.  An operation without
rescaled sums has no m in its state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...core.arrays import Array
from ...core.declaration import Accumulator, Operation
from ...ops import OPERATIONS
from . import state
from .loss_formulas import COTANGENTS, GRADIENTS, RESULTS, ROW_OPERANDS, Target
from .state import State, Tiles


class RowConstants(NamedTuple):
    """Values that `output` needs and that are the same along a row.

    Attributes:
        t: log(l) for a logarithm, the plain sum for a gradient with one, a factor of exp(z - m) for the others.
        shift: Number that is subtracted before exp; None in a gradient with a plain sum.
        low: Rounding error of t, where the output would show it; else None.
        target: Column of the target; None, as the next three, in an operation without a target.
        own, spread, slope: Constants of the gradients in loss_formulas.py; None for a spread or a slope of 0.
    """

    t: Array
    shift: Array | None = None
    low: Array | None = None
    target: Array | None = None
    own: Array | None = None
    spread: Array | None = None
    slope: Array | None = None


class Op(NamedTuple):
    """One operation, as one call needs it.

    Attributes:
        name: Name in OPERATIONS.
        outputs: Names of the outputs that are written; empty for those that every call writes.
        factor: Number that a gradient is multiplied by.
        exact: True where the result is float32 or float64, so that sums need float64.
        numbers: Name and value of every operand that is a number.
        row_operand_names: Names of the operands per row, as the kernel reads them.
        target: The targets of the rows that a program reduces; None outside of such a program.
    """

    name: str
    outputs: tuple[str, ...] = ()
    factor: float = 1.0
    exact: bool = False
    numbers: tuple[tuple[str, float], ...] = ()
    row_operand_names: tuple[str, ...] = ()
    target: Target | None = None

    @classmethod
    def for_call(
        cls, name: str, operands: Mapping[str, Array], outputs: tuple[str, ...] = (), factor: float = 1.0,
        numbers: tuple[tuple[str, float], ...] = (),
    ) -> Op:  # fmt: skip
        """The operation of a call on these operands."""
        op = cls(name, outputs, factor, numbers=numbers)
        names = tuple(jax.eval_shape(op.row_operands, dict(operands)))
        return cls(name, outputs, factor, op.result_dtype(operands).itemsize > 2, numbers, names)

    def result_dtype(self, operands: Mapping[str, Array]) -> Any:
        """Dtype of the result: that of x, or that of dy where dy is read per element."""
        return operands[self.operation.element_operands[-1]].dtype

    @property
    def operation(self) -> Operation:
        """The operation's declaration."""
        return OPERATIONS[self.name]

    @property
    def reduces(self) -> bool:
        """True where a row is reduced to a state."""
        return self.operation.reduces

    @property
    def is_logarithm(self) -> bool:
        """True where the output of an element is its score minus constants of the row, not a multiple of its exp."""
        operation = self.operation
        return not (operation.backward or operation.per_row or operation.may_keep_terms)

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the outputs: the output per element, if there is one, and the outputs per row."""
        return self.outputs or self.operation.always

    @property
    def writes_elements(self) -> bool:
        """True where one output has a value for each element."""
        return any(output.kind == "element" for output in self.operation.written(self.written))

    @property
    def row_outputs(self) -> tuple[str, ...]:
        """Names of the outputs with one value per row."""
        return tuple(output.name for output in self.operation.written(self.written) if output.kind == "row")

    @property
    def rescaled(self) -> tuple[str, ...]:
        """Names of the sums that merge with the factors of l."""
        return tuple(total.name for total in self._sums if total.rescaled)

    @property
    def plain(self) -> tuple[str, ...]:
        """Names of the sums that merge by addition."""
        return tuple(total.name for total in self._sums if not total.rescaled)

    @property
    def _sums(self) -> tuple[Accumulator, ...]:
        return self.operation.summed(self.written, [name for name, _ in self.numbers])

    @property
    def scaled_parts(self) -> int:
        """Number of parts of a state that merge with the factors of l: m and the rescaled sums."""
        return len(self.rescaled) + 1 if self.rescaled else 0

    @property
    def packed_parts(self) -> int:
        """Number of parts of a packed state."""
        return self.scaled_parts + 2 * len(self.plain)

    @property
    def neutral(self) -> float:
        """Element that adds nothing to the state."""
        return -jnp.inf if self.rescaled else 0.0

    def terms(self, z: Array, w: Array, e: Array) -> tuple[Array, ...]:
        """Terms of the rescaled sums of scores z, with w = z - m and e = exp(w)."""
        # A score of -inf has the term 0, not -inf * 0.
        return tuple(e if name == "l" else jnp.where(e == 0, 0, w * e) for name in self.rescaled)

    def _recentred(self, slices: Sequence[State], m: Array) -> list[State]:
        """The scaled parts of slices, with zl counted from m, the maximum of all slices, not from each slice's own.

        In the entropy, log(l) - zl / l, scores that are all large then do not cancel.
        """
        if "zl" not in self.rescaled:
            return list(slices)
        found, to = [], state.shift(m)
        for its_m, l, zl in slices:
            moved = (state.shift(its_m) - to).astype(l.dtype) * l
            # An empty slice has no terms to move; its distance from m may be infinite.
            found.append((its_m, l, zl + jnp.where(l == 0, jnp.zeros_like(moved), moved)))
        return found

    def summands(self, a: Array, b: Array) -> tuple[Array, ...]:
        """Terms of the plain sums."""
        if self.target is not None:
            # An element that is not there has the score -inf and a finite logit.
            there = (a > -jnp.inf) | (jnp.abs(b) == jnp.inf)
            return tuple(jnp.where(there, a - self.target.centre, jnp.zeros_like(a)) for _ in self.plain)
        return tuple(self.operation.formula.sums[name](jnp, x=a, dy=b) for name in self.plain)

    def sum_dtype(self, dtype: Any) -> Any:
        """Dtype of plain sums and of all sums that `of_tiles` returns: float64 where `exact`, else `dtype`.

        A gradient subtracts its plain sum, which may cancel all but the last bits.
        """
        return jnp.float64 if self.exact else dtype

    def slice_dtypes(self, dtype: Any) -> tuple[Any, ...]:
        """Dtypes to which a block converts the state of its slice before the blocks exchange states.

        Plain sums, and the rescaled sums of an operation that writes no elements, stay in `sum_dtype`.
        """
        wide = self.sum_dtype(dtype)
        rescaled = dtype if self.writes_elements else wide
        first = (dtype,) if self.rescaled else ()
        return *first, *(rescaled for _ in self.rescaled), *(wide for _ in self.plain)

    def identity(self, shape: tuple[int, ...], dtype: Any) -> State:
        """The states of empty slices."""
        found = state.identity(shape, dtype, len(self.rescaled)) if self.rescaled else ()
        with jax.enable_x64(self.exact):
            return *found, *(jnp.zeros(shape, self.sum_dtype(dtype)) for _ in self.plain)

    def of(self, *pairs: tuple[Array, Array]) -> State:
        """The states of rows in tiles of pairs; a single row has a state of numbers.

        An array of one element would have a layout, which Triton may then give to every array it is made from.
        """
        axis = None if pairs[0][0].shape[0] == 1 else -1
        found: State = ()
        if self.rescaled:
            found = state.of(*(a for a, _ in pairs), axis=axis, exact=self.exact, terms=self.terms)
        if not self.plain:
            return found
        with jax.enable_x64(self.exact):
            wide = self.sum_dtype(pairs[0][0].dtype)
            kinds = zip(*(self.summands(a, b) for a, b in pairs), strict=True)
            return *found, *(state.total(*(x.astype(wide) for x in parts), axis=axis) for parts in kinds)

    def of_tiles(self, tiles: Tiles, dtype: Any) -> State:
        """The state of a slice in tiles of pairs, as numbers: m in a dtype, the sums in `sum_dtype`."""
        found: State = ()
        if self.rescaled:
            found = state.of_tiles(tiles, dtype, lambda pair: pair[0], self.terms)
        sums = found[1:]
        if self.plain:
            sums += tiles.fold(state.added, lambda pair: self.summands(*(t.astype(dtype) for t in pair)))
        return *found[:1], *(jnp.sum(x.astype(self.sum_dtype(dtype))) for x in sums)

    def merge(self, *slices: State) -> State:
        """The state of slices together; their number is a power of two."""
        n = self.scaled_parts
        found: State = ()
        if n:
            whole = reduce(jnp.maximum, [a[0] for a in slices])
            found = state.merge(*self._recentred([a[:n] for a in slices], whole))
        with jax.enable_x64(self.exact and bool(self.plain)):
            return *found, *(state.pairwise_sum(parts) for parts in zip(*(a[n:] for a in slices), strict=True))

    def merge_all(self, a: State, axis: int | None = -1) -> State:
        """The state of all slices along an axis, kept with size 1; with axis None of all slices, as numbers."""
        n = self.scaled_parts
        found: State = ()
        if n:
            [parts] = self._recentred([a[:n]], jnp.max(a[0], axis=axis, keepdims=axis is not None))
            found = state.merge_all(parts, axis)
        with jax.enable_x64(self.exact):
            return *found, *(state.total(x, axis=axis) for x in a[n:])

    def packed(self, a: State, dtype: Any) -> State:
        """A state in numbers of one dtype: a plain sum becomes a rounded sum and its rounding error."""
        n = self.scaled_parts
        with jax.enable_x64(self.exact):
            return *a[:n], *(part for x in a[n:] for part in state.with_rounding_error(x, dtype))

    def unpacked(self, a: State) -> State:
        """The state that `packed` was given."""
        n = self.scaled_parts
        with jax.enable_x64(self.exact):
            wide = self.sum_dtype(a[0].dtype)
            pairs = zip(a[n::2], a[n + 1 :: 2], strict=True)
            return *a[:n], *(high.astype(wide) + low.astype(wide) for high, low in pairs)

    def row_constants(self, a: State) -> RowConstants:
        """Values for `output`, from the state of the row; NaN where the maximum is infinite, as in jax.nn."""
        if not self.rescaled:
            return RowConstants(a[0])
        m, l = a[:2]
        if self.target is not None:
            return self._target_constants(self.target, state.shift(m), l)
        t, low = (jnp.log(l), None) if self.is_logarithm else state.reciprocal(l)
        return RowConstants(jnp.where(jnp.abs(m) == jnp.inf, jnp.nan, t), state.shift(m), low if self.exact else None)

    def _target_constants(self, target: Target, m: Array, l: Array) -> RowConstants:
        """Constants of the gradient that a forward operation writes with its results."""
        rows = {"target": target.column, "m": m, "l": l, "dy": target.dy}
        factor, constants = GRADIENTS[self.operation.gradient_name](rows, target.cols, dict(self.numbers))
        t, low = state.quotient(factor, jnp.where(l < jnp.inf, l, jnp.nan))
        # 0 stays 0, also in a row that holds NaN.
        t, low = (jnp.where(factor == 0, jnp.zeros_like(part), part) for part in (t, low))
        return RowConstants(t, m, low if self.exact else None, target.column, **constants)

    def row_operands(self, operands: Mapping[str, Array]) -> dict[str, Array]:
        """The operands per row as a kernel reads them: vectors, by their names in `RowConstants`.

        A gradient with a given state reads its constants, which are computed here in float64.
        """
        rows = {name: t.reshape(-1) for name, t in operands.items() if name in ROW_OPERANDS}
        if self.reduces:
            return {name: rows[name] for name in ("target", "dy") if name in rows and self.operation.has_target}
        has_target = self.operation.has_target
        with jax.enable_x64(True):
            wide = {name: t if name == "target" else t.astype(jnp.float64) for name, t in rows.items()}
            wide |= {name: self.factor * wide[name] for name in COTANGENTS if name in wide}
            factor, constants = GRADIENTS[self.name](wide, operands["x"].shape[-1], dict(self.numbers))
            # 0 stays 0 in a row without a score above -inf, and in a row with a target always.
            zero = (factor == 0) & (has_target | (wide["l"] == 0))
            l = jnp.where(wide["l"] < jnp.inf, wide["l"], jnp.nan) if has_target else wide["l"]
            t, low = state.with_rounding_error(jnp.where(zero, 0, factor / l), rows["m"].dtype)
            narrow = {name: value.astype(low.dtype) for name, value in constants.items()}
        target = {"target": rows["target"]} if has_target else {}
        return {**target, "shift": rows["m"], "t": t, "low": low, **narrow}

    def given_constants(self, values: Sequence[Array]) -> RowConstants:
        """Values for `output` of a row whose state is given, not reduced.

        Args:
            values: One value for each name in `row_operand_names`.
        """
        given = dict(zip(self.row_operand_names, values, strict=True))
        return RowConstants(**given if self.exact else given | {"low": None})

    def at_target(self, column: Array, z_target: Array, cols: int, dy: Array | None = None) -> Op:
        """The operation for rows with these targets, and with the gradients dy of their losses if there are any."""
        return self._replace(target=Target(column, z_target, cols, dy if dy is None else self.factor * dy))

    def output(self, a: Array, b: Array, constants: RowConstants, column: Array | None = None) -> Array:
        """The output for the elements (a, b); an operation with a target needs their columns."""
        t, s, low = constants.t, constants.shift, constants.low
        if s is None:
            [total] = self.plain
            return self.factor * self.operation.formula.outputs["y"](jnp, x=a, dy=b, **{total: t})
        if self.is_logarithm:
            return (a - s) - t
        e = jnp.exp(a - s)
        y = e * t if low is None else e * t + e * low
        return y if constants.target is None else self._with_target(y, a - s, e, constants, column == constants.target)

    def _with_target(self, y: Array, w: Array, e: Array, constants: RowConstants, hit: Any) -> Array:
        """The gradient in scores, from its part y that all columns have; `hit` is True at the target."""
        own: Any
        t, own, spread, slope = constants.t, constants.own, constants.spread, constants.slope
        # A row whose incoming gradients are 0 gives 0, even if it holds NaN.  Mosaic selects by arrays alone.
        y = jnp.where(jnp.broadcast_to(t, y.shape) == 0, jnp.zeros_like(y), y)
        if slope is not None:
            y = y - jnp.where(e == 0, jnp.zeros_like(w), w) * e * slope
        y = y - jnp.where(hit, jnp.broadcast_to(own, y.shape), jnp.zeros_like(y))
        return y if spread is None else y - spread

    def row_results(self, a: State) -> tuple[Array, ...]:
        """The outputs per row, in the order of `row_outputs`."""
        if self.target is not None:
            # The plain sums are wider than m.
            a = tuple(part.astype(a[0].dtype) for part in a)
        return tuple(self.row_output(name, a) for name in self.row_outputs)

    def row_output(self, name: str, a: State) -> Array:
        """One output per row, from the state.

        The entropy is NaN where l is 0 or the maximum is infinite: such a row has no softmax.
        """
        parts = dict(zip(("m", *self.rescaled, *self.plain), a, strict=True))
        # With a finite m, m + log(l) is the logsumexp in every case.
        m, l = state.shift(parts["m"]), parts["l"]
        if name in ("m", "l"):
            return m if name == "m" else l
        if name == "entropy":
            return jnp.log(l) - parts["zl"] / l
        if self.target is not None and name == self.operation.result.name:
            return RESULTS[self.name](self.target, m, l, parts.get("wz"), **dict(self.numbers))
        return m + jnp.log(l)

    @property
    def masked(self) -> float:
        """The output where the mask is False."""
        return -jnp.inf if self.is_logarithm else 0.0
