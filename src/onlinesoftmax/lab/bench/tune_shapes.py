"""The grid of `tune`: the operations and the shapes that it measures, and the proposals for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

from ...core.declaration import Operand, Operation
from ...core.device import Device
from ...core.problem import Problem
from ...core.task import ITEMSIZE, Flags, Task, task_of
from ...core.view import View, contiguous_view, row_view
from ...kernels.request import Request
from ...ops import OPERATIONS
from ...planner import strategies
from ...planner.fastest import stand_in
from ...planner.measured import optional_operands
from ...planner.plan import Plan, priced
from ..names import check_names

DTYPES = ("bfloat16", "float32")
"""Dtypes that are measured."""

FULL_BYTES = 1 << 27
"""Bytes of a full input: at least twice the L2 of the measured GPUs, so that the data come from memory."""

SHORTEST = (8, 16, 32)
"""Lengths below 64 columns, measured with full inputs only: with few rows, a launch takes longer than such rows."""

SHORT = 1 << 18
"""Up to this number of columns a measured length is 1.5 or 1.33 times the one before, beyond it 2 or 4 times."""

FEW_ROWS = (1, 16, 128, 1024, 8192)
"""Numbers of rows that are measured besides those of a full input, where columns are a power of two."""

CLASSES = (1000, 32000, 50256, 128256, 151936, 201088, 256000)
"""Numbers of classes: 1000 of ImageNet, then vocabulary sizes of language models.  With one column more, for unaligned
rows, 50256 is the vocabulary of GPT-2."""

LARGE_BYTES = 1 << 30
"""Bytes of a large input of long rows.

A full input has so few long rows that the last of them leave many multiprocessors idle, more or fewer with each plan.
With many rows, the plan with the fastest blocks wins: for operations that write no elements, often one block per row.
"""

LONG = 32000
"""Columns from which large inputs are measured: those of vocabularies."""

BEYOND_CHIP = (3 << 22, 3 << 23, 1 << 25)
"""Long rows of which a large GPU holds most on chip, so that a plan's time depends on how much it keeps there."""

SHORTEST_OF_TARGETS = 256
"""Fewest columns that are measured of operations with a target: a vocabulary is rarely shorter."""

HOPELESS = 2.5
"""Triton's and XLA's compilers are slow: a proposal that is estimated at this many times the least is not measured."""


class Shape(NamedTuple):
    """A shape to measure.

    Attributes:
        operation: Name of the operation.
        dtype: Dtype of the input.
        rows, cols: Number of rows, and elements of a row.
        outputs: Names of the outputs that are written; empty for those that every call writes.
    """

    operation: str
    dtype: str
    rows: int
    cols: int
    outputs: tuple[str, ...] = ()


