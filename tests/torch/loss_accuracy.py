"""Device and backend of the tests of losses, the gradient of a loss, and the bound on a rounding error."""

from __future__ import annotations

from typing import Any

import torch

from onlinesoftmax.lab.verify import INTERPRETER_ULPS
from onlinesoftmax.lab.verify.exact import ulp, wide

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HOW: dict[str, Any] = {} if GPU else {"backend": "triton"}

# Triton's interpreter truncates to bfloat16, and rounds a multiply-add twice.
UNITS = 1 if GPU else INTERPRETER_ULPS["triton"]


def gradient(y: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    (dx,) = torch.autograd.grad(y, x, dy.to(y.dtype))
    return dx


def assert_as_good(ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor, size: float = 0.0) -> None:
    """PyTorch's largest error and a unit in the last place, of the result or of a number of this size in float32."""
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    found, other, want = wide(ours.detach()), wide(theirs.detach()), wide(exact.detach())
    error, allowed = abs(found - want), abs(other - want).max(initial=0)
    unit = ulp(want, ours.dtype) + size * torch.finfo(torch.promote_types(ours.dtype, torch.float32)).eps
    # The exact values are float64, so beside float64 results they have rounding errors of the same size.
    unit = UNITS * unit * (2 if ours.dtype == torch.float64 else 1)
    assert (error <= allowed + unit).all(), f"error {error.max():.3e}, PyTorch's own {allowed:.3e}"
