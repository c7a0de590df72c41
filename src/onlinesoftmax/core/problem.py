"""The problem: the properties of a task on which the choice of a plan depends."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property

from .declaration import Operation, Output, accumulator_dtype, declared
from .device import CACHE_LINE
from .options import SCORE_OPTIONS
from .task import BYTES, ITEMSIZE, Task, WithFacts
from .view import power_of_two_divisor
from .wrong_calls import unknown

NUMBERS = "numbers"
"""Stands for the score options that are no tensor: a plan is the same for each of them."""

LONG_COLS = 1 << 19
"""Columns from which rows are divided over many blocks (strategy `grid`), each of which begins on a cache line."""


@dataclass(frozen=True)
class Problem(WithFacts):
    """The properties of a task on which a plan depends.

    Attributes:
        operation: Name of a declaration.
        rows: Number of rows.
        cols: Elements of a row.
        dtype: Dtype of the input.
        out_dtype: Dtype of the main output; None for the dtype of the input.
        outputs: Names of the outputs that are written; empty for those that every call writes.
        interleaved: Where a row's elements are not neighbours: the number of rows whose elements of one column are, as
            32 for the rows along the middle dimension of a tensor of 8 x 512 x 32.  0 where a row's elements are
            neighbours.
        unit: Power of two, in elements, that divides the row length and the offset of every row; None to take it from
            cols.
        can_peel: True where each row has the same alignment in x, dy and the element output, so that an unaligned row
            can be split into head, body and tail with an aligned body in every tensor; False for calls that are
            batch-invariant.
        same_dtype: True where every tensor that is read element by element has the dtype of x and adjacent columns.
        packed: True where the rows of every tensor lie one after another, without gaps (`Task.packed`); False for
            calls that are batch-invariant.
        sharded: True where the columns are a part of longer rows (`Task.part`).
        given: Names of the tensors that are read, and that not every call reads; NUMBERS too, if
            score options are given and none of them is a tensor.
        bias_bytes: Bytes of one element of the bias, which a kernel holds on chip beside the input; 0 without a bias.
        logit_bytes: Bytes of one element of the logits that a gradient reads for the slope of the softcap while it
            writes; 0 where they are not read.
        all_bytes: Bytes of everything that is read, each element counted once.  None: `read_bytes` computes them, for
            contiguous operands of the dtypes of the declaration, and for tensors of the score options that are not
            broadcast.
    """

    # Operation, sizes and dtype.
    operation: str
    rows: int
    cols: int
    dtype: str = "float32"
    out_dtype: str | None = None
    outputs: tuple[str, ...] = ()
    # How rows lie in memory.
    interleaved: int = 0
    unit: int | None = None
    can_peel: bool = True
    same_dtype: bool = True
    packed: bool = True
    # Operands that not every call reads.
    sharded: bool = False
    given: tuple[str, ...] = ()
    bias_bytes: int = 0
    logit_bytes: int = 0
    all_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.operation not in declared():
            raise ValueError(unknown("operation", self.operation, declared()))
        for name in filter(None, (self.dtype, self.out_dtype)):
            if name not in ITEMSIZE:
                raise ValueError(unknown("dtype", name, ITEMSIZE))
        if self.rows < 0 or self.cols < 0:
            raise ValueError(f"rows and cols must not be negative, got {self.rows} x {self.cols}")
        super().__post_init__()

    @classmethod
    def of(cls, task: Task, batch_invariant: bool = False) -> Problem:
        """The problem of a task.

        Args:
            task: The task.
            batch_invariant: True where a row's bits must not depend on the rows beside it.  An unaligned row is then
                neither split nor packed: the order of its sum would depend on where it and its result begin.
        """
        tensors, dtypes, operation, aligned = task.tensors, task.dtypes, task.operation, task.tensors_aligned
        sizes = {name: BYTES[dtype] for name, dtype in dtypes.items()}
        optional = (*SCORE_OPTIONS, *(operand.name for operand in operation.operands if operand.optional), "logits")
        given = [name for name in dict.fromkeys(optional) if name in sizes]
        if task.fused and SCORE_OPTIONS.keys().isdisjoint(given):
            given.append(NUMBERS)
        return cls(
            operation.name, task.rows, task.cols, dtypes["x"], dtypes[task.outputs[0]], task.outputs,
            interleaved=0 if tensors["x"].col == 1 else task.adjacent,
            unit=task.unit if aligned else 1,
            can_peel=aligned and task.congruent and not batch_invariant,
            same_dtype=all(
                tensors[name].col == 1 and dtypes[name] == dtypes["x"] for name in operation.element_operands
            ),
            packed=task.packed and not batch_invariant, sharded=task.part is not None,
            given=tuple(given),
            bias_bytes=sizes.get("bias", 0), logit_bytes=sizes.get("logits", 0),
            all_bytes=sum(_elements(task, name) * size for name, size in sizes.items() if name not in task.outputs),
        )  # fmt: skip

    def for_rows(self, rows: int, cols: int | None = None) -> Problem:
        """The problem of so many rows and columns; what is read is counted as if no operand were broadcast."""
        return replace(self, rows=rows, cols=self.cols if cols is None else cols, all_bytes=None)

    @cached_property
    def contiguous(self) -> bool:
        """True where the elements of a row are neighbours."""
        return not self.interleaved

    @cached_property
    def fused(self) -> bool:
        """True where any score option is given."""
        return not {*SCORE_OPTIONS, NUMBERS}.isdisjoint(self.given)

    @cached_property
    def masked(self) -> bool:
        """True where a boolean mask is read."""
        return "mask" in self.given

    @cached_property
    def declaration(self) -> Operation:
        """The operation's declaration."""
        return declared()[self.operation]

    @cached_property
    def itemsize(self) -> int:
        """Bytes of one element of the input."""
        return ITEMSIZE[self.dtype]

    @cached_property
    def writes_elements(self) -> bool:
        """True where one output has a value for each element."""
        return any(output.kind == "element" for output in self.written)

    @cached_property
    def inputs(self) -> int:
        """Number of tensors that are read element by element."""
        return self.declaration.inputs

    @cached_property
    def reduces(self) -> bool:
        """True where a row is reduced to a state."""
        return self.declaration.reduces

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row of all element inputs."""
        return self.cols * self.itemsize * self.inputs

    @cached_property
    def read_bytes(self) -> int:
        """Bytes of everything that is read, each element counted once."""
        if self.all_bytes is not None:
            return self.all_bytes
        sizes = {"integer": BYTES["int64"], "boolean": 1}
        wide = ITEMSIZE[accumulator_dtype(self.dtype)]
        per_row = sum(
            sizes.get(operand.dtype, wide if self.declaration.has_accumulator_dtype(operand.name) else self.itemsize)
            for operand in self.declaration.operands
            if operand.kind == "row" and (not operand.optional or operand.name in self.given)
        )
        options = self.cols * (self.bias_bytes + self.masked + self.logit_bytes)
        return self.rows * (self.row_bytes + per_row + options)

    @cached_property
    def all_logit_bytes(self) -> int:
        """Bytes of the logits that are read while a gradient is written, each element counted once."""
        return self.rows * self.cols * self.logit_bytes

    @cached_property
    def write_bytes(self) -> int:
        """Bytes of the outputs, written once."""
        values = {"element": self.rows * self.cols, "row": self.rows, "call": 1}
        result = self.out_dtype or self.dtype
        return sum(values[output.kind] * BYTES[output.dtype_of(self.dtype, result)] for output in self.written)

    @cached_property
    def vector(self) -> int:
        """Number of elements in 16 bytes."""
        return 16 // self.itemsize

    @cached_property
    def aligned_bytes(self) -> int:
        """Bytes, at most 16, that divide the length and the address of every contiguous row."""
        unit = power_of_two_divisor(self.cols) if self.unit is None else self.unit
        return min(16, unit * self.itemsize)

    @cached_property
    def unaligned(self) -> bool:
        """True where rows are planned as unaligned ones.

        Some rows do not begin on a multiple of 16 bytes, or rows are long and some do not begin on a cache line.
        """
        off_lines = self.can_peel and self.rows > 1 and self.cols * self.itemsize % CACHE_LINE != 0
        return self.aligned_bytes < 16 or (off_lines and self.cols >= LONG_COLS)

    @cached_property
    def peels_narrow(self) -> bool:
        """True where Triton and Pallas split rows into head, body and tail.

        Whole rows would be loaded fewer than 8 bytes at a time.
        """
        splittable = self.contiguous and self.can_peel
        return splittable and self.aligned_bytes < 8 and self.cols >= 2 * self.vector

    @cached_property
    def written(self) -> tuple[Output, ...]:
        """Declarations of the outputs that are written."""
        declaration = self.declaration
        return declaration.written(self.outputs or declaration.always)


def _elements(task: Task, name: str) -> int:
    """Number of elements in memory of a tensor that may be broadcast to the input's shape."""
    view = task.tensors[name]
    return (task.cols if view.col else 1) * math.prod(itertools.compress(task.sizes, view.outer))
