"""Calls of the CUDA operations with a target column, for tests that run their kernels on the host.

The reference is ops/reference.py in float64.
"""

from __future__ import annotations

from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cuda_simulator import simulate
from onlinesoftmax.core.arrays import namespace
from onlinesoftmax.core.task import ITEMSIZE, Flags, Task, task_of
from onlinesoftmax.core.view import View, row_view
from onlinesoftmax.kernels.cuda import compile
from onlinesoftmax.kernels.cuda.strategy.blocks import slice_chunks
from onlinesoftmax.kernels.request import Request
from onlinesoftmax.ops import OPERATIONS
from onlinesoftmax.ops.reference import evaluate
from onlinesoftmax.planner.plan import Plan
from onlinesoftmax.planner.strategies import TABLE

PROPOSALS = {strategy: propose for backend, strategy, propose in TABLE if backend == "cuda"}

PACKED, PIPELINE, STREAM = "row, packed", "grid, pipelined", "grid, streaming"
"""Names of the second kernel of `row`, and of the second and the third of `grid`, in these tests."""

KERNELS = (*PROPOSALS, PACKED, PIPELINE, STREAM)

Values = dict[str, NDArray[Any]]


def may_spill(arch: str) -> bool:
    """True for sm_100 by NVRTC 13.0, which spills 20 to 216 bytes of some kernels where 13.5 spills none."""
    return arch == "sm_100" and compile.nvrtc_version().startswith("13.0.")


class Ask(NamedTuple):
    """A call on one of the operations.

    Attributes:
        operation: Its name.
        outputs: What it writes.
        given: Names of the optional operands that it has.
        options: Names of its score options; "scales" is a scale for each row.
    """

    operation: str
    outputs: tuple[str, ...]
    given: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "+".join((self.operation, *self.outputs, *self.given, *self.options))

    def features(self) -> list[str]:
        """The operation, and each output, operand and option that the call has or lacks."""
        names = {*self.outputs, *self.given, *self.options}
        return [self.operation, *(name if name in names else f"no {name}" for name in NAMES)]

    def pairs(self) -> list[tuple[str, str]]:
        """Every two of the operation and the outputs, operands and options that the call has."""
        return [*combinations((self.operation, *self.outputs, *self.given, *self.options), 2)]


LOSS, LOSS_BACKWARD, LOGPROB, LOGPROB_BACKWARD = (
    name for name, operation in OPERATIONS.items() if "target" in operation.row_operands
)
TOTAL = "total_loss"
SMOOTH = ("weight", "weight_sum", "smoothing", "ignore_index")

