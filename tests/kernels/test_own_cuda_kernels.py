"""The CUDA kernel that an operation brings: the sparsemax of tests/sparsemax, compiled, and simulated on the host."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import onlinesoftmax as osm
from cuda_simulator import simulate
from onlinesoftmax.core.arrays import namespace
from onlinesoftmax.kernels.cuda import source
from onlinesoftmax.kernels.request import Request
from onlinesoftmax.ops import also_declared
from onlinesoftmax.ops.reference import evaluate
from pairs import rest_exhaustive
from sparsemax.declare import BACKWARD, FORWARD


@pytest.fixture(autouse=True)
def _declared() -> Iterator[None]:
    with also_declared(FORWARD, BACKWARD):
        yield


def planned(rows: int, cols: int, device: str = "h200", dtype: str = "float32") -> osm.explanation.Explanation:
    shape = (rows, cols)
    return osm.explain(shape, operation="sparsemax", dtype=dtype, device=device, backend="cuda", scale=2.0, causal=True)


@pytest.mark.parametrize(
    ("device", "dtype"), rest_exhaustive(itertools.product(("a100", "h200", "b200"), ("bfloat16", "float64")))
)
def test_the_kernel_of_the_room_compiles(device: str, dtype: str) -> None:
    pytest.importorskip("cuda.core", reason="cuda.core finds the compiler")
    found = planned(64, 1001, device, dtype)
    assert source.files_of(Request(found.task, found.plan))[-1] == ("row", "sparsemax.kernels")
    [kernel] = found.compile()
    assert not kernel.spills


@pytest.mark.parametrize("cols", [3, 64, 301])
def test_the_kernel_of_the_room_computes_its_formula(cols: int, folder: Path) -> None:
    found = planned(9, cols)
    x = np.random.default_rng(cols).standard_normal((9, cols)).astype(np.float32)
    x[3, 1], x[4, 0], x[5] = np.nan, np.inf, -np.inf
    z = np.where(np.tri(9, cols, cols - 9, dtype=bool), 2.0 * x.astype(np.float64), -np.inf)
    with np.errstate(all="ignore"):
        exact = evaluate("sparsemax", namespace(z), {"x": z}, 1)
    y = np.full_like(x, 7.0)
    simulate(Request(found.task, found.plan), {"x": x, "y": y}, {"scale": 2.0}, folder)
    np.testing.assert_allclose(y, exact, rtol=0, atol=2**-23)
