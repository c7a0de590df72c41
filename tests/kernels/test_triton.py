"""The Triton kernels beyond the contract: the merge tree, the elements that a program owns, and the machine code."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import onlinesoftmax as osm
from contract import DEVICE, OPERATIONS, assert_as_good_as_pytorch, outliers
from onlinesoftmax.core.problem import Problem
from onlinesoftmax.torch import fast_path

triton = pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl  # noqa: E402  only where triton is installed

from onlinesoftmax.kernels.triton import tiles  # noqa: E402  as above


@pytest.mark.parametrize("operation", OPERATIONS)
def test_merge_tree(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of seven states, two to a program: four, two, one."""
    monkeypatch.setattr("onlinesoftmax.planner.strategies.triton.MERGE_FAN", 2)
    fast_path.forget()
    x = outliers(2, 100001, dtype=torch.float32, device=DEVICE)
    assert osm.explain(x, operation=operation, device="h200", strategy="split").plan.launches >= 4
    assert_as_good_as_pytorch(OPERATIONS[operation](x, backend="triton", strategy="split"), operation, x, -1)
    fast_path.forget()


def test_seven_dimensions_that_do_not_merge() -> None:
    x = outliers(3, 4, 3, 4, 3, 4, 10, dtype=torch.float32, device=DEVICE)[::2, ::2, ::2, ::2, ::2, ::2, 1:]
    assert_as_good_as_pytorch(osm.softmax(x, backend="triton", strategy="row"), "softmax", x, -1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
def test_the_quick_interpreter_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/triton_interpreter.py leaves out repeated work of the interpreter."""
    import triton_interpreter

    # A mask and a bias; 16-bit elements, which the interpreter holds as integers; and the sums of a target.
    x, mask = outliers(2, 3001, dtype=torch.bfloat16, device=DEVICE), torch.rand(3001) < 0.8
    wide, target = outliers(3, 50, dtype=torch.float64, device=DEVICE), torch.tensor([0, 49, 7])

    def results() -> list[torch.Tensor]:
        found = [
            osm.softmax(x, mask=mask, bias=x[0], scale=0.5, backend="triton", strategy=strategy)
            for strategy in ("row", "looped", "split")
        ]
        found.append(osm.log_softmax(wide, 0, softcap=3.0, backend="triton", strategy="column"))
        return [*found, osm.cross_entropy(wide, target, label_smoothing=0.1, backend="triton")]

    assert triton_interpreter.REPLACED
    quick = results()
    for owner, name, original in triton_interpreter.REPLACED:
        assert getattr(owner, name) != original, name
        monkeypatch.setattr(owner, name, original)
    for ours, slow in zip(quick, results(), strict=True):
        assert torch.equal(ours, slow)


COMPILE = """
import json, sys
import onlinesoftmax as osm
found = []
devices = [(device, dtype) for dtype in ("bfloat16", "float32") for device in ("a100", "h200", "b200")]
for i, (strategy, shape, dim) in enumerate((
    ("row", (65536, 1000), 1), ("row", (65536, 1023), 1), ("row", (8192, 8192), 1), ("row", (4096, 32768), 1),
    ("looped", (2048, 128257), 1), ("split", (1, 1 << 24), 1), ("column", (32, 512, 4096), 1),
)):
    # One of the six for each shape, so that all six occur.
    device, dtype = devices[(i + int(sys.argv[1])) % 6]
    explanation = osm.explain(shape, dim, dtype=dtype, device=device, backend="triton", strategy=strategy)
    for kernel in explanation.compile():
        wide = "v4.b32" in kernel.listings["ptx"]
        found.append({"device": device, "dtype": dtype, "shape": shape, "wide": wide, **kernel.as_dict()})
json.dump(found, sys.stdout)
"""


@pytest.mark.early
@pytest.mark.parametrize("turn", ["0", pytest.param("4", marks=pytest.mark.exhaustive)])
def test_kernels_compile_for_gpus_that_are_not_here(turn: str) -> None:
    """No spills and 16-byte loads for sm_80, sm_90 and sm_100, in a process without the interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, ["src", environment.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, turn], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    assert {kernel["device"] for kernel in kernels} == {"a100", "h200", "b200"}
    for kernel in kernels:
        assert kernel["spills"] == 0, kernel
        assert kernel["occupancy"] > 0, kernel
        assert kernel["wide"] or kernel["name"] == "split_merge_kernel", kernel


VECTORS = (1, 2, 4, 8)
"""Elements in 16 bytes where rows are unaligned; 1 where a whole row is body."""


def lengths(vector: int) -> range:
    """Row lengths of every residue; a plan splits only rows of two vectors or more."""
    shortest = 2 * vector if vector > 1 else 0
    return range(shortest, shortest + 18)


def test_rows_shorter_than_two_vectors_are_not_split() -> None:
    for dtype, vector in (("bfloat16", 8), ("float32", 4), ("float64", 2)):
        assert not any(Problem("softmax", 5, cols, dtype).peels_narrow for cols in range(2 * vector))
    assert Problem("softmax", 5, 17, "bfloat16").peels_narrow


@triton.jit
def _owned_columns(counts_ptr, offset, cols, slices, VECTOR: tl.constexpr, SLICE: tl.constexpr, MOST: tl.constexpr):
    """Count, for every column, the slices of the body and the edges that own it, as split_state_kernel does."""
    head, length = tiles.body(offset, cols, VECTOR)
    i = tl.arange(0, SLICE)
    for k in range(slices):
        start, count = tiles.slice_bounds(k, SLICE, length)
        # The body of a row begins on 16 bytes.
        col = tl.where(i < count, head + start + i, MOST)
        tl.store(counts_ptr + col, tl.load(counts_ptr + col) + 1)
    if VECTOR > 1:
        col, inside = tiles.edges(tl.arange(0, 2 * VECTOR), head, length, cols, VECTOR)
        col = tl.where(inside, col, MOST)
        tl.store(counts_ptr + col, tl.load(counts_ptr + col) + 1)


@pytest.mark.parametrize("vector", VECTORS)
def test_every_column_belongs_to_one_program(vector: int) -> None:
    """Head, slices of the body and tail, for rows that begin anywhere and end anywhere."""
    most, size = 128, 16
    for offset in range(vector):
        for cols in lengths(vector):
            counts = torch.zeros(most + 1, dtype=torch.int32, device=DEVICE)
            _owned_columns[(1,)](counts, offset, cols, -(-cols // size), VECTOR=vector, SLICE=size, MOST=most)
            # Lanes that own nothing count at the last position.
            assert (counts[:cols] == 1).all(), (offset, cols)
            assert (counts[cols:most] == 0).all(), (offset, cols)


@triton.jit
def _bounds(heads_ptr, lengths_ptr, cols, VECTOR: tl.constexpr):
    offset = tl.arange(0, VECTOR)
    head, length = tiles.body(offset, cols, VECTOR)
    tl.store(heads_ptr + offset, head)
    tl.store(lengths_ptr + offset, length)


@pytest.mark.parametrize("vector", VECTORS)
def test_a_body_lies_on_16_bytes(vector: int) -> None:
    heads, bodies = torch.zeros(2, vector, dtype=torch.int32, device=DEVICE)
    for cols in lengths(vector):
        _bounds[(1,)](heads, bodies, cols, VECTOR=vector)
        offset = torch.arange(vector, device=DEVICE)
        assert ((offset + heads) % vector == 0).all()
        assert (bodies % vector == 0).all()
        # The tail is shorter than a vector.
        assert (heads + bodies <= cols).all()
        assert (heads + bodies + vector > cols).all()
        assert (heads < vector).all()


@triton.jit
def _owned_rows(counts_ptr, adjacent, ROWS: tl.constexpr):
    pid = tl.program_id(0)
    outer, inner, row_mask = tiles.strip(pid, adjacent, ROWS)
    at = counts_ptr + outer * adjacent + inner
    tl.store(at, tl.load(at, mask=row_mask) + 1, mask=row_mask)


@pytest.mark.parametrize("rows", [8, 32])
def test_every_row_belongs_to_one_strip(rows: int) -> None:
    """Three groups of adjacent rows, of every length around a multiple of a strip."""
    for adjacent in range(1, 2 * rows + 2):
        counts = torch.zeros(4 * adjacent + rows, dtype=torch.int32, device=DEVICE)
        _owned_rows[(3 * -(-adjacent // rows),)](counts, adjacent, ROWS=rows)
        assert (counts[: 3 * adjacent] == 1).all(), adjacent
        assert (counts[3 * adjacent :] == 0).all(), adjacent


HUGE = [(2**16 + 1, 2**15 + 8), (2**15 + 8, 2**16 + 1), (1, 2**31 + 4097), (2**31 + 4097, 1)]


@pytest.mark.gpu
@pytest.mark.usefixtures("device_memory")
@pytest.mark.parametrize("shape", HUGE)
def test_more_elements_than_an_int32_counts(shape: tuple[int, int]) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_().requires_grad_()
    y = osm.softmax(x, backend="triton")
    dy = torch.empty_like(y).normal_()
    (dx,) = torch.autograd.grad(y, x, dy)
    for rows in {0, shape[0] // 2, shape[0] - 1}:
        x_row, y_row, dy_row, dx_row = (t.detach()[rows] for t in (x, y, dy, dx))
        # PyTorch 2.11 fails for torch.softmax of one row of 2^31 float64 elements and asks for a bug report.
        l = sum(float(part.double().exp().sum()) for part in x_row.split(1 << 27))
        pairs = zip(y_row.split(1 << 27), dy_row.split(1 << 27), strict=True)
        dot = sum(float((a.double() * b.double()).sum()) for a, b in pairs)
        for part in (slice(0, 1 << 20), slice(-(1 << 20), None)):
            wide_y, wide_dy = y_row[part].double(), dy_row[part].double()
            exact = x_row[part].double().exp() / l
            assert ((wide_y - exact).abs() <= exact * 2**-8 + 2**-133).all()
            exact = wide_y * (wide_dy - dot)
            # One unit of the gradient, and the error of a float32 sum of so many terms.
            assert ((dx_row[part].double() - exact).abs() <= exact.abs() * 2**-8 + wide_y * 2**-18 + 2**-133).all()


@pytest.mark.gpu
def test_a_merge_tree_of_large_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two thousand states, a thousand to a program, so that a second launch merges what is left."""
    monkeypatch.setattr("onlinesoftmax.planner.strategies.triton.MERGE_FAN", 1024)
    fast_path.forget()
    x = torch.randn(4224 * 8192, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    assert osm.explain(x, strategy="split").plan.launches == 4
    assert_as_good_as_pytorch(osm.softmax(x, 0, backend="triton", strategy="split"), "softmax", x, 0)
    fast_path.forget()
