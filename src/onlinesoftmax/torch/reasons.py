"""The reasons why PyTorch's own operation runs a call on a tensor, and no kernel of ours."""

from __future__ import annotations

import torch

from ..core.task import ITEMSIZE
from ..kernels import registry
from . import formulas
from .arguments import TRACED_TYPES

DTYPES = tuple(getattr(torch, name) for name in ITEMSIZE)
"""The dtypes that kernels take."""


def _have_kernels() -> bool:
    return registry.unavailable("cuda") is None or registry.unavailable("triton") is None


# torch.compiler.assume_constant_result only sets this attribute, but calling it would import the compiler, which takes
# seconds.
_have_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take any attribute


def why_pytorch(x: torch.Tensor, dtype: torch.dtype | None, backend: str | None) -> str | None:
    """Why PyTorch's own operation runs a call on this tensor; None if a kernel may run it, or the forced backend."""
    return (why_not_by_default(x) if backend is None else None) or why_not_kernels(x, dtype)


def why_not_by_default(x: torch.Tensor) -> str | None:
    """Why a call that forces no backend runs PyTorch's own operation, on any tensor of this device."""
    if not x.is_cuda:
        return f"input is on {'the CPU' if x.is_cpu else x.device.type}, where PyTorch's own operation runs"
    return None if _have_kernels() else "neither the CUDA nor the Triton kernels can run here"


def why_not_kernels(x: torch.Tensor, dtype: torch.dtype | None) -> str | None:
    """Why only PyTorch's own operations can take this tensor; None where our kernels can."""
    for given in (x.dtype, dtype or x.dtype):
        if given not in DTYPES:
            return f"dtype must be one of {', '.join(ITEMSIZE)}, got {given}"
    if x.is_nested:
        return f"input is a nested tensor of layout {x.layout}, not a plain strided tensor"
    if (type(x) not in formulas.PLAIN_TYPES and type(x).__name__ not in TRACED_TYPES) or x.layout != torch.strided:
        return f"input is a {type(x).__name__} of layout {x.layout}, not a plain strided tensor"
    if not torch.compiler.is_compiling() and x.is_neg():
        return "input is a lazily negated view; call resolve_neg() first"
    return None
