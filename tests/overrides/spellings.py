"""Spellings of the softmax functions in PyTorch, the input on which tests call them, and reasons to leave a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
BACKEND = None if GPU else "triton"
"""Backend with which our functions take calls on DEVICE."""

ON_CPU = "input is on the CPU, where PyTorch's own operation runs"
FLOATS = "dtype must be one of float16, bfloat16, float32, float64, got"
WIDE = torch.float64
Function = Callable[[torch.Tensor], Any]

SPELLINGS: dict[str, list[Function]] = {
    "softmax": [
        lambda x: torch.softmax(x, 1),
        lambda x: torch.softmax(input=x, dim=0, dtype=WIDE),
        lambda x: torch.softmax(x, axis=-2),
        lambda x: torch.softmax(x, 1, WIDE),
        lambda x: torch.softmax(x, 1, out=torch.empty_like(x)),
        lambda x: torch.softmax(x, 1, out=torch.empty(0, device=x.device)),
        lambda x: torch.softmax(y := x.clone(), 1, out=y),
        lambda x: x.softmax(-1),
        lambda x: x.softmax(dim=0, dtype=WIDE),
        lambda x: torch.Tensor.softmax(x, 0),
        lambda x: torch.special.softmax(x, 0),
        lambda x: torch.special.softmax(x, dim=1, dtype=WIDE),
        lambda x: functional.softmax(x, 1),
        lambda x: functional.softmax(x, 0, 3, WIDE),
        lambda x: functional.softmax(x, dim=0, _stacklevel=5),
        lambda x: torch.nn.Softmax(dim=-1)(x),
        lambda x: torch.nn.Softmax2d()(x[None]),
    ],
    "log_softmax": [
        lambda x: torch.log_softmax(x, 1),
        lambda x: torch.log_softmax(x, dim=-2, dtype=WIDE),
        lambda x: torch.log_softmax(x, 0, dtype=WIDE, out=torch.empty_like(x, dtype=WIDE)),
        lambda x: x.log_softmax(0),
        lambda x: torch.special.log_softmax(x, 1, dtype=WIDE),
        lambda x: functional.log_softmax(x, dim=1),
        lambda x: functional.log_softmax(x, -1, 3, WIDE),
        lambda x: torch.nn.LogSoftmax(dim=0)(x),
    ],
    "logsumexp": [
        lambda x: torch.logsumexp(x, 1),
        lambda x: torch.logsumexp(x, (0, 2), True),
        lambda x: torch.logsumexp(x, axis=[1, -1], keepdims=True),
        lambda x: torch.logsumexp(x, (0, 1), out=torch.empty(x.shape[2:], device=x.device)),
        lambda x: torch.logsumexp(x, 2, True, out=torch.empty_like(x[:, :, :1])),
        lambda x: x.logsumexp(-1, keepdim=True),
        lambda x: x.logsumexp(torch.Size([0])),
        lambda x: torch.special.logsumexp(x, dim=0),
    ],
}


def sample(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers on DEVICE."""
    return torch.randn(shape or (2, 3, 5), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0)).to(dtype)


def cases(table: dict[str, list[Any]]) -> list[Any]:
    return [pytest.param(name, *_row(row), id=f"{name}-{i}") for name in table for i, row in enumerate(table[name])]


def _row(row: Any) -> tuple[Any, ...]:
    return row if isinstance(row, tuple) else (row,)
