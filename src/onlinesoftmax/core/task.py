"""The task: one call without its data.  The record that every layer below the public functions passes on.

A framework describes its tensors (`TensorSpec`) and `task_of` makes a task of them: no framework is needed for it, so
`explain` makes the same task for a shape as a call makes for a tensor.  The planner adds a plan (planner/plan.py), and
task and plan together are the request that a backend runs (kernels/request.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from .layout import Layout, Side, contiguous_strides, rows_of
from .operations import Operation, Output
from .options import query_axis

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of an element of each floating dtype that the library takes."""


class Choice(NamedTuple):
    """What the caller forces of the plan.

    Attributes:
        backend, strategy: Name of the backend and of the strategy; None where the planner chooses.
        batch_invariant: True where a row's bits must not depend on the rows beside it.
    """

    backend: str | None = None
    strategy: str | None = None
    batch_invariant: bool = False


ANY = Choice()
"""Nothing is forced."""


class TensorSpec(NamedTuple):
    """One tensor without its data.

    Attributes:
        strides: Strides for the shape of the input, in elements: 0 where the tensor is broadcast, and at the softmax
            dimension where it has one value per row.
        dtype: Name of its dtype.
        aligned: True where its first element lies on 16 bytes.
    """

    strides: tuple[int, ...]
    dtype: str
    aligned: bool = True


@dataclass(frozen=True)
class Task:
    """One call without its data.

    Attributes:
        operation: Its declaration.
        outputs: Names of the outputs that are written, in the order of the declaration.
        layout: Rows of every tensor.
        dtypes: Name of the dtype of every tensor, operands and outputs, and of a scale that is a tensor.
        aligned: Names of the tensors whose first element lies on 16 bytes.
        numbers: Names of the operands that are one number for the call, not a tensor.
        diagonal: Column q + diagonal - 1 is the last that query q sees; None without a causal mask.
        zero: True where a row whose scores are all -inf gives zeros.
    """

    operation: Operation
    outputs: tuple[str, ...]
    layout: Layout
    dtypes: Mapping[str, str]
    aligned: frozenset[str]
    numbers: frozenset[str] = field(default_factory=frozenset)
    diagonal: int | None = None
    zero: bool = False

    @property
    def written(self) -> tuple[Output, ...]:
        """Declarations of the outputs that are written."""
        return self.operation.written(self.outputs)

    @property
    def writes_elements(self) -> bool:
        """True where one output has a value for each element."""
        return any(output.kind == "element" for output in self.written)

    @property
    def row_outputs(self) -> tuple[str, ...]:
        """Names of the outputs with one value per row."""
        return tuple(output.name for output in self.written if output.kind == "row")

    @property
    def accumulator(self) -> str:
        """Name of the dtype in which states are kept."""
        return "float64" if "float64" in (self.dtypes["x"], self.dtypes[self.outputs[0]]) else "float32"

    @property
    def exact(self) -> bool:
        """True where an output has 24 bits or more, so that an error below 16 bits shows."""
        return any(self.dtypes[name] in ("float32", "float64") for name in self.outputs)

    @property
    def beside(self) -> frozenset[str]:
        """Names of the tensors that are read besides the input."""
        return frozenset(self.layout.sides) - {"x", "query", *self.outputs}

    @property
    def fused(self) -> bool:
        """True where a kernel makes scores from the logits: any score option is given."""
        given = self.numbers | self.beside | frozenset(self.dtypes)
        return self.diagonal is not None or bool(given & {"scale", "softcap", "bias", "mask"})

    @property
    def moved_with_x(self) -> list[Side]:
        """Strides of the tensors that are moved together with x, in the same instructions: inputs and output."""
        names = [name for name in self.operation.element_operands if name != "x"]
        names += [output.name for output in self.written if output.kind == "element"]
        return [self.layout.sides[name] for name in names]

    @property
    def unit(self) -> int:
        """The largest power of two, in elements, that divides every row stride and the row length."""
        layout = self.layout
        sides = [side for side in self.moved_with_x if side.col == 1]
        return min(layout.x.unit, layout.cols_unit, *(side.unit for side in sides))

    @property
    def congruent(self) -> bool:
        """True where each row begins at the same offset from 16 bytes in x and in all that is moved with it."""
        # One value for a whole tensor lies everywhere.
        sides = [side for side in self.moved_with_x if not side.one_value]
        return self.layout.x.col == 1 and all(side.col == 1 and side.congruent(self.layout.x) for side in sides)

    @property
    def rows_aligned(self) -> bool:
        """True where x, and all that is moved with it, begins on 16 bytes."""
        names = {*self.operation.element_operands, *self.outputs}
        return names <= self.aligned


