"""The backend that the tests of calls force, the gradient of a result, and the units of a rounding error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from contract import GPU
from onlinesoftmax.lab.verify import INTERPRETER_ULPS

HOW: dict[str, Any] = {} if GPU else {"backend": "triton"}

HOWS = [
    pytest.param({}, id="default"),
    pytest.param({"backend": "triton"}, id="triton"),
    pytest.param({"backend": "cuda"}, id="cuda", marks=pytest.mark.gpu),
]
"""Arguments that leave the backend open, and that force each backend with kernels."""

# Triton's interpreter truncates to bfloat16, and rounds a multiply-add twice.
UNITS = 1 if GPU else INTERPRETER_ULPS["triton"]


def gradient(y: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    (dx,) = torch.autograd.grad(y, x, dy.to(y.dtype))
    return dx
