"""The task: one call without its tensors, for the planner and the kernels.

A framework describes its tensors (`TensorSpec`), and `task_of` makes a task from the descriptions.  `task_of` needs no
framework, so `explain` makes the same task for a shape as a call makes for a tensor.  The planner adds a plan
(planner/plan.py); task and plan together are the request that a backend runs (kernels/request.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from .layout import Layout, Side, contiguous_strides, rows_of
from .operations import Operation, Output, ValueKind, accumulator_dtype
from .options import SCORE_OPTIONS, query_axis

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of an element of each floating dtype that the library takes."""

INTEGER_BYTES = {"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1}
"""Bytes of an element of each integer dtype that an operand may have."""

BYTES = {**ITEMSIZE, **INTEGER_BYTES, "bool": 1}
"""Bytes of an element of each dtype that an operand may have."""


class Choice(NamedTuple):
    """The parts of the plan that the caller forces.

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
        strides: Strides for the shape of the input, in elements.  A stride is 0 where the tensor is broadcast, and at
            the softmax dimension if the tensor has one value per row.
        dtype: Name of its dtype.
        aligned: True where the address of its first element is a multiple of 16 bytes.
    """

    strides: tuple[int, ...]
    dtype: str
    aligned: bool = True


MOST_PROCESSES = 8
"""Most processes whose GPUs exchange states from kernel to kernel; a host with NVLink has at most 8 GPUs."""


class ColumnRange(NamedTuple):
    """The position of a call's columns in longer rows, whose other columns lie on other GPUs.

    The kernels of all GPUs run at the same time, and exchange the states of their parts through mailboxes.

    Attributes:
        first: Number of columns before this part.  If it is the number of all columns, the part has none, and the one
            column of the call's tensors is neither read nor written.
        total: Number of columns of a whole row.
        process, processes: Number of this process, and how many there are: at most MOST_PROCESSES.
        mail: Name of the mailboxes.
    """

    first: int
    total: int
    process: int
    processes: int
    mail: str


class Flags(NamedTuple):
    """Properties of a call that are neither a tensor nor a part of the plan.

    Attributes:
        numbers: Names of the operands that are one number for the call.
        causal: True with a causal mask.
        zero: True where a row whose scores are all -inf gives zeros.
        wide: True where the caller's result is float32 or float64.
        part: Position of the columns in longer rows; None where the rows are whole.
    """

    numbers: frozenset[str] = frozenset()
    causal: bool = False
    zero: bool = False
    wide: bool = False
    part: ColumnRange | None = None


NO_FLAGS = Flags()


@dataclass(frozen=True)
class Task:
    """One call without its data.

    Attributes:
        operation: Its declaration.
        outputs: Names of the outputs that are written, in the order of the declaration.
        layout: Rows of every tensor.
        dtypes: Name of the dtype of every tensor, operands and outputs.
        aligned: Names of the tensors whose first element has an address that is a multiple of 16 bytes.
        flags: Properties of the call that are not those of a tensor.
        diagonal: Column q + diagonal - 1 is the last that query q sees; None without a causal mask.
    """

    operation: Operation
    outputs: tuple[str, ...]
    layout: Layout
    dtypes: Mapping[str, str]
    aligned: frozenset[str]
    flags: Flags = NO_FLAGS
    diagonal: int | None = None

    @property
    def numbers(self) -> frozenset[str]:
        """Names of the operands that are one number for the call, not a tensor."""
        return self.flags.numbers

    @property
    def zero(self) -> bool:
        """True where a row whose scores are all -inf gives zeros."""
        return self.flags.zero

    @property
    def part(self) -> ColumnRange | None:
        """Position of the columns in longer rows; None where the rows are whole."""
        return self.flags.part

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
    def call_outputs(self) -> tuple[str, ...]:
        """Names of the outputs with one value per call."""
        return tuple(output.name for output in self.written if output.kind == "call")

    @property
    def accumulator(self) -> str:
        """Name of the dtype in which states are kept."""
        return accumulator_dtype(self.dtypes["x"], self.dtypes[self.outputs[0]])

    @property
    def exact(self) -> bool:
        """True where a result is float32 or float64: sums and exp must be more accurate than a 16-bit result needs."""
        return any(
            self.dtypes[output.name] in ("float32", "float64") if output.exact else self.flags.wide
            for output in self.written
        )

    @property
    def beside(self) -> frozenset[str]:
        """Names of the tensors that are read besides the input, except those with one value for the call."""
        return frozenset(self.layout.sides) - {"x", "query", *self.outputs}

    @property
    def fused(self) -> bool:
        """True where a scale, a softcap, a bias, a mask or causality is given.

        A kernel that reads logits then makes scores from them.  A gradient kernel multiplies by the derivative of the
        scores or applies the mask.
        """
        given = self.numbers | self.beside
        return self.diagonal is not None or bool(given & {"scale", "softcap", "bias", "mask"})

    @property
    def moved_with_x(self) -> list[Side]:
        """Strides of the other tensors that a kernel reads or writes in chunks of the same columns as x.

        These are dy, if it has one value per element, and the element output.
        """
        names = [name for name in self.operation.element_operands if name != "x"]
        names += [output.name for output in self.written if output.kind == "element"]
        return [self.layout.sides[name] for name in names]

    @property
    def unit(self) -> int:
        """The largest power of two, up to 16, that divides the row length and the row strides, in elements.

        The row strides are those of x, dy and the element output; dy and the output count only if their columns are
        neighbours.  The result is 1 if the columns of x are not neighbours.
        """
        layout = self.layout
        sides = [side for side in self.moved_with_x if side.col == 1]
        return min(layout.x.unit, layout.cols_unit, *(side.unit for side in sides))

    @property
    def congruent(self) -> bool:
        """True where the row strides of x, dy and the element output differ by multiples of 16 elements.

        The columns of each of these tensors must be neighbours.  With `tensors_aligned`, a row then begins in every
        tensor the same number of elements after a multiple of 16 elements.
        """
        # A dy with one value for the whole tensor fits every alignment.
        sides = [side for side in self.moved_with_x if not side.one_value]
        return self.layout.x.col == 1 and all(side.col == 1 and side.congruent(self.layout.x) for side in sides)

    @property
    def tensors_aligned(self) -> bool:
        """True where the first element of every element operand and every output lies on 16 bytes."""
        names = {*self.operation.element_operands, *self.outputs}
        return names <= self.aligned


def task_of(
    operation: Operation, outputs: tuple[str, ...], shape: tuple[int, ...], axis: int,
    tensors: Mapping[str, TensorSpec], flags: Flags = NO_FLAGS, result: str | None = None,
) -> Task:  # fmt: skip
    """The task of a call on tensors of a shape.

    Args:
        operation: Its declaration.
        outputs: Names of the outputs that are written.
        shape: Shape of the input.
        axis: The softmax dimension, counted from 0.
        tensors: The input "x" and every other tensor operand, by name, and an output that is given.  The call makes
            the other outputs (`output_specs`).
        flags: Numbers, causality, and zeros for fully masked rows.
        result: Dtype that the caller asks for; None for the dtype of the input.

    Raises:
        ValueError: causality is asked for, and no dimension lies before the softmax dimension.

    Example:
        >>> from onlinesoftmax.ops import OPERATIONS
        >>> x = TensorSpec((512, 1), "bfloat16")
        >>> task = task_of(OPERATIONS["softmax"], ("y", "lse"), (64, 512), 1, {"x": x})
        >>> task.layout.rows, task.writes_elements, task.row_outputs, task.dtypes["lse"]
        (64, True, ('lse',), 'float32')
    """
    dtype = tensors["x"].dtype
    new = output_specs(operation, outputs, shape, axis, dtype, result or dtype)
    tensors = {"x": tensors["x"], **{name: new[name] for name in new if name not in tensors}, **tensors}
    # An output per element, or else the main output, follows x: the order of the outer dimensions depends on both
    # (layout.py).
    second = next((output.name for output in operation.written(outputs) if output.kind == "element"), outputs[0])
    names = dict.fromkeys(("x", second, *tensors))
    per_call = {*operation.call_operands, *operation.call_outputs}
    strides = {name: tensors[name].strides for name in names if name not in per_call}
    if flags.causal:
        queries = query_axis(operation.name, axis, len(shape))
        strides["query"] = tuple(int(i == queries) for i in range(len(shape)))
    if not shape:
        shape, axis = (1,), 0
        rows = {output.name for output in operation.outputs if output.kind == "row"} | set(operation.row_operands)
        rows |= {name for name, option in SCORE_OPTIONS.items() if option.kind == "row"}
        strides = {name: (0,) if name in rows else (1,) for name in strides}
    diagonal = shape[axis] - shape[axis - 1] + 1 if flags.causal else None
    return Task(
        operation, outputs, rows_of(tuple(shape), axis, strides), {name: tensors[name].dtype for name in tensors},
        frozenset(name for name, tensor in tensors.items() if tensor.aligned), flags, diagonal,
    )  # fmt: skip


def one_row_as_many(task: Task) -> Task:
    """The task with the row strides that a single row would have among many contiguous rows.

    A single row has no row stride, so it could be read with wider loads than a row among many, and summed in another
    order.  A batch-invariant call must not do so.
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


def output_specs(
    operation: Operation, outputs: tuple[str, ...], shape: tuple[int, ...], axis: int, dtype: str, result: str
) -> dict[str, TensorSpec]:
    """The contiguous outputs of a call, by name, in the order of the declaration.

    Args:
        operation: Its declaration.
        outputs: Names of the outputs that are written.
        shape: Shape of the input.
        axis: The softmax dimension, counted from 0.
        dtype: Dtype of the input.
        result: Dtype that the caller asks for.

    Example:
        >>> from onlinesoftmax.ops import OPERATIONS
        >>> output_specs(OPERATIONS["logsumexp"], ("y",), (64, 512), 1, "bfloat16", "bfloat16")["y"].strides
        (1, 0)
    """
    return {
        output.name: _spec(output.kind, shape, axis, output.dtype_of(dtype, result))
        for output in operation.written(outputs)
    }


def operand_specs(
    operation: Operation, shape: tuple[int, ...], axis: int, dtype: str, integer: str = "int64",
    outputs: tuple[str, ...] = (),
) -> dict[str, TensorSpec]:  # fmt: skip
    """Contiguous tensors for the operands that every call reads beside the input, by name.

    Args:
        operation: Its declaration.
        shape: Shape of the input.
        axis: The softmax dimension, counted from 0.
        dtype: Dtype of the input, and of the operands for which the declaration has no other.
        integer: Dtype of operands that are integers.
        outputs: Names of the outputs: a forward call that writes the gradients of rows also reads those of its results.
    """
    found = {}
    with_gradient = any(output.kind == "element" and output.on_request for output in operation.written(outputs))
    with_gradient = with_gradient and not {*outputs} & {*operation.call_outputs}
    for operand in operation.operands[1:]:
        if operand.optional and not (with_gradient and operand.kind == "row"):
            continue
        wide = accumulator_dtype(dtype) if operation.has_accumulator_dtype(operand.name) else dtype
        found[operand.name] = _spec(operand.kind, shape, axis, integer if operand.dtype == "integer" else wide)
    return found


def _spec(kind: ValueKind, shape: tuple[int, ...], axis: int, dtype: str) -> TensorSpec:
    """A contiguous tensor with a value per element, per row, or per call."""
    if kind == "call":
        return TensorSpec((), dtype)
    return contiguous_spec(shape, dtype) if kind == "element" else row_spec(shape, axis, dtype)


def output_shape(output: Output, shape: tuple[int, ...], axis: int, keepdim: bool = False) -> tuple[int, ...]:
    """Shape of an output for an input of this shape; `keepdim` keeps the softmax dimension of an output per row.

    >>> from onlinesoftmax.ops import OPERATIONS
    >>> lse = OPERATIONS["softmax"].output("lse")
    >>> output_shape(lse, (8, 3, 5), 1), output_shape(lse, (8, 3, 5), 1, keepdim=True)
    ((8, 5), (8, 1, 5))
    """
    if output.kind == "call":
        return ()
    if output.kind == "element" or not shape:
        return shape
    return (*shape[:axis], *((1,) if keepdim else ()), *shape[axis + 1 :])
