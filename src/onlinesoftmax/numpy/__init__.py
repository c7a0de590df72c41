"""How a call of the softmax family on a NumPy array runs: through its `State`.  No framework is imported."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..core.arguments import checked_dims
from ..core.arrays import quiet
from ..core.call import Call, Settings
from ..core.operations import Operation
from ..core.options import Functions, ScoreOptions, causal_mask, scores
from ..core.state import State
from ..core.task import Choice
from .check import ARRAY_TYPES, check_call

FUNCTIONS = Functions(np.tanh, lambda condition, x, number: np.where(condition, x, number).astype(x.dtype))
"""NumPy's functions for the array formula of the scores."""

_RESULTS = {"softmax": State.softmax, "log_softmax": State.log_softmax}


def run_plain(operation: Operation, x: Any, dim: Any, keepdim: bool, out: Any, choice: tuple[Any, ...]) -> Any:
    """A call without score options, dtype and batch invariance."""
    return run(Call(operation, x, Settings(dim, None, keepdim, Choice(*choice)), None, out))


@quiet
def run(call: Call) -> Any:
    """The operation on a NumPy array."""
    check_call(call)
    operation, x, (dim, dtype, keepdim, *_), options, _, _ = call
    x = np.asarray(x)
    result, dims = np.dtype(dtype or x.dtype), checked_dims(operation.name, dim, x.ndim)
    if x.dtype.kind in "biu":
        x = x.astype(result)
    x = x.astype(np.float64 if max(x.dtype.itemsize, result.itemsize) >= 8 else np.float32, copy=False)
    z = x if options is None else scores_of(x, options, dims)
    y = _result(operation, z, dims, keepdim)
    if options is not None and options.zero and not operation.per_row:
        y = np.where(np.all(z == -np.inf, dims if x.ndim else None, keepdims=True), 0.0, y)
    return y.astype(result, copy=False)


def scores_of(x: Any, options: ScoreOptions, dims: tuple[int, ...] = ()) -> Any:
    """The scores of logits in the dtype of the logits, float32 or float64."""
    # A float64 array beside float32 logits would widen the scores.
    scale, bias = (t.astype(x.dtype) if isinstance(t, ARRAY_TYPES) else t for t in (options.scale, options.bias))
    seen = causal_mask(np.arange, x.shape, dims[0]) if options.causal else None
    return scores(FUNCTIONS, x, options._replace(scale=scale, bias=bias), seen)


def _result(operation: Operation, z: Any, dims: tuple[int, ...], keepdim: bool) -> Any:
    """The result for scores; a row lies along all of the dimensions."""
    if len(dims) != 1:
        others = [i for i in range(z.ndim) if i not in dims]
        order = [*others, *dims]
        moved = z.transpose(order)
        rows = moved.reshape(*(z.shape[i] for i in others), math.prod(z.shape[i] for i in dims))
        y = _result(operation, rows, (len(others),), False)
        if not operation.per_row:
            return y.reshape(moved.shape).transpose(np.argsort(order))
        return np.expand_dims(y, dims) if keepdim else y
    state = State.of(z, dims[0])
    if operation.per_row:
        lse = state.logsumexp(keepdim)
        return lse if z.ndim else lse.reshape(())
    return _RESULTS[operation.name](state, z)
