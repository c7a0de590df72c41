"""The CUDA operations with a target column: their formulas, run by the host (tests/cuda_simulator.py), and their code.

Every strategy runs every operation on rows that begin at every offset from 16 bytes, and every column is the target of
some row.  The reference is core/reference.py in float64.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from cuda_simulator import COMPILER, simulate
from onlinesoftmax.core.arrays import namespace
from onlinesoftmax.core.device import known
from onlinesoftmax.core.operations import OPERATIONS
from onlinesoftmax.core.problem import Problem
from onlinesoftmax.core.reference import evaluate
from onlinesoftmax.core.task import ITEMSIZE, Flags, Task, TensorSpec, row_spec, task_of
from onlinesoftmax.kernels.cuda import compile, source
from onlinesoftmax.kernels.request import Request
from onlinesoftmax.planner.plan import Plan, priced
from onlinesoftmax.planner.proposal import Blocks, Threads
from onlinesoftmax.planner.strategies import TABLE

PROPOSALS = {strategy: propose for backend, strategy, propose in TABLE if backend == "cuda"}

Values = dict[str, NDArray[Any]]


class Ask(NamedTuple):
    """A call on one of the operations.

    Attributes:
        operation: Its name.
        outputs: What it writes.
        given: Names of the optional operands that it has.
        options: Names of its score options.
    """

    operation: str
    outputs: tuple[str, ...]
    given: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "+".join((self.operation, *self.outputs, *self.given, *self.options))


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
    Ask(LOSS, ("loss", "y", "lse", "entropy"), ("dy", "smoothing"), ("scale",)),
    Ask(LOSS, ("loss", "y"), ("dy", "weight"), ("scale", "softcap")),
    Ask(LOSS, ("loss", "y"), ("dy", *SMOOTH), ("softcap",)),
    Ask(LOSS, ("mean_loss",), ("ignore_index",)),
    Ask(LOSS, ("mean_loss", "y"), ("weight", "ignore_index")),
    Ask(LOSS, ("mean_loss", "y", "lse", "entropy"), (*SMOOTH, "z_loss"), ("scale",)),
    Ask(LOSS, ("total_loss", "y"), ("smoothing", "ignore_index"), ("softcap",)),
    Ask(LOSS, ("total_loss",), ("weight",)),
    Ask(LOSS_BACKWARD, ("y",), ("ignore_index",)),
    Ask(LOSS_BACKWARD, ("y",), (*SMOOTH, "z_loss"), ("scale", "softcap")),
    Ask(LOSS_BACKWARD, ("y",), ("weight", "z_loss"), ("scale",)),
    Ask(LOGPROB, ("y",)),
    Ask(LOGPROB, ("y", "lse", "entropy"), (), ("scale", "bias", "mask")),
    Ask(LOGPROB, ("y",), (), ("softcap", "causal", "zero")),
    Ask(LOGPROB_BACKWARD, ("y",)),
    Ask(LOGPROB_BACKWARD, ("y",), ("dlse",), ("scale", "causal")),
    Ask(LOGPROB_BACKWARD, ("y",), ("dlse", "entropy", "dentropy"), ("scale", "softcap", "bias", "mask")),
]
"""Every optional operand, with and without the others, and every score option."""

NUMBERS = {"smoothing": 0.25, "z_loss": 0.125, "ignore_index": 5.0, "scale": 0.75, "softcap": 3.0}


def a_task(ask: Ask, rows: int, cols: int, dtype: str, stride: int = 0, target: str = "int64") -> Task:
    """The task of a call on rows that begin `stride` elements apart."""
    operation, shape = OPERATIONS[ask.operation], (rows, cols)
    wide = "float64" if dtype == "float64" else "float32"
    elements = TensorSpec((stride or cols, 1), dtype)
    tensors = {"x": elements}
    per_row = row_spec(shape, 1, wide)
    for output in operation.written(ask.outputs):
        kinds = {"element": elements, "row": per_row, "call": TensorSpec((), dtype)}
        tensors[output.name] = kinds[output.kind]
    for one in operation.operands[1:]:
        if (one.optional and one.name not in ask.given) or one.number:
            continue
        if one.kind == "row":
            tensors[one.name] = row_spec(shape, 1, target) if one.dtype == "integer" else per_row
        else:
            tensors[one.name] = TensorSpec((0, one.kind == "element"), wide)
    if "bias" in ask.options:
        tensors["bias"] = TensorSpec((0, 1), dtype)
    if "mask" in ask.options:
        tensors["mask"] = TensorSpec((cols, 1), "bool")
    numbers = frozenset({*ask.given, *ask.options} & NUMBERS.keys())
    flags = Flags(numbers, "causal" in ask.options, "zero" in ask.options, wide=ITEMSIZE[dtype] > 2)
    return task_of(operation, ask.outputs, shape, 1, tensors, flags)


def small_plan(strategy: str, rows: int, cols: int, dtype: str, peel: bool, terms: bool) -> Plan:
    """A plan whose blocks have two warps, or groups of 8 lanes with two rows each."""
    vector = 16 // ITEMSIZE[dtype]
    kept = vector if peel else 1
    chunks = max(1, cols // vector)
    if strategy == "row":
        held = -(-chunks // 8)
        blocks = Blocks(-(-rows // 16), held * 8 * vector, 16, depth=2, warps=2, vector=kept)
        return Plan("cuda", strategy, "", blocks, Threads(lanes=8, terms=terms))
    if strategy == "cluster":
        held = -(-(-(-chunks // 16) * 8) // 64)
        blocks = Blocks(rows * 2, held * 64 * vector, warps=2, splits=2, vector=kept)
        return Plan("cuda", strategy, "", blocks, Threads(lanes=64, terms=terms))
    if strategy == "grid":
        # Two teams of three blocks: one tile in registers, one in shared memory, the others streamed one by one.
        blocks = Blocks(6, 32 * vector, depth=1, warps=1, splits=3, vector=kept)
        return Plan("cuda", strategy, "", blocks, Threads(lanes=32, shared=1, terms=terms))
    return Plan("cuda", strategy, "", Blocks(rows, 64 * vector, warps=2, vector=kept), Threads(lanes=64))


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
    rows, cols = task.layout.rows, task.layout.cols
    values: Values = {"x": rounded(2 * rng.standard_normal((rows, cols)), task.dtypes["x"])}
    values["target"] = targets[:, None]
    for name in OPERATIONS[ask.operation].row_operands:
        if name not in values and name in task.dtypes:
            values[name] = rounded(rng.standard_normal((rows, 1)), task.dtypes[name])
    if "weight" in task.dtypes:
        values["weight"] = rounded(rng.uniform(0, 2, cols), task.dtypes["weight"])
        values["weight"][::7] = 0
    if "weight_sum" in task.dtypes:
        values["weight_sum"] = rounded(values["weight"].sum(keepdims=True), task.dtypes["weight_sum"])
    if "bias" in task.dtypes:
        values["bias"] = rounded(rng.standard_normal(cols), task.dtypes["bias"])
    if "mask" in task.dtypes:
        values["mask"] = rng.uniform(size=(rows, cols)) < 0.7
    if not OPERATIONS[ask.operation].reduces:
        z = scores(ask, values)[0]
        values["m"] = np.clip(z.max(1, keepdims=True), np.finfo(np.float32).min, np.finfo(np.float32).max)
        values["l"] = np.exp(z - values["m"]).sum(1, keepdims=True)
        if "entropy" in values:
            with np.errstate(divide="ignore", invalid="ignore"):
                p = np.exp(z - values["m"]) / values["l"]
                lse = values["m"] + np.log(values["l"])
            values["entropy"] = lse - (p * np.where(p == 0, 0, z)).sum(1, keepdims=True)
    return values


def scores(ask: Ask, values: Values) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The scores, and their derivatives with respect to the logits: 0 where a score is excluded."""
    x = values["x"]
    scale = NUMBERS["scale"] if "scale" in ask.options else 1.0
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
    z, slope = scores(ask, values)
    given: dict[str, Any] = {name: value for name, value in values.items() if name not in ("x", "bias", "mask")}
    given |= {name: NUMBERS[name] for name in ask.given if name in NUMBERS}
    scalar = next((name for name in ask.outputs if name in OPERATIONS[ask.operation].call_outputs), "")
    with np.errstate(all="ignore"):
        if scalar and output == "y":
            total, reduced = (evaluate(ask.operation, namespace(z), {**given, "x": z}, 1, n) for n in (TOTAL, scalar))
            given["dy"] = np.full((len(z), 1), 1.0 if scalar == TOTAL else reduced / total)
        y = np.asarray(evaluate(ask.operation, namespace(z), {**given, "x": z}, 1, output))
        if output == scalar:
            return y.reshape(1, 1)
        # A row without a score gives zeros, if the caller asks for them; else it gives NaN.
        dead = np.isneginf(z).all(1, keepdims=True) & (output == "y")
        if y.shape[1] == 1:
            return np.where(dead & ("zero" in ask.options) & (values["target"] >= 0), 0, y)
        # An excluded element of another row has no gradient, even where it is the target.
        return np.where(dead, 0 if "zero" in ask.options else np.nan, np.where(slope == 0, 0, y * slope))


