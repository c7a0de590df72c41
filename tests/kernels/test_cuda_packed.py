"""The CUDA kernel of packed rows, run by the host (tests/cuda_simulator.py), and when the planner proposes it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import onlinesoftmax as osm
from contract import assert_as_good_as_pytorch, outliers
from cuda_simulator import simulate
from cuda_targets import Ask, a_task, aligned, check, from_bits, rounded, run, some_values, to_bits
from onlinesoftmax.core.device import known
from onlinesoftmax.core.problem import Problem
from onlinesoftmax.core.task import ITEMSIZE, Choice, Flags, Task, task_of
from onlinesoftmax.core.view import View, contiguous_view
from onlinesoftmax.kernels.cuda import compile, source
from onlinesoftmax.kernels.cuda.strategy.row.packed_proposals import MOST_COLS, MOST_COLS_BESIDE, PACKED, packed
from onlinesoftmax.kernels.request import Request
from onlinesoftmax.ops import OPERATIONS
from onlinesoftmax.planner.plan import Plan, plan, priced
from pairs import rest_exhaustive

H200 = known("h200")


def packed_plan(rows: int, cols: int, lanes: int, depth: int = 1) -> Plan:
    """A plan whose blocks have one warp."""
    owned = 32 // lanes * depth
    return Plan(
        backend="cuda", strategy="row", kernel=PACKED, programs=-(-rows // owned), block=-(-cols // lanes) * lanes,
        rows_per_program=owned, depth=depth, warps=1, lanes=lanes, terms=True,
    )  # fmt: skip


def softmax_task(rows: int, cols: int, dtype: str, out: str) -> Task:
    tensors = {"x": contiguous_view((rows, cols), dtype)}
    return task_of(OPERATIONS["softmax"], ("y",), (rows, cols), 1, tensors, Flags(wide=ITEMSIZE[out] > 2), out)


EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-51}


def check_softmax(request: Request, folder: Path, begins: tuple[int, int], in_place: bool) -> None:
    """The kernel beside a softmax in float64, on rows that begin so many elements after 16 bytes in x and in y."""
    rows, cols, dtype, out = request.task.rows, request.task.cols, request.task.dtypes["x"], request.task.dtypes["y"]
    x = rounded(np.random.default_rng(cols).normal(0, 3, (rows, cols)), dtype)
    x[0, cols // 2] = 40
    memory: dict[str, NDArray[Any]] = {}
    inside = {name: slice(8 + begin, 8 + begin + rows * cols) for name, begin in zip("xy", begins, strict=True)}
    for name, kind in (("x", dtype), ("y", out)):
        whole = np.full(rows * cols + 32, 7.0)
        whole[inside[name]] = x.ravel() if name == "x" else 7.0
        memory[name] = aligned(to_bits(whole, kind))
    result = "x" if in_place else "y"
    arrays = {"x": memory["x"][inside["x"]], "y": memory[result][inside[result]]}
    simulate(request, arrays, {}, folder)
    y = from_bits(arrays["y"], out).reshape(rows, cols)
    t = x - x.max(1, keepdims=True)
    exact = np.exp(t) / np.exp(t).sum(1, keepdims=True)
    # A unit in the last place of the result, and the rounding error of the difference t in the accumulator.
    allowed = EPS[out] + (1 - t) * EPS["float64" if dtype == "float64" else "float32"]
    # Terms of float32 below 2^-126 are 0.
    assert (np.abs(y - exact) <= allowed * exact + 2.0**-126).all()
    assert (np.delete(from_bits(memory[result], out), np.r_[inside[result]]) == 7).all(), "memory beside the rows"


DTYPES_OUT = [
    ("bfloat16", "bfloat16"), ("float32", "float32"), ("float16", "float32"), ("float64", "float64"),
    ("float32", "bfloat16"),
]  # fmt: skip
LANES = (1, 2, (5,)), (2, 1, (17, 18)), (8, 2, range(97, 105, 3))


@pytest.mark.parametrize(
    ("lanes", "depth", "lengths", "dtype", "out"),
    rest_exhaustive(((*one, *two) for one in LANES for two in DTYPES_OUT), lambda cell: (cell[:3], cell[3:])),
    ids=str,
)
def test_rows_begin_anywhere(
    lanes: int, depth: int, lengths: Sequence[int], dtype: str, out: str, folder: Path
) -> None:
    """Also rows that fill no block, an output that begins elsewhere than the input, and one that overwrites it."""
    for i, cols in enumerate(lengths):
        for rows in (1, 32 // lanes * depth, 32 // lanes * depth * 2 + 3):
            request = Request(softmax_task(rows, cols, dtype, out), packed_plan(rows, cols, lanes, depth))
            begins = ((0, 0), (3, 3), (2, 5))[(rows + i) % 3]
            check_softmax(request, folder, begins, dtype == out and begins[0] == begins[1])


CALLS = [
    Ask("logsumexp", ("y", "lse", "m", "l", "entropy")),
    Ask("log_softmax", ("y", "lse"), (), ("softcap",)),
    Ask("log_softmax_backward", ("y",)),
    Ask("softmax_backward", ("y",), (), ("scales",)),
]
"""Operations without a target; test_cuda_targets.py has the others."""


@pytest.mark.parametrize("ask", CALLS, ids=str)
@pytest.mark.parametrize(("cols", "lanes", "depth", "dtype"), [(7, 1, 2, "float32"), (37, 4, 1, "bfloat16")])
def test_formulas(ask: Ask, cols: int, lanes: int, depth: int, dtype: str, folder: Path) -> None:
    task = a_task(ask, 41, cols, dtype)
    request = Request(task, packed_plan(41, cols, lanes, depth))
    values = some_values(ask, task, np.zeros(41, np.int64))
    check(ask, request, values, run(ask, request, values, folder, task.writes_elements and lanes == 1))


@pytest.mark.parametrize("dtype", ITEMSIZE)
@pytest.mark.parametrize("operation", ["softmax", "softmax_backward", "logsumexp", "cross_entropy"])
def test_every_short_unaligned_row_is_packed(operation: str, dtype: str) -> None:
    """A block's lanes have every column once, its losses are of one segment, and few rows are spread over blocks."""
    for cols, rows in itertools.product(range(1, MOST_COLS + 30), (1, 1000, 1 << 20)):
        problem = Problem(operation, rows, cols, dtype)
        found = packed(problem, H200)
        assert bool(found) == (cols * problem.itemsize % 16 != 0 and cols <= MOST_COLS and dtype != "float64")
        for one in found:
            held, owned = one.block // one.lanes, one.rows_per_program
            assert (held - 1) * one.lanes < cols <= held * one.lanes
            assert source.SEGMENT % owned == 0
            assert owned == 32 * one.warps // one.lanes * one.depth
            assert (one.programs - 1) * owned < rows <= one.programs * owned
            assert one.depth == 1 or one.programs >= H200.multiprocessors