class Flags(NamedTuple):
    """What a call asks for that is neither a tensor nor a plan.

    Attributes:
        numbers: Names of the operands that are one number for the call.
        causal: True with a causal mask.
        zero: True where a row whose scores are all -inf gives zeros.
    """

    numbers: frozenset[str] = frozenset()
    causal: bool = False
    zero: bool = False


def task_of(
    operation: Operation, outputs: tuple[str, ...], shape: tuple[int, ...], axis: int,
    tensors: Mapping[str, TensorSpec], flags: Flags = Flags(),  # noqa: B008  immutable
) -> Task:  # fmt: skip
    """The task of a call on tensors of a shape.

    Args:
        operation: Its declaration.
        outputs: Names of the outputs that are written.
        shape: Shape of the input.
        axis: The softmax dimension, counted from 0.
        tensors: The input "x", the outputs, and every other tensor operand, by name.  A scale that is a tensor is
            among them.
        flags: The rest.

    Raises:
        ValueError: causality is asked for, and no dimension lies before the softmax dimension.

    Example:
        >>> from onlinesoftmax.core.operations import OPERATIONS
        >>> spec = TensorSpec((512, 1), "float32")
        >>> task = task_of(OPERATIONS["softmax"], ("y",), (64, 512), 1, {"x": spec, "y": spec})
        >>> task.layout.rows, task.writes_elements, task.row_outputs
        (64, True, ())
    """
    # The main output follows x: the order of the outer dimensions depends on both (layout.py).
    names = dict.fromkeys(("x", outputs[0], *tensors))
    strides = {name: tensors[name].strides for name in names if name != "scale"}
    if flags.causal:
        queries = query_axis(operation.name, axis, len(shape))
        strides["query"] = tuple(int(i == queries) for i in range(len(shape)))
    if not shape:
        shape, axis = (1,), 0
        rows = {output.name for output in operation.outputs if output.kind == "row"} | set(operation.row_operands)
        strides = {name: (0,) if name in rows else (1,) for name in strides}
    diagonal = shape[axis] - shape[axis - 1] + 1 if flags.causal else None
    return Task(
        operation, outputs, rows_of(tuple(shape), axis, strides), {name: tensors[name].dtype for name in tensors},
        frozenset(name for name, tensor in tensors.items() if tensor.aligned), flags.numbers, diagonal, flags.zero,
    )  # fmt: skip


def one_row_as_many(task: Task) -> Task:
    """The same task with a row stride for a single row, which has none.

    Without a stride a single row could be read with wider loads than one of many rows, and so summed in another
    order; a batch-invariant call must not do that.
    """
    layout = task.layout
    if layout.rows != 1:
        return task
    sides = {
        name: side if name == "query" else Side((layout.cols,) if side.col else (1,), side.col)
        for name, side in layout.sides.items()
    }
    return replace(task, layout=replace(layout, sides=sides))


def contiguous_spec(shape: tuple[int, ...], dtype: str) -> TensorSpec:
    """A contiguous tensor of the shape of the input."""
    return TensorSpec(contiguous_strides(shape), dtype)


def row_spec(shape: tuple[int, ...], axis: int, dtype: str) -> TensorSpec:
    """A contiguous tensor with one value per row of an input of this shape."""
    outer = contiguous_strides((*shape[:axis], *shape[axis + 1 :]))
    return TensorSpec((*outer[:axis], 0, *outer[axis:]), dtype)
