"""How a call on a NumPy array runs: through its `State`.  No framework is imported."""

from __future__ import annotations

from typing import Any

import numpy as np

from .core.arrays import advice, broadcasts, is_floating_dtype, quiet
from .core.call import Call, Settings
from .core.operations import Operation
from .core.options import SCORE_OPTIONS, Functions, causal_mask, check_one_per_row, query_axis, scores
from .core.state import State, dim_from_end
from .core.task import Choice

FUNCTIONS = Functions(np.tanh, lambda condition, x, number: np.where(condition, x, number).astype(x.dtype))
"""NumPy's functions for the array formula of the scores."""

ARRAY_TYPES = (np.ndarray, np.generic)
"""Types of the arrays that a score option may be; NumPy's scalars are 0-d arrays."""

_RESULTS = {"softmax": State.softmax, "log_softmax": State.log_softmax}


def run_plain(operation: Operation, x: Any, dim: Any, keepdim: bool, out: Any, choice: tuple[Any, ...]) -> Any:
    """A call without score options, dtype and batch invariance."""
    return run(Call(operation, x, Settings(dim, None, keepdim, Choice(*choice)), None, out))


@quiet
def run(call: Call) -> Any:
    """The operation on a NumPy array."""
    _check(call)
    operation, x, (dim, dtype, keepdim, *_), options, _, _ = call
    x = x if dtype is None else x.astype(dtype)
    if options is None:
        return _result(operation, x, dim, keepdim)
    wide = x.astype(np.promote_types(np.float32, x.dtype) if x.dtype.kind == "f" else np.float32)
    # A float64 array beside float32 logits would widen the scores.
    scale, bias = (t.astype(wide.dtype) if isinstance(t, ARRAY_TYPES) else t for t in (options.scale, options.bias))
    options = options._replace(scale=scale, bias=bias)
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
    """Raise an error for arguments that NumPy arrays do not support."""
    operation, x, (dim, dtype, _, choice, _), _, out, _ = call
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
    try:
        result = x.dtype if dtype is None else np.dtype(dtype)
    except TypeError:
        raise TypeError(f"{name}(): dtype must be one of NumPy's, as input is an array, not {dtype!r}") from None
    if result.kind not in "fV":
        raise NotImplementedError(f"{name}(): input of dtype {x.dtype} is not floating point; pass dtype=")
    _check_options(call)


def _check_options(call: Call) -> None:
    """Check the score options against the input, with the error types of torch tensors (torch/check.py)."""
    operation, x, settings, options, _, _ = call
    name = operation.name
    if options is None:
        return
    for argument, option in SCORE_OPTIONS.items():
        t = getattr(options, argument)
        if not option.tensor or t is None or isinstance(t, float):
            continue
        if not isinstance(t, ARRAY_TYPES):
            given = f"{type(t).__name__}{advice(type(t))}"
            raise TypeError(f"{name}(): {argument} must be a NumPy array, as input is, not {given}")
        if option.dtype == "boolean" and t.dtype != np.bool_:
            raise RuntimeError(f"{name}(): {argument} must be boolean (True keeps), got {t.dtype}")
        if option.dtype == "floating" and not is_floating_dtype(t.dtype):
            raise RuntimeError(f"{name}(): {argument} must be floating point, got {t.dtype}")
        if not broadcasts(t.shape, x.shape):
            raise RuntimeError(f"{name}(): {argument} of shape {t.shape} does not broadcast to input's {x.shape}")
        if option.kind == "row":
            axis = dim_from_end(settings.dim, x.ndim) + max(x.ndim, 1)
            check_one_per_row(f"{name}()", argument, t.shape, x.shape, (axis,))
    if options.causal:
        ndim = max(x.ndim, 1)
        query_axis(name, dim_from_end(settings.dim, x.ndim) + ndim, ndim)
