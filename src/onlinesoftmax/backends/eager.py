"""The `eager` backend: the framework's own operations, for a CPU and any device without kernels."""

from __future__ import annotations

import sys
from typing import Any

from ..state import State


def unavailable() -> str | None:
    """Always None: NumPy alone is enough."""
    return None


def torch_call(operation: str, x: Any, dim: Any, dtype: Any, keepdim: bool, out: Any) -> Any:
    """The operation on a torch tensor, by PyTorch itself; its gradients, its errors."""
    # Whoever made x has imported torch.
    function = getattr(sys.modules["torch"], operation)
    if operation == "logsumexp":
        return function(x if dtype is None else x.to(dtype), dim, keepdim, out=out)
    return function(x, dim, dtype) if out is None else function(x, dim, dtype=dtype, out=out)


def numpy_call(operation: str, x: Any, dim: int, keepdim: bool) -> Any:
    """The operation on a NumPy array, through its State."""
    state = State.of(x, dim)
    if operation == "logsumexp":
        lse = state.logsumexp(keepdim).astype(x.dtype)
        return lse if x.ndim else lse.reshape(())
    return state.softmax(x) if operation == "softmax" else state.log_softmax(x)
