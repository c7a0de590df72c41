"""How a call on a NumPy array runs: through its `State`.  No framework is imported."""

from __future__ import annotations

from typing import Any

import numpy as np

from .core.call import Call, Settings
from .core.operations import Operation
from .core.options import Functions, causal_mask, query_axis, scores
from .core.state import State, dim_from_end
from .core.task import Choice

FUNCTIONS = Functions(np.tanh, lambda condition, x, number: np.where(condition, x, number).astype(x.dtype))
"""NumPy's functions for the array formula of the scores."""

_RESULTS = {"softmax": State.softmax, "log_softmax": State.log_softmax}


def run_plain(operation: Operation, x: Any, dim: Any, keepdim: bool, out: Any, choice: tuple[Any, ...]) -> Any:
    """A call without score options, dtype and batch invariance."""
    return run(Call(operation, x, Settings(dim, None, keepdim, Choice(*choice)), None, out))


def run(call: Call) -> Any:
    """The operation on a NumPy array."""
    _check(call)
    operation, x, (dim, dtype, keepdim, _), options, _, _ = call
    x = x if dtype is None else x.astype(dtype)
    if options is None:
        return _result(operation, x, dim, keepdim)
    with np.errstate(all="ignore"):
        wide = x.astype(np.promote_types(np.float32, x.dtype) if x.dtype.kind == "f" else np.float32)
        if options.bias is not None:
            options = options._replace(bias=options.bias.astype(wide.dtype))
        seen = causal_mask(np.arange, x.shape, dim) if options.causal else None
        z = scores(FUNCTIONS, wide, options, seen).astype(np.float64 if x.dtype.itemsize >= 8 else np.float32)
    y = _result(operation, z, dim, keepdim)
    if options.zero and not operation.per_row:
        y = np.where(np.all(z == -np.inf, dim, keepdims=True), 0.0, y)
    return y.astype(x.dtype)


def _result(operation: Operation, x: Any, dim: int, keepdim: bool) -> Any:
    state = State.of(x, dim)
    if operation.per_row:
        lse = state.logsumexp(keepdim).astype(x.dtype)
        return lse if x.ndim else lse.reshape(())
    return _RESULTS[operation.name](state, x)


def _check(call: Call) -> None:
    """Raise for what NumPy arrays do not do."""
    operation, x, (dim, dtype, _, choice), options, out, _ = call
    name = operation.name
    if choice.backend not in (None, "eager") or choice.strategy not in (None, "row"):
        raise TypeError(
            f"backend={choice.backend!r}, strategy={choice.strategy!r}: a NumPy array runs on eager/row; "
            "pass a torch tensor"
        )
    if out is not None:
        raise TypeError("out: only torch tensors can be written to; a NumPy input gives a new array")
    if choice.batch_invariant:
        raise TypeError("batch_invariant: NumPy's sums depend on the shape; pass a torch tensor")
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"{name}(): argument 'dim' (position 2) must be int, not {type(dim).__name__}")
    result = x.dtype if dtype is None else np.dtype(dtype)
    if result.kind not in "fV":
        raise NotImplementedError(f"{name}(): input of dtype {x.dtype} is not floating point; pass dtype=")
    if options is None:
        return
    if options.causal:
        ndim = max(x.ndim, 1)
        query_axis(name, dim_from_end(dim, x.ndim) + ndim, ndim)
    if options.mask is not None and options.mask.dtype != np.bool_:
        raise TypeError(f"{name}(): mask must be boolean (True keeps), got {options.mask.dtype}")
    for operand in ("bias", "mask"):
        beside = getattr(options, operand)
        if beside is not None and np.broadcast_shapes(beside.shape, x.shape) != x.shape:
            raise ValueError(f"{name}(): {operand} of shape {beside.shape} does not broadcast to input's {x.shape}")
