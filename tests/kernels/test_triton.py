"""What the contract does not reach: the merge tree, many dimensions, and the machine code itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import onlinesoftmax as osm
from contract import OPERATIONS, assert_as_good_as_pytorch, outliers
from onlinesoftmax.torch import prepare as prepared

pytest.importorskip("triton", reason="triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_merge_tree(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of ten partials, two to a program: five, three, two, one."""
    monkeypatch.setattr("onlinesoftmax.planner.strategies.triton.MERGE_FAN", 2)
    prepared.prepare.cache_clear()
    x = outliers(2, 40001, dtype=torch.float32, device=DEVICE)
    assert osm.explain(x, operation=operation, device="h200", strategy="split").plan.launches >= 5
    assert_as_good_as_pytorch(OPERATIONS[operation](x, backend="triton", strategy="split"), operation, x, -1)
    prepared.prepare.cache_clear()


def test_seven_dimensions_that_no_stride_joins() -> None:
    x = outliers(3, 4, 3, 4, 3, 4, 10, dtype=torch.float32, device=DEVICE)[::2, ::2, ::2, ::2, ::2, ::2, 1:]
    assert_as_good_as_pytorch(osm.softmax(x, backend="triton", strategy="row"), "softmax", x, -1)


def test_same_input_same_bits() -> None:
    x = outliers(3, 30000, dtype=torch.float32, device=DEVICE)
    for strategy in ("row", "looped", "split"):
        first, second = (osm.softmax(x, backend="triton", strategy=strategy) for _ in range(2))
        assert torch.equal(first, second)


COMPILE = """
import json, sys
import onlinesoftmax as osm
found = []
for device in ("a100", "h200", "b200"):
    for dtype in ("bfloat16", "float32"):
        for strategy, shape, dim in (
            ("row", (65536, 1000), 1), ("row", (65536, 1023), 1), ("row", (8192, 8192), 1), ("row", (4096, 32768), 1),
            ("looped", (2048, 128257), 1), ("split", (1, 1 << 24), 1), ("column", (32, 512, 4096), 1),
        ):
            explanation = osm.explain(shape, dim, dtype=dtype, device=device, backend="triton", strategy=strategy)
            for kernel in explanation.compile():
                wide = "v4.b32" in kernel.listings["ptx"]
                found.append({"device": device, "dtype": dtype, "shape": shape, "wide": wide, **kernel.as_dict()})
json.dump(found, sys.stdout)
"""


def test_kernels_compile_for_gpus_that_are_not_here() -> None:
    """No spills and 16-byte loads for sm_80, sm_90 and sm_100: in a process where Triton compiles."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, ["src", environment.get("PYTHONPATH")]))
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    assert {kernel["device"] for kernel in kernels} == {"a100", "h200", "b200"}
    for kernel in kernels:
        assert kernel["spills"] == 0, kernel
        assert kernel["occupancy"] > 0, kernel
        assert kernel["wide"] or kernel["name"] == "split_merge_kernel", kernel


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
        # Not torch.softmax: of one row of 2^31 float64 PyTorch 2.11 asks to have a bug reported.
        l = sum(float(part.double().exp().sum()) for part in x_row.split(1 << 27))
        pairs = zip(y_row.split(1 << 27), dy_row.split(1 << 27), strict=True)
        dot = sum(float((a.double() * b.double()).sum()) for a, b in pairs)
        for part in (slice(0, 1 << 20), slice(-(1 << 20), None)):
            wide_y, wide_dy = y_row[part].double(), dy_row[part].double()
            exact = x_row[part].double().exp() / l
            assert ((wide_y - exact).abs() <= exact * 2**-8 + 2**-133).all()
            exact = wide_y * (wide_dy - dot)
            # A unit of the gradient, and of what a float32 sum of so many terms leaves.
            assert ((dx_row[part].double() - exact).abs() <= exact.abs() * 2**-8 + wide_y * 2**-18 + 2**-133).all()


@pytest.mark.gpu
def test_a_merge_tree_at_the_size_that_needs_one() -> None:
    torch.manual_seed(0)
    x = torch.randn(4224 * 8192, device="cuda")
    assert osm.explain(x, strategy="split").plan.launches == 4
    assert_as_good_as_pytorch(osm.softmax(x, 0, backend="triton", strategy="split"), "softmax", x, 0)


@pytest.mark.gpu
def test_side_streams_and_graphs() -> None:
    x, y = torch.randn(64, 3000, device="cuda"), torch.empty(64, 3000, device="cuda")
    expected = osm.softmax(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = osm.softmax(x * 1)
    stream.synchronize()
    assert torch.equal(late, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        osm.softmax(x, out=y)
    y.fill_(torch.nan)
    graph.replay()
    assert torch.equal(y, expected)
