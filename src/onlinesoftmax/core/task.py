"""The task: one call without its tensors, for the planner and the kernels.

A framework describes its tensors (view.py), and `task_of` makes a task from the descriptions.  `task_of` needs no
framework, so `explain` makes the same task for a shape as a call makes for a tensor.  The planner adds a plan
(planner/plan.py); task and plan together are the request that a backend runs (kernels/request.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from .declaration import Accumulator, Operation, Output, ValueKind, accumulator_dtype
from .options import SCORE_OPTIONS, query_axis
from .view import View, contiguous_view, power_of_two_divisor, row_view, rows_of

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of an element of each floating dtype that the library takes."""

INTEGER_BYTES = {"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1}
"""Bytes of an element of each integer dtype that an operand may have."""

BYTES = {**ITEMSIZE, **INTEGER_BYTES, "bool": 1}
"""Bytes of an element of each dtype that an operand may have."""


BESIDE = (*(option.name for option in SCORE_OPTIONS.values() if option.kind == "element"), "logits")
"""Names of the tensors with a value per element that a call may read beside its operands."""


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


class WithFacts:
    """A record that computes its cached properties when it is made, so that to read one is never a call."""

    _facts: ClassVar[tuple[tuple[str, Callable[[Any], Any]], ...]]

    def __init_subclass__(cls) -> None:
        # In the order of their definitions, in which most of them read those before them.
        cls._facts = tuple((name, each.func) for name, each in vars(cls).items() if isinstance(each, cached_property))

    def __post_init__(self) -> None:
        # cached_property itself takes a lock, which is most of the time of making a record.
        found = vars(self)
        for name, compute in self._facts:
            if name not in found:
                found[name] = compute(self)


@dataclass(frozen=True)
class Flags:
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


@dataclass(frozen=True, kw_only=True)
class Task(WithFacts, Flags):
    """One call without its data.

    Attributes:
        operation: Its declaration.
        outputs: Names of the outputs that are written, in the order of the declaration.
        cols: Elements of a row.
        sizes: Sizes of the outer dimensions, as `rows_of` orders them.
        tensors: Every tensor by name, operands and outputs.
        query: Position of a row's query; None without a causal mask.
        diagonal: Column q + diagonal - 1 is the last that query q sees; None without a causal mask.
    """

    operation: Operation
    outputs: tuple[str, ...]
    cols: int
    sizes: tuple[int, ...]
    tensors: Mapping[str, View]
    query: View | None = None
    diagonal: int | None = None

    @cached_property
    def rows(self) -> int:
        """Number of rows."""
        return math.prod(self.sizes)

    @cached_property
    def dtypes(self) -> dict[str, str]:
        """Name of the dtype of every tensor."""
        return {name: view.dtype for name, view in self.tensors.items()}

    @cached_property
    def written(self) -> tuple[Output, ...]:
        """Declarations of the outputs that are written."""
        return self.operation.written(self.outputs)

    @cached_property
    def writes_elements(self) -> bool:
        """True where one output has a value for each element."""
        return any(output.kind == "element" for output in self.written)

    @cached_property
    def row_outputs(self) -> tuple[str, ...]:
        """Names of the outputs with one value per row."""
        return tuple(output.name for output in self.written if output.kind == "row")

    @cached_property
    def call_outputs(self) -> tuple[str, ...]:
        """Names of the outputs with one value per call."""
        return tuple(output.name for output in self.written if output.kind == "call")

    @cached_property
    def accumulator(self) -> str:
        """Name of the dtype in which states are kept."""
        return accumulator_dtype(self.dtypes["x"], self.dtypes[self.outputs[0]])

    @cached_property
    def sums(self) -> tuple[Accumulator, ...]:
        """The sums that a state keeps for the outputs that are written."""
        return self.operation.summed(self.outputs, {*self.tensors, *self.numbers})

    @cached_property
    def exact(self) -> bool:
        """True where a result is float32 or float64: sums and exp must be more accurate than a 16-bit result needs."""
        return any(
            self.dtypes[output.name] in ("float32", "float64") if output.exact else self.wide for output in self.written
        )

    @cached_property
    def exact_sums(self) -> bool:
        """True where sums need float64: a result is float32 or float64, or the entropy is written.

        The entropy is lse - zl / l.  Near 0 it has the absolute rounding errors of l, which is at least 1, and of zl.
        """
        return self.exact or any(one.rescaled for one in self.sums[1:])

    @cached_property
    def fused(self) -> bool:
        """True where a scale, a softcap, a bias, a mask or causality is given.

        A kernel that reads logits then makes scores from them.  A gradient kernel multiplies by the derivative of the
        scores or applies the mask.
        """
        return self.causal or bool({*self.numbers, *self.tensors} & SCORE_OPTIONS.keys())

    @cached_property
    def adjacent(self) -> int:
        """Number of rows that lie side by side in x; 1 where the elements of a row are neighbours."""
        x = self.tensors["x"]
        return self.sizes[0] if x.col != 1 and x.outer[0] == 1 else 1

    @cached_property
    def cols_unit(self) -> int:
        """The largest power of two up to LARGEST_UNIT that divides the row length."""
        return power_of_two_divisor(self.cols)

    @cached_property
    def _moved_with_x(self) -> list[View]:
        """The other tensors that a kernel reads or writes in chunks of the same columns as x.

        These are dy, if it has one value per element, and the element output.
        """
        names = [name for name in self.operation.element_operands if name != "x"]
        names += [output.name for output in self.written if output.kind == "element"]
        return [self.tensors[name] for name in names]

    @cached_property
    def unit(self) -> int:
        """The largest power of two, up to 16, that divides the row length and the row strides, in elements.

        The row strides are those of x, dy and the element output; dy and the output count only if their columns are
        neighbours.  The result is 1 if the columns of x are not neighbours.
        """
        return min(self.tensors["x"].unit, self.cols_unit, *(t.unit for t in self._moved_with_x if t.col == 1))

    @cached_property
    def congruent(self) -> bool:
        """True where the row strides of x, dy and the element output differ by multiples of 16 elements.

        The columns of each of these tensors must be neighbours.  With `tensors_aligned`, a row then begins in every
        tensor the same number of elements after a multiple of 16 elements.
        """
        # A dy with one value for the whole tensor fits every alignment.
        views = [view for view in self._moved_with_x if view.col or any(view.outer)]
        x = self.tensors["x"]
        return x.col == 1 and all(view.col == 1 and view.congruent(x) for view in views)

    @cached_property
    def packed(self) -> bool:
        """True where the rows of x, dy and the element output lie one after another in memory, without gaps.

        So must those of every other tensor that has a value per element, unless it has one row that all rows share.
        """
        steps = [self.cols * math.prod(self.sizes[:i]) for i in range(len(self.sizes))]

        def has_gaps(view: View) -> bool:
            return any(size > 1 and a != b for size, a, b in zip(self.sizes, view.outer, steps, strict=True))

        moved, beside = [self.tensors["x"], *self._moved_with_x], [self.tensors.get(name) for name in BESIDE]
        others = [view for view in beside if view is not None and any(view.outer)]
        return all(view.col == 1 for view in (*moved, *filter(None, beside))) and not any(
            map(has_gaps, [*moved, *others])
        )

    @cached_property
    def tensors_aligned(self) -> bool:
        """True where the first element of every element operand and every output lies on 16 bytes."""
        return all(self.tensors[name].aligned for name in (*self.operation.element_operands, *self.outputs))


def task_of(
    operation: Operation, outputs: tuple[str, ...], shape: tuple[int, ...], axis: int,
    tensors: Mapping[str, View], flags: Flags = NO_FLAGS, result: str | None = None,
) -> Task:  # fmt: skip
    """The task of a call on tensors of a shape.

    Args:
        operation: Its declaration.
        outputs: Names of the outputs that are written.
        shape: Shape of the input.
        axis: The softmax dimension, counted from 0.
        tensors: The input "x" and every other tensor operand, by name, and an output that is given.  The call makes
            the other outputs (`output_views`).
        flags: Numbers, causality, and zeros for fully masked rows.
        result: Dtype that the caller asks for; None for the dtype of the input.

    Raises:
        ValueError: causality is asked for, and no dimension lies before the softmax dimension.

    Example:
        >>> from onlinesoftmax.ops import OPERATIONS
        >>> x = View((512, 1), "bfloat16")
        >>> task = task_of(OPERATIONS["softmax"], ("y", "lse"), (64, 512), 1, {"x": x})
        >>> task.rows, task.writes_elements, task.row_outputs, task.dtypes["lse"]
        (64, True, ('lse',), 'float32')
    """
    dtype = tensors["x"].dtype
    new = output_views(operation, outputs, shape, axis, dtype, result or dtype)
    tensors = {"x": tensors["x"], **{name: new[name] for name in new if name not in tensors}, **tensors}
    # An output per element, or else the main output, follows x: the order of the outer dimensions depends on both
    # (view.py).
    second = next((output.name for output in operation.written(outputs) if output.kind == "element"), outputs[0])
    tensors = {name: tensors[name] for name in dict.fromkeys(("x", second, *tensors))}
    per_call = {*operation.call_operands, *operation.call_outputs}
    views = {name: view for name, view in tensors.items() if name not in per_call}
    if flags.causal:
        queries = query_axis(operation.name, axis, len(shape))
        views["query"] = View(tuple(int(i == queries) for i in range(len(shape))), "int64")
    if not shape:
        shape, axis = (1,), 0
        rows = {output.name for output in operation.outputs if output.kind == "row"} | set(operation.row_operands)
        rows |= {name for name, option in SCORE_OPTIONS.items() if option.kind == "row"}
        views = {name: view._replace(strides=(0,) if name in rows else (1,)) for name, view in views.items()}
    sizes, views = rows_of(tuple(shape), axis, views)
    query = views.pop("query", None)
    diagonal = shape[axis] - shape[axis - 1] + 1 if query else None
    return Task(
        **vars(flags), operation=operation, outputs=outputs, cols=shape[axis], sizes=sizes,
        tensors={**tensors, **views}, query=query, diagonal=diagonal,
    )  # fmt: skip


def one_row_as_many(task: Task) -> Task:
    """The task with the row strides that a single row would have among many contiguous rows.

    A single row has no row stride, so it could be read with wider loads than a row among many, and summed in another
    order.  A batch-invariant call must not do so.
    """
    if task.rows != 1:
        return task
    rows = {
        name: view.with_rows((task.cols,) if view.col else (1,), view.col)
        for name, view in task.tensors.items() if view.outer
    }  # fmt: skip
    return replace(task, tensors={**task.tensors, **rows})


def output_views(
    operation: Operation, outputs: tuple[str, ...], shape: tuple[int, ...], axis: int, dtype: str, result: str
) -> dict[str, View]:
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
        >>> output_views(OPERATIONS["logsumexp"], ("y",), (64, 512), 1, "bfloat16", "bfloat16")["y"].strides
        (1, 0)
    """
    return {
        output.name: _view(output.kind, shape, axis, output.dtype_of(dtype, result))
        for output in operation.written(outputs)
    }


def operand_views(
    operation: Operation, shape: tuple[int, ...], axis: int, dtype: str, integer: str = "int64",
    outputs: tuple[str, ...] = (),
) -> dict[str, View]:  # fmt: skip
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
        found[operand.name] = _view(operand.kind, shape, axis, integer if operand.dtype == "integer" else wide)
    return found


def _view(kind: ValueKind, shape: tuple[int, ...], axis: int, dtype: str) -> View:
    """A contiguous tensor with a value per element, per row, or per call."""
    if kind == "call":
        return View((), dtype)
    return contiguous_view(shape, dtype) if kind == "element" else row_view(shape, axis, dtype)


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
