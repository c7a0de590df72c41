"""The grid of `tune`: the operations and the shapes that it measures, and the proposals for each."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

from ..core.device import Device
from ..core.operations import OPERATIONS, Operand, Operation
from ..core.problem import Problem
from ..core.task import ITEMSIZE, Flags, Task, TensorSpec, contiguous_spec, row_spec, task_of
from ..kernels.request import Request
from ..planner import strategies
from ..planner.measured import stand_in
from ..planner.plan import Plan, priced

FULL_BYTES = 1 << 27
"""Bytes of a full input: at least twice the L2 of the measured GPUs, so that the data come from memory."""

SHORT = 1 << 18
"""Up to this number of columns a measured length is 1.5 or 1.33 times the one before, beyond it 2 or 4 times."""

FEW_ROWS = (1, 16, 128, 1024, 8192)
"""Numbers of rows that are measured besides those of a full input, where columns are a power of two."""

CLASSES = (1000, 32000, 50256, 128256, 151936, 201088, 256000)
"""Numbers of classes: 1000 of ImageNet, then vocabulary sizes of language models.  With one column more, for unaligned
rows, 50256 is the vocabulary of GPT-2."""

LARGE_BYTES = 1 << 30
"""Bytes of a large input of long rows, for operations whose only outputs are numbers per row.

For these operations, one block per row is the best plan only if there are many rows; with few rows, several blocks
share each row.
"""

LONG = 32000
"""Columns from which large inputs are measured: those of vocabularies."""

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
        return [Shape("softmax", dtype, 1024, cols) for dtype in ("bfloat16", "float32") for cols in (256, 4096, 65536)]
    powers, between = [64 << i for i in range(13)], [*(96 << i for i in range(12)), *CLASSES]
    long = [1 << i for i in (19, 20, 21, 22, 23, 24, 26, 28)]
    measured = list(dict.fromkeys(stand_in(Problem(name, 1, 1)) for name in OPERATIONS))
    measured.sort(key=lambda name: OPERATIONS[name].per_row)
    full, unaligned, few = [], [], []
    for operation in measured:
        per_row, plain = OPERATIONS[operation].per_row, OPERATIONS[operation].inputs == 1
        # Operations that write one number per row have few plans to choose from, so lengths between powers of two are
        # left out.
        lengths = [*CLASSES, *(powers[::-1]), *(() if per_row else between[:12]), *long]
        for cols in lengths:
            for dtype in ("bfloat16", "float32"):
                rows = max(FULL_BYTES // (cols * ITEMSIZE[dtype]), 1)
                full.append(Shape(operation, dtype, rows, cols))
                if cols <= SHORT and plain and not per_row:
                    unaligned.append(Shape(operation, dtype, rows, cols + 1))
                if cols not in between:
                    few += [Shape(operation, dtype, some, cols) for some in FEW_ROWS if 4 * some <= rows]
    more_full, more_unaligned, more_few = _with_targets()
    full += more_full
    return [*full, *_large(full), *unaligned, *more_unaligned, *few, *more_few]


def _large(full: list[Shape]) -> list[Shape]:
    """The large inputs of long rows, for operations that write no elements."""
    return [
        shape._replace(rows=shape.rows * (LARGE_BYTES // FULL_BYTES))
        for shape in full
        if LONG <= shape.cols <= SHORT and not task(shape).writes_elements
    ]


def _with_targets() -> tuple[list[Shape], list[Shape], list[Shape]]:
    """Full inputs, unaligned ones and few rows of the operations with a target column, in every form of a call."""
    forms = [
        (operation.name, outputs)
        for operation in OPERATIONS.values()
        if operation.has_target
        for outputs in _forms(operation)
    ]
    lengths = [*CLASSES, *(SHORTEST_OF_TARGETS << i for i in range(11))]
    full, unaligned, few = [], [], []
    for name, outputs in forms:
        for cols in lengths:
            for dtype in ("bfloat16", "float32"):
                rows = FULL_BYTES // (cols * ITEMSIZE[dtype])
                full.append(Shape(name, dtype, rows, cols, outputs))
                if cols in CLASSES:
                    unaligned.append(Shape(name, dtype, rows, cols + 1, outputs))
                else:
                    few += [Shape(name, dtype, some, cols, outputs) for some in FEW_ROWS[1:] if 4 * some <= rows]
    return full, unaligned, few


def _forms(operation: Operation) -> list[tuple[str, ...]]:
    """The outputs of a call that keeps the state for its gradient, and of one that writes the gradient itself."""
    kept = () if operation.backward else operation.kept_outputs
    elements = tuple(output.name for output in operation.outputs if output.kind == "element")
    return [kept, *([(*operation.always, *elements)] if operation.per_row and elements else [])]


def task(shape: Shape) -> Task:
    """The task of a shape, all of its tensors contiguous."""
    operation, sizes = OPERATIONS[shape.operation], (shape.rows, shape.cols)
    outputs = shape.outputs or operation.always
    whole = contiguous_spec(sizes, shape.dtype)
    written = operation.written(outputs)
    tensors = {t.name: whole for t in written if t.kind == "element"}
    wide = "float32" if operation.has_target else shape.dtype
    tensors |= {t.name: row_spec(sizes, 1, wide) for t in written if t.kind == "row"}
    for operand in operation.operands:
        if _given(operand, bool(tensors.keys() & {t.name for t in written if t.kind == "element"})):
            tensors[operand.name] = _spec(operand, sizes, whole, wide)
    # The result has the dtype of the input.  For a float32 input it must have float32 accuracy.
    return task_of(operation, outputs, sizes, 1, tensors, Flags(wide=shape.dtype == "float32"))


def _given(operand: Operand, writes_elements: bool) -> bool:
    """True for the operands that are measured: all that a call must have, and those per row that a gradient reads."""
    return not operand.optional or (operand.kind == "row" and writes_elements)


def _spec(operand: Operand, sizes: tuple[int, int], whole: TensorSpec, wide: str) -> TensorSpec:
    if operand.kind == "element":
        return whole
    return row_spec(sizes, 1, "int64" if operand.dtype == "integer" else wide)


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
        if isinstance(options, str) or (strategy == "cluster" and backend == "pallas" and find_spec("absl") is None):
            continue
        found += [priced(option, problem, device) for option in options]
    least = min((plan.estimate_us for plan in found), default=0.0)
    return [Request(wanted, plan) for plan in found if backend == "cuda" or plan.estimate_us <= HOPELESS * least]
