"""The CUDA operations with a target column: their formulas, run by the host (tests/cuda_simulator.py), and their code.

Every strategy runs every operation on rows that begin at every offset from 16 bytes, and every column is the target of
some row.  The reference is ops/reference.py in float64.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuda_targets import (
    ASKED,
    KERNELS,
    LOSS,
    NUMBERS,
    PACKED,
    PIPELINE,
    PROPOSALS,
    STRATEGY_COLS,
    STREAM,
    Ask,
    a_task,
    check,
    may_spill,
    rounded,
    run,
    small_plan,
    some_values,
)
from onlinesoftmax.core.device import known
from onlinesoftmax.core.problem import Problem
from onlinesoftmax.core.task import ITEMSIZE
from onlinesoftmax.kernels.cuda import compile, source
from onlinesoftmax.kernels.request import Request, Rest
from onlinesoftmax.ops import OPERATIONS
from onlinesoftmax.planner.plan import priced
from pairs import rest_exhaustive, with_every_pair


def _cells() -> list[Any]:
    """Every strategy meets every output, operand and option, each with every other, with and without them.

    Dtypes, alignment, kept terms and in-place outputs take turns.  Few cells have what formulas treat together: every
    pair of an operation, outputs, operands and options, and every strategy.
    """
    cells: list[tuple[str, Ask, str, bool, bool]] = []
    for (i, strategy), (j, ask) in itertools.product(enumerate(KERNELS), enumerate(ASKED)):
        if strategy in (PIPELINE, STREAM) and (ask.operation != LOSS or "y" not in ask.outputs):
            # These kernels are for operations that reduce rows and write elements.
            continue
        dtype = ("float64", "bfloat16", "float32")[(i + j) % 3]
        peel = (i + j) % 4 != 3
        cells.append((strategy, ask, dtype, peel, j % 2 == 0))
    chosen = with_every_pair(cells, lambda cell: (*cell[:1], *cell[2:], *cell[1].features()))
    return rest_exhaustive(chosen, lambda cell: (*cell[1].pairs(), cell[0], *enumerate(cell[2:])))


@pytest.mark.parametrize(("strategy", "ask", "dtype", "peel", "terms"), _cells(), ids=str)
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
    in_place = "y" in ask.outputs and task.writes_elements and terms
    found = run(ask, request, values, folder, in_place)
    check(ask, request, values, found)


PARTED = [ASKED[2], ASKED[4], ASKED[12], ASKED[15], ASKED[0]]


@pytest.mark.parametrize(
    ("strategy", "ask"), rest_exhaustive(itertools.product(("row", "cluster", "looped"), PARTED)), ids=str
)
def test_the_last_columns_may_lie_in_another_tensor(strategy: str, ask: Ask, folder: Path) -> None:
    """Every column is a target, and the rows part at the ends of slices and inside of them, in turn."""
    cuts = ("bfloat16", 96, 8), ("bfloat16", 96, 48), ("float32", 92, 76)
    dtype, cols, first = cuts[(KERNELS.index(strategy) + PARTED.index(ask)) % 3]
    targets = np.r_[0:cols, -1, cols].astype(np.int64)
    task = a_task(ask, len(targets), cols, dtype, first)
    plan = small_plan(strategy, len(targets), cols, dtype, False, first == 48)
    request = Request(task, plan, rest=Rest(first, cols - first + 8))
    values = some_values(ask, task, targets)
    check(ask, request, values, run(ask, request, values, folder, in_place="y" in ask.outputs))


OWNED = [
    ("row", range(1, 44)), ("cluster", range(60, 72)), ("grid", range(600, 606)), ("looped", range(120, 136)),
    (PACKED, range(1, 25, 2)), (PIPELINE, range(600, 606)), (STREAM, range(2040, 2043)),
]  # fmt: skip
"""Lengths in all residues of a chunk, and around the ends of slices and tiles."""


@pytest.mark.parametrize(
    ("strategy", "lengths", "dtype"),
    rest_exhaustive((*one, dtype) for one, dtype in itertools.product(OWNED, ("bfloat16", "float64"))), ids=str,
)  # fmt: skip
def test_one_element_of_a_row_is_the_target(strategy: str, lengths: range, dtype: str, folder: Path) -> None:
    """Each element is reduced once and written once, and the gradient is negative in one column.

    Kept terms, which take no part in the places of elements, take turns with the strategies and dtypes.
    """
    ask = Ask(LOSS, ("loss", "y"), ("dy",))
    # A chunk of 16 bytes has 8 elements of bfloat16, and 2 of float64.
    for cols in lengths[:: 3 if dtype == "float64" and len(lengths) > 9 else 1]:
        targets = np.arange(cols) if cols < 200 else np.r_[0:8, cols // 3 : cols // 3 + 16, cols - 8 : cols]
        rows = len(targets)
        task = a_task(ask, rows, cols, dtype, cols + 1 - cols % 2)
        peel = cols >= 16 // ITEMSIZE[dtype]
        terms = (KERNELS.index(strategy) + (dtype == "float64")) % 2 == 0
        request = Request(task, small_plan(strategy, rows, cols, dtype, peel, terms))
        values = some_values(ask, task, targets, seed=cols) | {"dy": np.ones((rows, 1))}
        found = run(ask, request, values, folder)
        hit = found["y"] < 0
        assert (hit == (np.arange(cols) == targets[:, None])).all() or cols == 1
        check(ask, request, values, found)


@pytest.mark.parametrize("strategy", PROPOSALS)
def test_a_kernel_that_follows_the_divisor(strategy: str, folder: Path) -> None:
    """It reads dy later than other kernels do, and computes the same bits."""
    ask, rows, cols = Ask(LOSS, ("loss", "y"), ("dy", "ignore_index")), 5, STRATEGY_COLS[strategy][1]
    task = a_task(ask, rows, cols, "bfloat16")
    request = Request(task, small_plan(strategy, rows, cols, "bfloat16", True, True))
    values = some_values(ask, task, np.arange(rows)) | {"dy": np.full((rows, 1), 0.25)}
    plain, early = (run(ask, replace(request, follows_divisor=flag), values, folder) for flag in (False, True))
    assert np.abs(early["y"]).max() > 0
    assert all(np.array_equal(early[name], y) for name, y in plain.items())


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


@pytest.mark.parametrize(
    ("strategy", "terms", "given"),
    rest_exhaustive(
        (*one, given) for given in (("ignore_index", "smoothing", "z_loss"), ("ignore_index",))
        for one in (("row", True), ("row", False), ("cluster", True))
    ), ids=str,
)  # fmt: skip
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


LARGEST = ("float32", ()), ("float64", ("scales",)), ("bfloat16", ("scales", "mask"))


@pytest.mark.parametrize(
    ("strategy", "dtype", "options"), rest_exhaustive((name, *one) for one in LARGEST for name in KERNELS), ids=str
)
def test_the_largest_column(strategy: str, dtype: str, options: tuple[str, ...], folder: Path) -> None:
    """Equal keys in any two places, NaN and infinities, with scales of both signs and a mask."""
    cols = STRATEGY_COLS[strategy][0]
    x = np.random.default_rng(0).integers(-1, 2, (24, cols)).astype(float)
    x[0], x[1], x[2, -1:], x[3, [1, 5, cols - 1]] = 0, -np.inf, 7, 9
    x[4, [0, cols // 2, cols - 1]], x[5, cols // 3 :] = (np.inf, np.nan, np.nan), -np.nan
    x[6], x[6, [2, 9]], x[7, 1:] = -1, (-0.0, 0.0), np.inf
    scales, mask = np.where(np.arange(24) % 3 == 2, -0.5, 1.5)[:, None], np.random.default_rng(1).random(x.shape) < 0.8
    mask[8] = False
    ask = Ask(LOSS, ("loss", "y", "largest"), ("dy",), options)
    task = a_task(ask, 24, cols, dtype, cols + (strategy != PACKED))
    request = Request(task, small_plan(strategy, 24, cols, dtype, True, False))
    values = {"x": x, "target": np.ones((24, 1), int), "dy": np.ones((24, 1)), "scale": scales, "mask": mask}
    found = run(ask, request, {name: values[name] for name in request.task.dtypes.keys() & values.keys()}, folder)
    key = np.where(scales < 0, -x, x) if "scales" in options else x
    key = np.where(mask, key, -np.inf) if "mask" in options else key
    np.testing.assert_array_equal(found["largest"][:, 0], key.argmax(1))


@pytest.mark.parametrize(
    ("kernel", "options"), [pytest.param("stream", ("softcap",), marks=pytest.mark.exhaustive), ("grid", ())]
)
def test_the_largest_states_fit_beside_the_tiles(kernel: str, options: tuple[str, ...], log_of: Any) -> None:
    """Shared memory holds the tiles of a plan, and states with every accumulator."""
    pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    ask = Ask(LOSS, ("loss", "y", "lse", "entropy", "largest"), ("dy", "smoothing"), options)
    device, task = known("h200"), a_task(ask, 1 if kernel == "stream" else 8, 1 << 28, "bfloat16")
    problem = Problem.of(task)
    plans = [priced(one, problem, device) for one in PROPOSALS["grid"](problem, device)]
    # The plan with the most and smallest parts in shared memory has the most barriers.
    plan = max((one for one in plans if source.kernel_file(one) == kernel), key=lambda one: (one.warps, one.stages))
    request = Request(task, plan)
    log = log_of(source.source(request), "sm_90")
    assert compile.usage(log)["shared_memory"] + source.shared_memory(request) <= device.shared_memory // plan.resident


GRADIENTS = [name for name, operation in OPERATIONS.items() if operation.backward and not operation.has_target]


@pytest.mark.parametrize(("strategy", "operation"), rest_exhaustive(itertools.product(PROPOSALS, GRADIENTS)))
def test_masked_elements_have_no_gradient(strategy: str, operation: str, folder: Path) -> None:
    """Not in a fully masked row, and not in a row that holds NaN."""
    ask, rows, cols = Ask(operation, ("y",), (), ("mask",)), 4, STRATEGY_COLS[strategy][0]
    request = Request(a_task(ask, rows, cols, "float32"), small_plan(strategy, rows, cols, "float32", True, False))
    values = some_values(ask, request.task, np.zeros(rows, np.int64))
    values["mask"][1], values["mask"][2, 0] = False, True
    values["x"][1:3] = np.nan
    if "lse" in values:
        values["x"][1], values["x"][2, 1:], values["lse"][1], values["lse"][2] = 1, 1, -np.inf, np.nan
    found = run(ask, request, values, folder)
    assert (found["y"][~values["mask"]] == 0).all()
    assert np.isnan(found["y"][2][values["mask"][2]]).all()
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
    """Every call meets every strategy; GPUs, dtypes, dtypes of the target and unaligned rows take turns.

    On a machine without a GPU, every call meets one of the four strategies.  Few cells have every option, GPU and
    strategy; test_cuda.py compiles every strategy for every GPU.
    """
    on_host, on_gpu = [], []
    for (i, strategy), (j, ask) in itertools.product(enumerate(PROPOSALS), enumerate(ASKED)):
        gpu = ("h200", "h200", "b200", "a100")[(i + j) % 4]
        gpu = "h200" if strategy == "cluster" and gpu == "a100" else gpu
        dtype = ("bfloat16", "float32", "float16", "float64", "bfloat16")[(2 * i + j) % 5]
        target = ("int64", "int32", "int16", "uint8", "int8")[(i + j) % 5]
        rows, cols = SHAPES[strategy]
        cell = gpu, strategy, ask, dtype, target, (rows, cols - (i + j) % 2)
        if i == (j + j // 4) % 4:
            on_host.append(cell)
        else:
            on_gpu.append(pytest.param(*cell, marks=pytest.mark.gpu))

    def met_in(cell: Any) -> Any:
        gpu, strategy, ask, dtype, target, _ = cell
        return gpu, strategy, ask.operation, *ask.outputs, *ask.given, *ask.options, dtype, target

    return [*rest_exhaustive(on_host, met_in), *on_gpu]


@pytest.mark.parametrize(("gpu", "strategy", "ask", "dtype", "target", "shape"), _compiled(), ids=str)
def test_kernels_compile(
    gpu: str, strategy: str, ask: Ask, dtype: str, target: str, shape: tuple[int, int], log_of: Any
) -> None:
    pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    request = planned(gpu, strategy, ask, dtype, target, shape)
    log = log_of(source.source(request), GPUS[gpu])
    # The score options take registers that a plan may not have left.
    used = compile.usage(log)
    assert ask.options or not used["spills"] or may_spill(GPUS[gpu]), request.plan
    assert ask.options or strategy != "row" or not used["stack"], request.plan