def run(ask: Ask, request: Request, values: Values, folder: Path, in_place: bool = False) -> Values:
    """The outputs of a kernel, in float64; elements as rows × cols, and the memory between rows must stay."""
    task, layout = request.task, request.layout
    rows, cols = layout.rows, layout.cols
    stride = layout.x.strides[0] or cols
    poison, arrays = 1e4 if task.dtypes["x"] == "float64" else 8192.0, {}
    elements = {"x"} | {output.name for output in task.written if output.kind == "element"}
    for name, dtype in task.dtypes.items():
        if name in elements:
            memory = np.full((rows, stride), poison)
            if name == "x":
                memory[:, :cols] = values["x"]
            arrays[name] = _aligned(to_bits(memory, dtype))
        elif name in task.outputs:
            count = 1 if name in request.operation.call_outputs else rows
            arrays[name] = to_bits(np.full(count, poison), dtype)
        else:
            kept = values[name].astype(dtype) if dtype in ("int64", "int32", "uint8", "bool") else values[name]
            arrays[name] = np.ascontiguousarray(kept if dtype != "bfloat16" else to_bits(kept, dtype))
            if dtype not in ("bfloat16", "bool"):
                arrays[name] = arrays[name].astype(dtype)
    if in_place:
        arrays["y"] = arrays["x"]
    simulate(request, arrays, {name: NUMBERS[name] for name in task.numbers}, folder)
    found: Values = {}
    for name in task.outputs:
        y = from_bits(arrays[name], task.dtypes[name])
        if y.ndim == 2:
            assert (y[:, cols:] == poison).all(), "elements past the end of a row are written"
            y = y[:, :cols]
        found[name] = y.reshape(1 if name in request.operation.call_outputs else rows, -1)
    return found