@pytest.mark.parametrize(("change", "reason"), [
    ({"packed": False}, "a tensor has gaps between its rows, or the call is batch-invariant"),
    ({"sharded": True}, "other GPUs have columns of the rows"),
    ({"dtype": "float64"}, "float64 is loaded by instructions that read global memory alone"),
    ({"out_dtype": "float64"}, "float64 is loaded by instructions that read global memory alone"),
])  # fmt: skip
def test_a_plan_says_why_short_rows_are_not_packed(change: dict[str, Any], reason: str) -> None:
    chosen = plan(replace(Problem("softmax", 4096, 33, "bfloat16"), **change), H200, Choice("cuda", "row"))
    assert not chosen.kernel
    assert f"; they are not moved as one stretch: {reason}" in chosen.reason


def test_rows_are_packed_where_no_tensor_has_gaps() -> None:
    def is_packed(
        x: tuple[int, ...], y: tuple[int, ...], shape: tuple[int, ...] = (4, 6, 5), **more: tuple[int, ...]
    ) -> bool:
        tensors = {"x": View(x, "float32", aligned=False), "y": View(y, "float32")}
        tensors |= {name: View(strides, "float32") for name, strides in more.items()}
        return Problem.of(task_of(OPERATIONS["softmax"], ("y",), shape, len(shape) - 1, tensors)).packed

    assert is_packed((30, 5, 1), (30, 5, 1))
    assert is_packed((99, 5, 1), (99, 7, 1), (1, 1, 5)), "one row has no gap"
    assert not is_packed((30, 5, 1), (36, 6, 1))
    assert not is_packed((5, 20, 1), (30, 5, 1)), "the rows of y have another order"
    assert not is_packed((60, 10, 2), (30, 5, 1))
    dense = (30, 5, 1)
    assert is_packed(dense, dense, bias=dense, mask=(0, 0, 1)), "one row for all"
    assert not is_packed(dense, dense, mask=(0, 5, 1)), "one row for several"
    assert not is_packed(dense, dense, bias=(5, 1, 0)), "one value for a row"
    assert not is_packed(dense, dense, logits=(36, 6, 1))
    # The results of a batch-invariant call may have gaps, or columns apart, for some batches alone.
    assert not Problem.of(softmax_task(4, 5, "float32", "float32"), batch_invariant=True).packed


