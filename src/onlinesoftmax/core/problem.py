"""The problem: the properties of a task on which the choice of a plan depends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from .device import CACHE_LINE
from .layout import power_of_two_divisor
from .operations import Operation, Output, accumulator_dtype, declared
from .task import BYTES, ITEMSIZE, Task

LONG_COLS = 1 << 19
"""Columns from which rows are divided over many blocks (strategy `grid`), each of which begins on a cache line."""


@dataclass(frozen=True)
class Access:
    """How rows lie in memory.

    Attributes:
        contiguous: True where the elements of a row are neighbours.
        adjacent: Where a row's elements are not neighbours: the number of rows whose elements of one column are, as 32
            for the rows along the middle dimension of a tensor of 8 x 512 x 32.  Else 1.
        unit: Power of two, in elements, that divides the row length and the offset of every row; None to take it from
            cols.
        peelable: True where each row has the same alignment in x, dy and the element output, so that an unaligned row
            can be split into head, body and tail with an aligned body in every tensor; False for calls that are
            batch-invariant.
        alike: True where every tensor that is read element by element has the dtype of x and adjacent columns.
    """

    contiguous: bool = True
    adjacent: int = 1
    unit: int | None = None
    peelable: bool = True
    alike: bool = True


@dataclass(frozen=True)
class Extra:
    """Tensors that not every call reads: those of the score options, and optional operands.

    Attributes:
        bias_bytes: Bytes of one element of the bias, which a kernel holds on chip beside the input; 0 without a bias.
        masked: True where a boolean mask is read.
        fused: True where any score option is given (`Task.fused`).
        logit_bytes: Bytes of one element of the logits that a gradient reads for the slope of the softcap while it
            writes; 0 where they are not read.
        given: Names of the optional operands that are read.
        all_bytes: Bytes of everything that is read, each element counted once.  None: `read_bytes` computes them, for
            contiguous operands of the dtypes of the declaration, and for tensors of the score options that are not
            broadcast.
        sharded: True where the columns are a part of longer rows (`Task.part`).
    """

    bias_bytes: int = 0
    masked: bool = False
    fused: bool = False
    logit_bytes: int = 0
    given: tuple[str, ...] = ()
    all_bytes: int | None = None
    sharded: bool = False


@dataclass(frozen=True)
class Problem:
    """The properties of a task on which a plan depends.

    Attributes:
        operation: Name of a declaration.
        rows: Number of rows.
        cols: Elements of a row.
        dtype: Dtype of the input.
        out_dtype: Dtype of the main output; None for the dtype of the input.
        access: How rows lie in memory.
        extra: Tensors that not every call reads.
        outputs: Names of the outputs that are written; empty for those that every call writes.
    """

    operation: str
    rows: int
    cols: int
    dtype: str = "float32"
    out_dtype: str | None = None
    access: Access = Access()
    extra: Extra = Extra()
    outputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.operation not in declared():
            raise ValueError(f"unknown operation {self.operation!r}; operations: {', '.join(declared())}")
        for name in filter(None, (self.dtype, self.out_dtype)):
            if name not in ITEMSIZE:
                raise ValueError(f"unknown dtype {name!r}; dtypes: {', '.join(ITEMSIZE)}")
        if self.rows < 0 or self.cols < 0:
            raise ValueError(f"rows and cols must not be negative, got {self.rows} x {self.cols}")

    @classmethod
    def of(cls, task: Task, batch_invariant: bool = False) -> Problem:
        """The problem of a task.

        Args:
            task: The task.
            batch_invariant: True where a row's bits must not depend on the rows beside it.  An unaligned row is then
                not split: the order of its sum would depend on where it begins.
        """
        layout, aligned, read = task.layout, task.tensors_aligned, task.operation.element_operands
        access = Access(
            layout.x.col == 1, layout.adjacent, task.unit if aligned else 1,
            aligned and task.congruent and not batch_invariant,
            all(layout.sides[name].col == 1 and task.dtypes[name] == task.dtypes["x"] for name in read),
        )  # fmt: skip
        bias_bytes, logit_bytes = (
            BYTES[task.dtypes[name]] if name in task.dtypes else 0 for name in ("bias", "logits")
        )
        given = tuple(o.name for o in task.operation.operands if o.optional and o.name in task.dtypes)
        extra = Extra(
            bias_bytes, "mask" in task.dtypes, task.fused, logit_bytes, given, _operand_bytes(task),
            task.part is not None,
        )  # fmt: skip
        return cls(
            task.operation.name, layout.rows, layout.cols, task.dtypes["x"], task.dtypes[task.outputs[0]], access,
            extra, task.outputs,
        )  # fmt: skip

    def for_rows(self, rows: int) -> Problem:
        """The problem of so many rows; what is read is counted as if no operand were broadcast."""
        return replace(self, rows=rows, extra=replace(self.extra, all_bytes=None))

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

    @property
    def reduces(self) -> bool:
        """True where a row is reduced to a state."""
        return self.declaration.reduces

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of all element inputs."""
        return self.cols * self.itemsize * self.inputs

    @cached_property
    def read_bytes(self) -> int:
        """Bytes of everything that is read, each element counted once."""
        if self.extra.all_bytes is not None:
            return self.extra.all_bytes
        sizes = {"integer": BYTES["int64"], "boolean": 1}
        wide = ITEMSIZE[accumulator_dtype(self.dtype)]
        per_row = sum(
            sizes.get(operand.dtype, wide if self.declaration.has_accumulator_dtype(operand.name) else self.itemsize)
            for operand in self.declaration.operands
            if operand.kind == "row" and (not operand.optional or operand.name in self.extra.given)
        )
        options = self.cols * (self.extra.bias_bytes + self.extra.masked + self.extra.logit_bytes)
        return self.rows * (self.row_bytes + per_row + options)

    @cached_property
    def logit_bytes(self) -> int:
        """Bytes of the logits that are read while a gradient is written, each element counted once."""
        return self.rows * self.cols * self.extra.logit_bytes

    @cached_property
    def write_bytes(self) -> int:
        """Bytes of the outputs, written once."""
        values = {"element": self.rows * self.cols, "row": self.rows, "call": 1}
        result = self.out_dtype or self.dtype
        return sum(values[output.kind] * ITEMSIZE[output.dtype_of(self.dtype, result)] for output in self.written)

    @cached_property
    def vector(self) -> int:
        """Number of elements in 16 bytes."""
        return 16 // self.itemsize

    @property
    def contiguous(self) -> bool:
        """True where the elements of a row are neighbours."""
        return self.access.contiguous

    @cached_property
    def aligned_bytes(self) -> int:
        """Bytes, at most 16, that divide the length and the address of every contiguous row."""
        unit = power_of_two_divisor(self.cols) if self.access.unit is None else self.access.unit
        return min(16, unit * self.itemsize)

    @cached_property
    def unaligned(self) -> bool:
        """True where rows are planned as unaligned ones.

        Some rows do not begin on a multiple of 16 bytes, or rows are long and some do not begin on a cache line.
        """
        off_lines = self.access.peelable and self.rows > 1 and self.cols * self.itemsize % CACHE_LINE != 0
        return self.aligned_bytes < 16 or (off_lines and self.cols >= LONG_COLS)

    @cached_property
    def peels_narrow(self) -> bool:
        """True where Triton and Pallas split rows into head, body and tail.

        Whole rows would be loaded fewer than 8 bytes at a time.
        """
        splittable = self.contiguous and self.access.peelable
        return splittable and self.aligned_bytes < 8 and self.cols >= 2 * self.vector

    @cached_property
    def written(self) -> tuple[Output, ...]:
        """Declarations of the outputs that are written."""
        declaration = self.declaration
        return declaration.written(self.outputs or declaration.always)


def _operand_bytes(task: Task) -> int:
    """Bytes of every tensor that a task reads, each element counted once."""
    return sum(_elements(task, name) * BYTES[dtype] for name, dtype in task.dtypes.items() if name not in task.outputs)


def _elements(task: Task, name: str) -> int:
    """Number of elements in memory of a tensor that may be broadcast to the input's shape."""
    layout, side = task.layout, task.layout.sides.get(name)
    if side is None:
        # An operand of the whole call.
        return 1
    count = layout.cols if side.col else 1
    for size, stride in zip(layout.sizes, side.strides, strict=True):
        count *= size if stride else 1
    return count