def _aligned(x: NDArray[Any]) -> NDArray[Any]:
    """A copy whose first element lies on 16 bytes."""
    raw = np.zeros(x.nbytes + 16, np.uint8)
    begin = -raw.ctypes.data % 16
    y = raw[begin : begin + x.nbytes].view(x.dtype).reshape(x.shape)
    y[:] = x
    return y


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for shared libraries, one for each distinct kernel."""
    return tmp_path_factory.mktemp("targets")


UNIT = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7}
"""Distance from 1 to the next number."""


def check(ask: Ask, request: Request, values: Values, found: Values) -> None:
    """Compare with the reference.

    A float32 or float64 score has the rounding error of numbers of its size, 16 here, and so has all that follows.  An
    element of 16 bits is rounded once more.
    """
    accumulator = request.task.accumulator
    for name, y in found.items():
        right = expected(ask, values, name)
        tolerance = 16 * UNIT[accumulator] * np.maximum(1, np.abs(right)) * (1 + request.layout.cols**0.5 / 4)
        tolerance = tolerance + UNIT[request.task.dtypes[name]] * np.abs(right)
        with np.errstate(invalid="ignore"):
            same = (np.abs(y - right) <= tolerance) | (y == right) | (np.isnan(y) & np.isnan(right))
        assert same.all(), (name, np.argwhere(~same)[:5], y[~same][:5], right[~same][:5])


STRATEGY_COLS = {"row": (37, 48), "cluster": (70, 96), "grid": (611, 640), "looped": (293, 320)}
"""Columns without and with whole chunks in aligned rows."""


def _cells() -> list[Any]:
    """Every strategy meets every call; dtypes, alignment, kept terms and in-place outputs take turns."""
    cells = []
    for (i, strategy), (j, ask) in itertools.product(enumerate(PROPOSALS), enumerate(ASKED)):
        dtype = ("float64", "bfloat16", "float32")[(i + j) % 3]
        peel = (i + j) % 4 != 3
        cells.append(pytest.param(strategy, ask, dtype, peel, j % 2 == 0, id=f"{strategy}-{dtype}-{ask}"))
    return cells


@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
@pytest.mark.parametrize(("strategy", "ask", "dtype", "peel", "terms"), _cells())
def test_formulas(strategy: str, ask: Ask, dtype: str, peel: bool, terms: bool, folder: Path) -> None:
    """Every column is the target of a row; one of them is ignored.  Then come targets that are no column.

    A scalar would be NaN with a target that is no column, so it gets none.
    """
    cols = STRATEGY_COLS[strategy][not peel]
    every = np.arange(cols) if cols < 100 else np.r_[0:9, 250:264, cols - 9 : cols]
    targets = np.r_[every, -100, -1, cols, 1 << 40].astype(np.int64)
    targets = every if {*ask.outputs} & {*OPERATIONS[LOSS].call_outputs} else targets
    task = a_task(ask, len(targets), cols, dtype, cols + 1 - cols % 2 if peel else cols)
    request = Request(task, small_plan(strategy, len(targets), cols, dtype, peel, terms))
    values = some_values(ask, task, targets)
    found = run(ask, request, values, folder, in_place="y" in ask.outputs and task.writes_elements and terms)
    check(ask, request, values, found)


SCALARS = [
    Ask(LOSS, ("mean_loss", "y"), ("ignore_index",)),
    Ask(LOSS, ("mean_loss",), ("weight", "ignore_index")),
    Ask(LOSS, ("total_loss", "y")),
]


@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("ask", SCALARS, ids=str)
@pytest.mark.parametrize("strategy", PROPOSALS)
def test_scalars_of_many_rows(strategy: str, ask: Ask, dtype: str, folder: Path) -> None:
    """Numbers of rows around the ends of the tiles whose losses one block adds; every run gives the same bits."""
    plan = small_plan(strategy, 1, STRATEGY_COLS[strategy][1], dtype, True, True)
    tile = source.tile_of_total(Request(a_task(ask, 1, 40, dtype), plan))
    for rows in (1, tile - 1, tile, 2 * tile + 1) if strategy == "row" else (1, tile + 1):
        cols = min(STRATEGY_COLS[strategy][1], 48)
        task = a_task(ask, rows, cols, dtype)
        request = Request(task, small_plan(strategy, rows, cols, dtype, True, True))
        values = some_values(ask, task, np.arange(rows) % cols)
        first = run(ask, request, values, folder)
        check(ask, request, values, first)
        again = run(ask, request, values, folder)
        assert all(np.array_equal(again[name], y, equal_nan=True) for name, y in first.items())


@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
@pytest.mark.parametrize("weight", [(), ("weight",)], ids=str)
def test_scalars_of_no_loss(weight: tuple[str, ...], folder: Path) -> None:
    """All rows ignored: 0 / 0 is NaN, as in PyTorch.  A target that is no column, or a NaN, makes the scalar NaN."""
    cols, ignored = 40, int(NUMBERS["ignore_index"])
    for scalar, targets in ((TOTAL, [ignored] * 7), ("mean_loss", [ignored] * 7), ("mean_loss", [1, cols, 2])):
        ask = Ask(LOSS, (scalar, "y"), ("ignore_index", *weight))
        task = a_task(ask, len(targets), cols, "float32")
        request = Request(task, small_plan("row", len(targets), cols, "float32", True, True))
        values = some_values(ask, task, np.array(targets))
        found = run(ask, request, values, folder)
        assert found[scalar] == 0 if scalar == TOTAL else np.isnan(found[scalar])
        if targets[0] == ignored:
            assert (found["y"] == 0).all()


OWNED = [("row", range(1, 44)), ("cluster", range(60, 72)), ("grid", range(600, 606)), ("looped", range(120, 136))]
"""Lengths in all residues of a chunk, and around the ends of slices and tiles."""


@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize(("strategy", "lengths"), OWNED, ids=lambda value: str(value))
def test_one_element_of_a_row_is_the_target(strategy: str, lengths: range, dtype: str, folder: Path) -> None:
    """The gradient of a row of equal logits is 1 / cols, less 1 in one column."""
    ask = Ask(LOSS, ("loss", "y"), ("dy",))
    for cols in lengths:
        targets = np.arange(cols) if cols < 200 else np.r_[0:20, cols // 3 : cols // 3 + 20, cols - 20 : cols]
        rows = len(targets)
        task = a_task(ask, rows, cols, dtype, cols + 1 - cols % 2)
        peel = cols >= 16 // ITEMSIZE[dtype]
        request = Request(task, small_plan(strategy, rows, cols, dtype, peel, terms=cols % 2 == 0))
        values = {"x": np.zeros((rows, cols)), "target": targets[:, None], "dy": np.ones((rows, 1))}
        found = run(ask, request, values, folder)
        hit = found["y"] < 0
        assert (hit == (np.arange(cols) == targets[:, None])).all() or cols == 1
        check(ask, request, values, found)


SPECIAL = {
    "-inf in another column": ([-np.inf, 1, 2, 3], 2),
    "-inf in the target": ([1, -np.inf, 2, 3], 1),
    "only -inf": ([-np.inf] * 4, 1),
    "NaN": ([1, np.nan, 2, 3], 0),
    "an ignored NaN": ([1, np.nan, 2, 3], 5),
    "ignored infinities": ([np.inf, -np.inf, 2, 3], 5),
    "no column": ([1, 2, 3, np.nan], 4),
    "a large offset": ([30000.0, 30001.0, 29999.0, 30002.0], 1),
    **{f"a sure answer, {size}": ([0.0, size, 1.0, 2.0], 1) for size in (41.0, 87.0, 203.0, 1016.0)},
}
"""Name: the first four logits of a row, and the target.  The others are -3."""


@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
@pytest.mark.parametrize("given", [("ignore_index",), ("ignore_index", "smoothing", "z_loss")], ids=str)
@pytest.mark.parametrize(("strategy", "terms"), [("row", True), ("row", False), ("cluster", True)])
def test_special_values(strategy: str, terms: bool, given: tuple[str, ...], folder: Path) -> None:
    cols = 65
    x = np.full((len(SPECIAL), cols), -3.0)
    x[:, :4] = [row for row, _ in SPECIAL.values()]
    targets = np.array([target for _, target in SPECIAL.values()])
    # float64 is left out: with a large offset the reference is no more exact.
    for dtype in ("float32", "bfloat16"):
        values = {"x": rounded(x, dtype), "target": targets[:, None], "dy": np.full((len(x), 1), 2.0)}
        ask = Ask(LOSS, ("loss", "y"), ("dy", *given))
        request = Request(a_task(ask, len(x), cols, dtype), small_plan(strategy, len(x), cols, dtype, True, terms))
        found = run(ask, request, values, folder)
        ignored = targets == NUMBERS["ignore_index"]
        assert (found["y"][ignored] == 0).all()
        assert (found["loss"][ignored] == 0).all()
        assert not (found["loss"] < 0).any()
        check(ask, request, values, found)


GPUS = {"a100": "sm_80", "h200": "sm_90", "b200": "sm_100"}
SHAPES = {"row": (65536, 1024), "cluster": (256, 1 << 15), "grid": (1, 1 << 22), "looped": (2048, 128256)}


def planned(gpu: str, strategy: str, ask: Ask, dtype: str, target: str, shape: tuple[int, int]) -> Request:
    """The request with the first proposal of the planner."""
    device, task = known(gpu), a_task(ask, *shape, dtype, target=target)
    problem = Problem.of(task)
    proposals = PROPOSALS[strategy](problem, device)
    assert not isinstance(proposals, str), proposals
    return Request(task, priced(proposals[0], problem, device))


def _compiled() -> list[Any]:
    """Every call meets every strategy; GPUs, dtypes, dtypes of the target and unaligned rows take turns."""
    cells = []
    for (i, strategy), (j, ask) in itertools.product(enumerate(PROPOSALS), enumerate(ASKED)):
        gpu = ("h200", "h200", "b200", "a100")[(i + j) % 4]
        gpu = "h200" if strategy == "cluster" and gpu == "a100" else gpu
        dtype = ("bfloat16", "float32", "float16", "float64", "bfloat16")[(2 * i + j) % 5]
        target = ("int64", "int32", "int16", "uint8", "int8")[(i + j) % 5]
        rows, cols = SHAPES[strategy]
        cells.append((gpu, strategy, ask, dtype, target, (rows, cols - (i + j) % 2)))
    return cells


@pytest.mark.parametrize(("gpu", "strategy", "ask", "dtype", "target", "shape"), _compiled(), ids=str)
def test_kernels_compile(gpu: str, strategy: str, ask: Ask, dtype: str, target: str, shape: tuple[int, int]) -> None:
    pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    request = planned(gpu, strategy, ask, dtype, target, shape)
    _, log, _ = compile.build(source.source(request), GPUS[gpu])
    # The score options take registers that a plan may not have left.
    assert ask.options or not compile.usage(log)["spills"], request.plan
