"""The `cuda` backend: the strategies `row`, `cluster`, `grid` and `looped` in CUDA C++.

Read state.cuh, then levels.cuh, operands.cuh, ops.cuh and slice.cuh; then any strategy is a page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...registry import module_missing
from ...request import Request


def unavailable() -> str | None:
    """Why these kernels cannot run on this machine; None when they can."""
    for module, extra in (("torch", "cuda"), ("cuda", "cuda")):
        if reason := module_missing(module, extra):
            return reason
    import torch

    if not torch.cuda.is_available():
        return "no NVIDIA GPU"
    return None


def prepare(request: Request) -> Callable[[Any, Any, dict[str, Any]], None]:
    """The function run(x, y, more) that runs a request on torch tensors."""
    from .launch import bind

    return bind(request)
