"""The `eager` backend: the framework's own operations, for a CPU and any device without kernels.

What the kernels fuse is here written out, one operation after another: the specification that they
are tested against, with PyTorch's own derivatives of every order.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..core.options import Fused, query_axis
from ..core.state import State


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


def torch_fused(
    operation: str, x: Any, dim: Any, dtype: Any, keepdim: bool, fused: Fused, batch_invariant: bool
) -> Any:
    """The same of the scores that `fused` describes, computed in float32 or wider."""
    torch = sys.modules["torch"]
    dtype = dtype or x.dtype
    z, dead = torch_scores(operation, x, dim, fused, dtype)
    if batch_invariant and operation == "logsumexp":
        y = _invariant_logsumexp(torch, z, dim, keepdim)
    else:
        y = torch_call(operation, z, dim, None, keepdim, None)
    if dead is not None:
        if operation == "logsumexp":
            dead = dead if keepdim else dead.squeeze(dim)
        y = y.masked_fill(dead, -torch.inf if operation == "logsumexp" else 0.0)
    return y.to(dtype)


def torch_scores(operation: str, x: Any, dim: Any, fused: Fused, dtype: Any) -> tuple[Any, Any]:
    """The scores, and where "zero" is asked for, the rows in which all is masked, whose scores are then 0."""
    torch = sys.modules["torch"]
    z = x.to(torch.promote_types(torch.promote_types(x.dtype, dtype), torch.float32))
    if not (isinstance(fused.scale, float) and fused.scale == 1):
        z = z * fused.scale
    if fused.softcap is not None:
        z = fused.softcap * torch.tanh(z / fused.softcap)
    if fused.bias is not None:
        z = z + fused.bias
    if fused.mask is not None:
        z = z.masked_fill(~fused.mask, -torch.inf)
    if fused.causal:
        z = z.masked_fill(~causal_mask(torch.arange, operation, x.shape, dim, device=x.device), -torch.inf)
    if not fused.zero:
        return z, None
    dead = (z.detach() == -torch.inf).all(dim, keepdim=True)
    return z.masked_fill(dead, 0.0), dead


def causal_mask(arange: Any, operation: str, shape: tuple[int, ...], axis: int, **where: Any) -> Any:
    """True where a query may see a key, of shape (queries, 1, …, keys, …) that broadcasts to `shape`."""
    axis %= len(shape)
    queries, keys = shape[query_axis(operation, axis, len(shape))], shape[axis]
    seen = arange(keys, **where) <= arange(queries, **where)[:, None] + (keys - queries)
    return seen.reshape(queries, keys, *(1 for _ in shape[axis + 1 :]))


def _invariant_logsumexp(torch: Any, z: Any, dim: int, keepdim: bool) -> Any:
    """Logsumexp without a sum over the row of PyTorch's, whose order depends on how many rows there are.

    The largest log-softmax of a row is -log(l), and its order does not.
    """
    m = z.amax(dim, keepdim)
    return torch.where(m.isinf(), m, m - torch.log_softmax(z, dim).amax(dim, keepdim))


def numpy_call(operation: str, x: Any, dim: int, keepdim: bool, fused: Fused | None = None) -> Any:
    """The operation on a NumPy array, through its State."""
    if fused is None:
        return _numpy_operation(operation, x, dim, keepdim)
    dtype = x.dtype
    with np.errstate(all="ignore"):
        z = x.astype(np.promote_types(np.float32, dtype) if dtype.kind == "f" else np.float32) * fused.scale
        if fused.softcap is not None:
            z = fused.softcap * np.tanh(z / fused.softcap)
        if fused.bias is not None:
            z = z + fused.bias.astype(z.dtype)
        if fused.mask is not None:
            z = np.where(fused.mask, z, -np.inf)
        if fused.causal:
            z = np.where(causal_mask(np.arange, operation, x.shape, dim), z, -np.inf)
    z = z.astype(np.float64 if dtype.itemsize >= 8 else np.float32)
    y = _numpy_operation(operation, z, dim, keepdim)
    if fused.zero and operation != "logsumexp":
        y = np.where(np.all(z == -np.inf, dim, keepdims=True), 0.0, y)
    return y.astype(dtype)


def _numpy_operation(operation: str, x: Any, dim: int, keepdim: bool) -> Any:
    state = State.of(x, dim)
    if operation == "logsumexp":
        lse = state.logsumexp(keepdim).astype(x.dtype)
        return lse if x.ndim else lse.reshape(())
    return state.softmax(x) if operation == "softmax" else state.log_softmax(x)