def shapes(quick: bool = False) -> list[Shape]:
    """The shapes to measure, the most important first, so that an interrupted run gives a useful table.

    Full inputs come first, beginning with softmax and its gradient; within an operation, vocabularies come first.
    `quick` gives a few shapes that show whether all works.
    """
    if quick:
        return [Shape("softmax", dtype, 1024, cols) for dtype in DTYPES for cols in (256, 4096, 65536)]
    full, unaligned, few = [], [], []
    for grid in _grids():
        for cols in grid.lengths:
            for dtype in DTYPES:
                rows = max(FULL_BYTES // (cols * ITEMSIZE[dtype]), 1)
                shape = partial(Shape, grid.operation, dtype, outputs=grid.outputs)
                full.append(shape(rows, cols))
                if cols in grid.unaligned:
                    unaligned.append(shape(rows, cols + 1))
                if cols in grid.with_few_rows:
                    few += [shape(some, cols) for some in grid.few_rows if 4 * some <= rows]
    return [*full, *_large(full), *unaligned, *_large(unaligned), *few]


def _large(full: list[Shape]) -> list[Shape]:
    """The large inputs of long rows."""
    times = LARGE_BYTES // FULL_BYTES
    return [shape._replace(rows=shape.rows * times) for shape in full if LONG <= shape.cols <= SHORT]


class _Grid(NamedTuple):
    """The lengths of an operation's rows.

    Attributes:
        operation, outputs: As for `Shape`.
        lengths: Lengths, each measured with a full input.
        unaligned: Lengths after which one column more is measured, too.
        with_few_rows: Lengths that are measured with fewer rows, too.
        few_rows: These numbers of rows.
    """

    operation: str
    outputs: tuple[str, ...]
    lengths: Sequence[int]
    unaligned: Sequence[int]
    with_few_rows: Sequence[int]
    few_rows: Sequence[int] = FEW_ROWS


def _grids() -> Iterator[_Grid]:
    """The grid of every operation, then those of the operations with a target column, in every form of a call."""
    powers, between = [64 << i for i in range(13)], [96 << i for i in range(12)]
    long = [1 << i for i in (19, 20, 21, 22, 23, 24, 26, 28)]
    measured = dict.fromkeys(stand_in(Problem(name, 1, 1)) for name in OPERATIONS)
    for name in sorted(measured, key=lambda name: OPERATIONS[name].per_row):
        # Operations that write one number per row have few plans to choose from, so fewer lengths are measured.
        more, longest = ((), ()) if OPERATIONS[name].per_row else (between, BEYOND_CHIP)
        lengths = [*CLASSES, *powers[::-1], *more, *long, *SHORTEST, *longest]
        plain = OPERATIONS[name].inputs == 1 and not OPERATIONS[name].per_row
        yield _Grid(name, (), lengths, [cols for cols in lengths if plain and cols <= SHORT], [*powers, *long])
    targets = [SHORTEST_OF_TARGETS << i for i in range(11)]
    for operation in OPERATIONS.values():
        for outputs in _forms(operation) if operation.has_target else ():
            yield _Grid(operation.name, outputs, [*CLASSES, *targets], CLASSES, targets, FEW_ROWS[1:])


class Part(NamedTuple):
    """The part of the grid that a run measures; an empty field chooses everything.

    Attributes:
        operations: Names of operations.
        outputs: Names of the outputs that a call writes, in any order: ("loss", "y") is a loss with its gradient.
        dtypes: Names of dtypes.
        cols: Lengths of rows.
        sizes: (rows, cols) to measure instead of the shapes of the grid.
    """

    operations: Sequence[str] = ()
    outputs: Sequence[str] = ()
    dtypes: Sequence[str] = ()
    cols: Sequence[int] = ()
    sizes: Sequence[tuple[int, int]] = ()

    def of(self, grid: list[Shape]) -> list[Shape]:
        """The shapes of a grid that are chosen.

        Raises:
            ValueError: the grid has no such operation, outputs, dtype or length; the message lists those that it has.

        Example:
            >>> part = Part(["cross_entropy"], ["loss", "y"], ["bfloat16"], sizes=[(8192, 128256)])
            >>> part.of(shapes())
            [Shape(operation='cross_entropy', dtype='bfloat16', rows=8192, cols=128256, outputs=('loss', 'y'))]
        """
        found = _with("operation", self.operations, grid, lambda shape: shape.operation)
        wanted = [",".join(sorted(self.outputs))] if self.outputs else []
        found = _with("outputs", wanted, found, lambda shape: ",".join(sorted(task(shape).outputs)))
        found = _with("dtype", self.dtypes, found, lambda shape: shape.dtype)
        if self.sizes:
            found = [shape._replace(rows=rows, cols=cols) for shape in found for rows, cols in self.sizes]
        lengths = [str(cols) for cols in self.cols]
        return list(dict.fromkeys(_with("number of columns", lengths, found, lambda shape: str(shape.cols))))


def _with(what: str, wanted: Sequence[str], grid: list[Shape], get: Callable[[Shape], str]) -> list[Shape]:
    """The shapes of a grid with one of the wanted values; all of them if there is none."""
    if not wanted:
        return grid
    check_names(what, wanted, dict.fromkeys(map(get, grid)))
    return [shape for shape in grid if get(shape) in wanted]


def _forms(operation: Operation) -> list[tuple[str, ...]]:
    """The outputs of a call that keeps the state for its gradient, and of one that writes the gradient itself."""
    kept = () if operation.backward else operation.kept_outputs
    elements = tuple(output.name for output in operation.outputs if output.kind == "element")
    return [kept, *([(*operation.always, *elements)] if operation.per_row and elements else [])]


def input_bytes(shape: Shape) -> int:
    """Bytes of the input of a shape."""
    return shape.rows * shape.cols * ITEMSIZE[shape.dtype]


def task(shape: Shape) -> Task:
    """The task of a shape, all of its tensors contiguous."""
    operation, sizes = OPERATIONS[shape.operation], (shape.rows, shape.cols)
    outputs = shape.outputs or operation.always
    whole = contiguous_view(sizes, shape.dtype)
    wide = "float32" if operation.has_target else shape.dtype
    writes_elements = any(output.kind == "element" for output in operation.written(outputs))
    given = optional_operands(operation, writes_elements)
    tensors = {
        operand.name: _view(operand, sizes, whole, wide)
        for operand in operation.operands
        if not operand.optional or operand.name in given
    }
    # The result has the dtype of the input.  For a float32 input it must have float32 accuracy.
    return task_of(operation, outputs, sizes, 1, tensors, Flags(wide=shape.dtype == "float32"))


def _view(operand: Operand, sizes: tuple[int, int], whole: View, wide: str) -> View:
    if operand.kind == "element":
        return whole
    return row_view(sizes, 1, "int64" if operand.dtype == "integer" else wide)


def can_measure(backend: str, shape: Shape) -> bool:
    """True where a backend is measured for a shape.

    The Pallas functions need all operands per row stacked in one array, which the measurement does not build.  So
    operations with a target are not measured with Pallas, and the times of softmax and logsumexp are used instead.
    """
    return backend != "pallas" or not OPERATIONS[shape.operation].has_target


def proposals(shape: Shape, device: Device, backend: str = "cuda") -> list[Request]:
    """The proposals of a backend's strategies for a shape that are to be measured."""
    wanted = task(shape)
    problem = Problem.of(wanted)
    found: list[Plan] = []
    for its_backend, strategy, propose in (*strategies.TABLE, *strategies.FOR_JAX):
        options = propose(problem, device) if its_backend == backend else ""
        # JAX's Mosaic, which compiles this strategy, needs absl-py.
        no_mosaic = backend == "pallas" and strategy == "cluster" and find_spec("absl") is None
        if isinstance(options, str) or no_mosaic:
            continue
        found += [priced(option, problem, device) for option in options if not option.by_estimate]
    least = min((plan.estimate_us for plan in found), default=0.0)
    return [Request(wanted, plan) for plan in found if backend == "cuda" or plan.estimate_us <= HOPELESS * least]
