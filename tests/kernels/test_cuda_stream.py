"""The kernel of the CUDA strategy `grid` that streams a row which does not fit on chip, on a GPU."""

from __future__ import annotations

import pytest
import torch

from onlinesoftmax.core.problem import Problem
from onlinesoftmax.kernels import registry
from onlinesoftmax.kernels.request import Request
from onlinesoftmax.lab.bench.tune_shapes import Shape, task
from onlinesoftmax.planner.plan import priced
from onlinesoftmax.planner.strategies.cuda_grid import STREAM, grid
from onlinesoftmax.torch.device import from_torch

PART = 1 << 20
"""Elements that are compared at the beginning, in the middle and at the end of a row."""


@pytest.mark.gpu
@pytest.mark.usefixtures("device_memory")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("operation", "rows", "cols"), [
    ("softmax", 1, 1 << 27), ("softmax", 3, 50000003), ("softmax_backward", 2, 1 << 26), ("log_softmax", 1, 70000001),
])  # fmt: skip
def test_every_variant_is_right(operation: str, rows: int, cols: int, dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("bulk copies need compute capability 9.0")
    wanted = task(Shape(operation, str(dtype).removeprefix("torch."), rows, cols))
    problem, device = Problem.of(wanted), from_torch("cuda")
    proposals = grid(problem, device)
    assert not isinstance(proposals, str)
    plans = [priced(one, problem, device) for one in proposals if one.kernel == STREAM]
    assert plans
    x = torch.randn(rows, cols, device="cuda").to(dtype)
    more, dy = {}, torch.randn(rows, cols, device="cuda").to(dtype)
    if operation == "softmax_backward":
        x, more = torch.softmax(x, -1), {"dy": dy}
    parts = [slice(0, PART), slice(cols // 2, cols // 2 + PART), slice(cols - PART, cols)]
    exact = [exact_part(operation, x, dy, part) for part in parts]
    for plan in plans:
        run = registry.load("cuda").prepare(Request(wanted, plan))
        y, again = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
        run(x, y, dict(more))
        run(x, again, dict(more))
        assert not y.isnan().any()
        assert torch.equal(y, again)
        for part, want in zip(parts, exact, strict=True):
            size = want.abs() + 1e-3 * want.abs().max()
            assert ((y[:, part].double() - want).abs() <= 4 * torch.finfo(dtype).eps * size).all(), plan.variant
        # The output may overwrite the input, whichever block writes a tile.
        z = x.clone()
        run(z, z, dict(more))
        assert torch.equal(z, y)


def exact_part(operation: str, x: torch.Tensor, dy: torch.Tensor, part: slice) -> torch.Tensor:
    """A part of the result in float64; sums over a row are added in pieces, because float64 takes much memory."""
    if operation == "softmax_backward":
        pieces = zip(x.split(1 << 24, 1), dy.split(1 << 24, 1), strict=True)
        dot = sum((y.double() * g.double()).sum(1, keepdim=True) for y, g in pieces)
        return x[:, part].double() * (dy[:, part].double() - dot)
    lse = torch.stack([z.double().logsumexp(1) for z in x.split(1 << 24, 1)]).logsumexp(0)[:, None]
    y = x[:, part].double() - lse
    return y if operation == "log_softmax" else y.exp()