COMPILED = [
    ("softmax", "bfloat16", 3), ("softmax", "float32", 199), ("softmax_backward", "float32", 63),
    ("softmax_backward", "bfloat16", 97), ("logsumexp", "float16", 50),
]  # fmt: skip


@pytest.mark.parametrize(("operation", "dtype", "cols"), COMPILED)
def test_every_proposal_compiles_without_spills(operation: str, dtype: str, cols: int, log_of: Any) -> None:
    pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    shape = (1 << 20, cols)
    tensors = {name: contiguous_view(shape, dtype) for name in OPERATIONS[operation].element_operands}
    task = task_of(OPERATIONS[operation], ("y",), shape, 1, tensors, Flags(wide=ITEMSIZE[dtype] > 2))
    problem = Problem.of(task)
    for proposal in packed(problem, H200):
        log = log_of(source.source(Request(task, priced(proposal, problem, H200))), "sm_90")
        used = compile.usage(log)
        assert not used["spills"], (proposal.variant, used)
        assert used["shared_memory"] <= 48 << 10


def test_a_bias_and_a_mask_fit_beside_wide_results(log_of: Any) -> None:
    pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    shape = (1 << 20, MOST_COLS_BESIDE - 1)
    beside = {"bias": View((0, 1), "float32"), "mask": View((shape[1], 1), "bool")}
    tensors = {"x": contiguous_view(shape, "bfloat16"), **beside}
    task = task_of(OPERATIONS["softmax"], ("y",), shape, 1, tensors, Flags(wide=True), "float32")
    problem = Problem.of(task)
    [proposal] = packed(problem, H200)
    log = log_of(source.source(Request(task, priced(proposal, problem, H200))), "sm_90")
    used = compile.usage(log)
    assert not used["spills"]
    assert used["shared_memory"] <= 48 << 10


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("cols", [1, 2, 3, 5, 7, 10, 17, 33, 50, 63, 97, 129, 199])
def test_short_rows_on_a_gpu(cols: int, dtype: torch.dtype) -> None:
    """Softmax, and a masked one with a bias and its gradient; rows begin 0, 8 or 2 elements after a cache line."""
    for begin, rows in ((0, 3001), (8, 127), (2, 1030)):
        memory = outliers(rows * cols + begin, dtype=dtype, device="cuda")
        x = memory[begin:].view(rows, cols)
        if cols * x.itemsize % 16:
            plan = osm.explain(x).plan
            assert plan.kernel == PACKED, f"{plan}: {plan.reason}"
        assert_as_good_as_pytorch(osm.softmax(x), "softmax", x, -1)
        mask, bias = torch.rand(rows, cols, device="cuda") < 0.8, torch.randn(cols, device="cuda").to(dtype)
        mask[:, 0] = True
        z = (x.double() + bias.double()).masked_fill(~mask, -torch.inf).requires_grad_()
        exact, leaf = torch.softmax(z, -1), x.clone().requires_grad_()
        y = osm.softmax(leaf, mask=mask, bias=bias)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(y.double(), exact, rtol=max(2 * eps, 1e-5), atol=max(torch.finfo(dtype).tiny, 1e-30))
        dy = torch.randn_like(exact)
        (dx,) = torch.autograd.grad(y, leaf, dy.to(dtype))
        (right,) = torch.autograd.grad(exact, z, dy)
        torch.testing.assert_close(dx.double(), right, rtol=8 * eps, atol=8 * eps)