ASKED = [
    Ask(LOSS, ("loss",)),
    Ask(LOSS, ("loss", "lse"), ("ignore_index",)),
    Ask(LOSS, ("loss", "y"), ("dy", "ignore_index")),
    Ask(LOSS, ("loss", "y"), ("dy", *SMOOTH, "z_loss")),
    Ask(LOSS, ("loss", "y", "lse", "entropy"), ("dy", "smoothing"), ("scales",)),
    Ask(LOSS, ("loss", "y"), ("dy", "weight"), ("scales", "softcap")),
    Ask(LOSS, ("loss", "y"), ("dy", *SMOOTH), ("softcap",)),
    Ask(LOSS, ("mean_loss",), ("ignore_index",)),
    Ask(LOSS, ("mean_loss", "y"), ("weight", "ignore_index")),
    Ask(LOSS, ("mean_loss", "y", "lse", "entropy"), (*SMOOTH, "z_loss"), ("scale",)),
    Ask(LOSS, ("total_loss", "y"), ("smoothing", "ignore_index"), ("softcap",)),
    Ask(LOSS, ("total_loss",), ("weight",)),
    Ask(LOSS, ("loss", "y", "entropy"), ("dy", "weight", "z_loss"), ("softcap", "mask")),
    Ask(LOSS, ("total_loss", "y"), ("ignore_index",), ("mask",)),
    Ask(LOSS, ("loss", "largest"), (), ("scale",)),
    Ask(LOSS, ("loss", "y", "entropy", "largest"), ("dy", *SMOOTH), ("scales", "softcap", "mask")),
    Ask(LOSS, ("mean_loss", "y", "largest"), ("ignore_index",)),
    Ask(LOSS_BACKWARD, ("y",), ("ignore_index",)),
    Ask(LOSS_BACKWARD, ("y",), (*SMOOTH, "z_loss"), ("scales", "softcap")),
    Ask(LOSS_BACKWARD, ("y",), ("weight", "z_loss"), ("scale",)),
    Ask(LOSS_BACKWARD, ("y",), ("weight", "ignore_index"), ("scale", "softcap", "mask")),
    Ask(LOGPROB, ("y",)),
    Ask(LOGPROB, ("y", "lse", "entropy"), (), ("scales", "bias", "mask")),
    Ask(LOGPROB, ("y",), (), ("softcap", "causal", "zero")),
    Ask(LOGPROB_BACKWARD, ("y",)),
    Ask(LOGPROB_BACKWARD, ("y",), ("dlse",), ("scales", "causal")),
    Ask(LOGPROB_BACKWARD, ("y",), ("dlse", "entropy", "dentropy"), ("scale", "softcap", "bias", "mask")),
    Ask("logsumexp_backward", ("y",), (), ("scale",)),
    Ask("logsumexp_backward", ("y",), (), ("scales", "softcap", "bias", "mask")),
    Ask("softmax_backward", ("y",), (), ("scale", "softcap", "causal")),
]
"""Every optional operand, with and without the others, and every score option; gradients without a target too."""

NAMES = sorted({name for ask in ASKED for name in (*ask.outputs, *ask.given, *ask.options)})

NUMBERS = {"smoothing": 0.25, "z_loss": 0.125, "ignore_index": 5.0, "scale": 0.75, "softcap": 3.0}


def a_task(ask: Ask, rows: int, cols: int, dtype: str, stride: int = 0, target: str = "int64") -> Task:
    """The task of a call on rows that begin `stride` elements apart."""
    operation, shape = OPERATIONS[ask.operation], (rows, cols)
    wide = "float64" if dtype == "float64" else "float32"
    elements = View((stride or cols, 1), dtype)
    tensors = {"x": elements}
    per_row = row_view(shape, 1, wide)
    for output in operation.written(ask.outputs):
        row = row_view(shape, 1, output.dtype_of(dtype, dtype)) if output.dtype == "index" else per_row
        kinds = {"element": elements, "row": row, "call": View((), dtype)}
        tensors[output.name] = kinds[output.kind]
    for one in operation.operands[1:]:
        if (one.optional and one.name not in ask.given) or one.number:
            continue
        if one.kind == "element" and not one.optional:
            tensors[one.name] = elements
        elif one.kind == "row":
            tensors[one.name] = row_view(shape, 1, target) if one.dtype == "integer" else per_row
        else:
            tensors[one.name] = View((0, one.kind == "element"), wide)
    if "softcap" in ask.options and not operation.scores:
        tensors["logits"] = elements
    if "scales" in ask.options:
        tensors["scale"] = row_view(shape, 1, dtype)
    if "bias" in ask.options:
        tensors["bias"] = View((0, 1), dtype)
    if "mask" in ask.options:
        tensors["mask"] = View((cols, 1), "bool")
    numbers = frozenset({*ask.given, *ask.options} & NUMBERS.keys())
    flags = Flags(numbers, "causal" in ask.options, "zero" in ask.options, wide=ITEMSIZE[dtype] > 2)
    return task_of(operation, ask.outputs, shape, 1, tensors, flags)


def small_plan(strategy: str, rows: int, cols: int, dtype: str, peel: bool, terms: bool) -> Plan:
    """A plan whose blocks have two warps, or groups of 8 lanes with two rows each."""
    vector = 16 // ITEMSIZE[dtype]
    kept = vector if peel else 1
    chunks = max(1, cols // vector)
    of_strategy = partial(Plan, backend="cuda", strategy=strategy.partition(",")[0])
    if strategy == "row":
        held = -(-chunks // 8)
        return of_strategy(-(-rows // 16), held * 8 * vector, 16, depth=2, warps=2, vector=kept, lanes=8, terms=terms)
    if strategy == PACKED:
        columns = -(-cols // 8) * 8
        return of_strategy(-(-rows // 16), columns, 16, depth=2, warps=2, lanes=8, terms=terms, kernel="packed")
    if strategy == "cluster":
        held = -(-(-(-chunks // 16) * 8) // 64)
        return of_strategy(rows * 2, held * 64 * vector, warps=2, splits=2, vector=kept, lanes=64, terms=terms)
    if strategy == "grid":
        # Two teams of three blocks: one tile in registers, one in shared memory, the others streamed one by one.
        return of_strategy(6, 32 * vector, depth=1, warps=1, splits=3, vector=kept, lanes=32, shared=1, terms=terms)
    if strategy == PIPELINE:
        # Two teams of three blocks of two warps and two more.  A tile has 64 chunks; a ring has a tile more than a row.
        tiles = -(-slice_chunks(chunks, 3) // 64)
        return of_strategy(
            6, tiles * 64 * vector, depth=1, warps=4, stages=tiles + 1, splits=3, vector=kept, lanes=64,
            shared=tiles + 1, terms=terms and dtype != "bfloat16", kernel="pipeline",
        )  # fmt: skip
    if strategy == STREAM:
        # Three teams of two blocks of one warp and two more.  A block keeps three tiles on chip, one in registers.
        return of_strategy(
            6, 32 * vector, depth=1, warps=3, stages=2, splits=2, vector=kept, lanes=32, shared=2, kernel="stream",
            reads=2,
        )  # fmt: skip
    return of_strategy(rows, 64 * vector, warps=2, vector=kept, lanes=64)


def to_bits(x: NDArray[Any], dtype: str) -> NDArray[Any]:
    """X as it lies in memory; bfloat16 as uint16, which must be exact."""
    if dtype != "bfloat16":
        return np.ascontiguousarray(x, dtype)
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any(), "not a bfloat16"
    return (bits >> 16).astype(np.uint16)


def from_bits(x: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    if dtype != "bfloat16":
        return x.astype(np.float64)
    return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def rounded(x: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    """The nearest numbers of a dtype; for bfloat16 towards zero."""
    if dtype != "bfloat16":
        return x.astype(dtype).astype(np.float64)
    return (x.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64)


def some_values(ask: Ask, task: Task, targets: NDArray[np.int64], seed: int = 0) -> Values:
    """Every operand in float64, as the reference takes it: row operands are columns."""
    rng = np.random.default_rng(seed)
    rows, cols = task.rows, task.cols
    values: Values = {"x": rounded(2 * rng.standard_normal((rows, cols)), task.dtypes["x"])}
    values["target"] = targets[:, None]
    for name in OPERATIONS[ask.operation].row_operands:
        if name not in values and name in task.dtypes:
            values[name] = rounded(rng.standard_normal((rows, 1)), task.dtypes[name])
    operation = OPERATIONS[ask.operation]
    if not operation.scores:
        # A saved output, and its incoming gradient.
        z = values["x"]
        if "logits" in task.dtypes:
            values["logits"] = z
        values["x"] = rounded(evaluate(operation.forward.name, namespace(z), {"x": z}, 1), task.dtypes["x"])
        values["dy"] = rounded(rng.standard_normal((rows, cols)), task.dtypes["dy"])
    if "weight" in task.dtypes:
        values["weight"] = rounded(rng.uniform(0, 2, cols), task.dtypes["weight"])
        values["weight"][::7] = 0
    if "weight_sum" in task.dtypes:
        values["weight_sum"] = rounded(values["weight"].sum(keepdims=True), task.dtypes["weight_sum"])
    if "scale" in task.dtypes:
        values["scale"] = rounded(rng.uniform(0.25, 1, (rows, 1)), task.dtypes["scale"])
    if "bias" in task.dtypes:
        values["bias"] = rounded(rng.standard_normal(cols), task.dtypes["bias"])
    if "mask" in task.dtypes:
        values["mask"] = rng.uniform(size=(rows, cols)) < 0.7
    if not operation.reduces:
        z = scores(ask, values)[0]
        values["m"] = np.clip(z.max(1, keepdims=True), np.finfo(np.float32).min, np.finfo(np.float32).max)
        values["l"] = np.exp(z - values["m"]).sum(1, keepdims=True)
        for name in ("lse", "entropy"):
            if name in values:
                values[name] = evaluate(operation.forward.name, namespace(z), {"x": z}, 1, name)
    return values


def scores(ask: Ask, values: Values) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The scores, and their derivatives with respect to the logits: 0 where a score is excluded."""
    x = values.get("logits", values["x"])
    scale = NUMBERS["scale"] if "scale" in ask.options else values.get("scale", 1.0)
    z, slope = x * scale, np.full(x.shape, scale)
    if "softcap" in ask.options:
        t = np.tanh(z / NUMBERS["softcap"])
        z, slope = NUMBERS["softcap"] * t, slope * (1 - t * t)
    if "bias" in ask.options:
        z = z + values["bias"]
    seen = np.ones(x.shape, bool)
    if "mask" in ask.options:
        seen &= values["mask"]
    if "causal" in ask.options:
        rows, cols = x.shape
        seen &= np.arange(cols) <= np.arange(rows)[:, None] + cols - rows
    return np.where(seen, z, -np.inf), np.where(seen, slope, 0.0)


def expected(ask: Ask, values: Values, output: str) -> NDArray[np.float64]:
    """One output by the reference, in float64."""
    operation = OPERATIONS[ask.operation]
    z, slope = scores(ask, values)
    if not operation.scores:
        z = values["x"]
    given: dict[str, Any] = {
        name: value for name, value in values.items() if name not in ("x", "scale", "bias", "mask", "logits")
    }
    given |= {"x": z} | {name: NUMBERS[name] for name in ask.given if name in NUMBERS}
    scalar = next((name for name in ask.outputs if name in operation.call_outputs), "")

    def of(name: str) -> NDArray[np.float64]:
        return np.asarray(evaluate(ask.operation, namespace(z), given, 1, name))

    with np.errstate(all="ignore"):
        if scalar and output == "y":
            given["dy"] = np.full((len(z), 1), 1.0 if scalar == TOTAL else of(scalar) / of(TOTAL))
        y = of(output)
        if output == scalar:
            return y.reshape(1, 1)
        if operation.output(output).kind == "row":
            # A row without a score gives zero, if the caller asks for it; else it gives NaN.
            dead = np.isneginf(z).all(1, keepdims=True) & (output == "y") & ("zero" in ask.options)
            return np.where(dead & (values.get("target", 0) >= 0), 0, y)
        if operation.backward or operation.output(output).on_request:
            # An excluded element has no gradient, even where it is the target or its row has no score.
            return np.where(slope == 0, 0, y * slope)
        return y


def run(
    ask: Ask, request: Request, values: Values, folder: Path, in_place: bool = False, *, at_once: bool = False
) -> Values:
    """The outputs of a kernel, in float64; elements as rows × cols, and the memory between rows must stay."""
    task = request.task
    rows, cols = task.rows, task.cols
    stride = cols if request.rest else task.tensors["x"].outer[0] or cols
    poison, arrays = 1e4 if task.dtypes["x"] == "float64" else 8192.0, {}
    inputs = {*request.operation.element_operands, *{"logits"} & task.dtypes.keys()}
    elements = {*inputs, *(output.name for output in task.written if output.kind == "element")}
    for name, dtype in task.dtypes.items():
        if name in elements:
            memory = np.full((rows, stride), poison)
            if name in inputs:
                memory[:, :cols] = values[name]
            arrays[name] = aligned(to_bits(memory, dtype))
        elif name in task.outputs:
            count = 1 if name in request.operation.call_outputs else rows
            arrays[name] = to_bits(np.full(count, poison), dtype)
        else:
            arrays[name] = to_bits(values[name], dtype)
    if request.rest is not None:
        # Row by row as far as the task's stride, then a tensor with rows of its own.
        memory = np.full((rows, request.rest.stride), poison)
        memory[:, : cols - request.rest.first] = values["x"][:, request.rest.first :]
        arrays |= {"x": aligned(to_bits(values["x"][:, : request.rest.first], task.dtypes["x"])),
                   "rest": aligned(to_bits(memory, task.dtypes["x"]))}  # fmt: skip
    if in_place:
        arrays["y"] = arrays["x"]
    numbers = {name: NUMBERS[name] for name in task.numbers}
    simulate(request, arrays, numbers, folder, at_once=at_once)
    found: Values = {}
    for name in task.outputs:
        y = from_bits(arrays[name], task.dtypes[name])
        if y.ndim == 2:
            assert_surroundings_stay(arrays[name])
            if request.rest is not None:
                assert_surroundings_stay(arrays["rest"])
                y = np.concatenate([y, from_bits(arrays["rest"], task.dtypes["x"])], 1)
            assert (y[:, cols:] == poison).all(), "elements past the end of a row are written"
            y = y[:, :cols]
        found[name] = y.reshape(1 if name in request.operation.call_outputs else rows, -1)
    return found


def aligned(x: NDArray[Any]) -> NDArray[Any]:
    """A copy whose first element lies on 128 bytes, as a kernel's sums depend on the position in a cache line.

    The bytes before and behind it are NaN in every dtype, so that an element outside shows in all sums.
    """
    raw = np.full(x.nbytes + 256, 255, np.uint8)
    begin = 128 - raw.ctypes.data % 128
    y = raw[begin : begin + x.nbytes].view(x.dtype).reshape(x.shape)
    y[:] = x
    return y


def assert_surroundings_stay(y: NDArray[Any]) -> None:
    """The bytes around an array of `aligned` are as they were."""
    assert isinstance(y.base, np.ndarray)
    begin = y.ctypes.data - y.base.ctypes.data
    assert (np.delete(y.base, slice(begin, begin + y.nbytes)) == 255).all(), "elements outside of a tensor are written"


UNIT = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7}
"""Distance from 1 to the next number."""


def check(ask: Ask, request: Request, values: Values, found: Values) -> None:
    """Compare with the reference.

    A float32 or float64 score has the rounding error of numbers of its size, 16 here, and so has all that follows.  An
    element of 16 bits is rounded once more.
    """
    for name, y in found.items():
        assert_near(
            name, y, expected(ask, values, name), request.task.accumulator, request.task.dtypes[name], values["x"]
        )


def assert_near(name: str, y: Any, right: Any, accumulator: str, dtype: str, x: NDArray[Any]) -> None:
    """Compare one output for the logits x, as `check` does; a column is exact."""
    if dtype == "int64":
        np.testing.assert_array_equal(y, right)
        return
    tolerance = 16 * UNIT[accumulator] * np.maximum(1, np.abs(right)) * (1 + x.shape[1] ** 0.5 / 4)
    tolerance = tolerance + UNIT[dtype] * np.abs(right)
    with np.errstate(invalid="ignore"):
        same = (np.abs(y - right) <= tolerance) | (y == right) | (np.isnan(y) & np.isnan(right))
    assert same.all(), (name, np.argwhere(~same)[:5], y[~same][:5], right[~same][:5])


STRATEGY_COLS = {
    "row": (37, 48), "cluster": (70, 96), "grid": (611, 640), "looped": (293, 320), PACKED: (37, 42),
    PIPELINE: (611, 640), STREAM: (2021, 2048),
}  # fmt: skip
"""Columns without and with whole chunks in aligned rows."""
