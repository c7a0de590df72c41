"""The checks of a call on NumPy arrays, with the error types of calls on torch tensors (torch/check.py)."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from ..core.arrays import advice, broadcasts, check_plain, is_floating_dtype, is_real_dtype
from ..core.call import Call
from ..core.options import SCORE_OPTIONS, check_one_per_row, query_axis
from ..core.state import dim_from_end
from ..core.task import Choice

ARRAY_TYPES = (np.ndarray, np.generic)
"""Types of the arrays that an argument may be; NumPy's scalars are 0-d arrays."""


def check_array(name: str, argument: str, t: Any) -> None:
    """Check that an argument is an array of real numbers, which is neither masked nor a matrix."""
    if not isinstance(t, ARRAY_TYPES):
        given = f"{type(t).__name__}{advice(type(t))}"
        raise TypeError(f"{name}(): {argument} must be a NumPy array, as input is, not {given}")
    check_plain(f"{name}(): {argument}", t)
    if t.dtype.kind != "c" and not is_real_dtype(t.dtype):
        raise TypeError(f"{name}(): {argument} of dtype {t.dtype} does not hold real numbers")


def check_choice(name: str, choice: Choice) -> None:
    """Raise an error for a plan that NumPy arrays do not have."""
    if choice.backend not in (None, "eager") or choice.strategy not in (None, "row"):
        raise TypeError(
            f"backend={choice.backend!r}, strategy={choice.strategy!r}: a NumPy array runs on eager/row; "
            "pass a torch tensor"
        )
    if choice.batch_invariant:
        raise TypeError(f"{name}(): batch_invariant: NumPy's sums depend on the shape; pass a torch tensor")


def check_call(call: Call) -> None:
    """Raise an error for arguments that a call on a NumPy array does not support."""
    operation, x, (_, dtype, _, choice, _), _, out, _ = call
    name = operation.name
    check_choice(name, choice)
    if out is not None:
        raise TypeError("out: only torch tensors can be written to; a NumPy input gives a new array")
    check_array(name, "input", x)
    if x.dtype.kind == "c":
        raise NotImplementedError(f"{name}(): input of dtype {x.dtype} is complex; pass its real part")
    if not is_floating_dtype(checked_dtype(name, dtype, x)):
        given = f"dtype={np.dtype(dtype)}" if dtype is not None else f"input of dtype {x.dtype}"
        raise NotImplementedError(f"{name}(): {given} is not floating point; pass dtype=")
    check_options(call)


def checked_dtype(name: str, dtype: Any, x: Any) -> np.dtype[Any]:
    """The dtype of the result: that of the input where the call names none."""
    try:
        return np.dtype(x.dtype if dtype is None else dtype)
    except TypeError:
        raise TypeError(f"{name}(): dtype must be one of NumPy's, as input is an array, not {dtype!r}") from None


def check_options(call: Call) -> None:
    """Check the score options against the input."""
    operation, x, settings, options, _, _ = call
    name = operation.name
    if options is None:
        return
    for argument, option in SCORE_OPTIONS.items():
        t = getattr(options, argument)
        if not option.tensor or t is None or isinstance(t, float):
            continue
        check_array(name, argument, t)
        if option.dtype == "boolean" and t.dtype != np.bool_:
            raise RuntimeError(f"{name}(): {argument} must be boolean (True keeps), got {t.dtype}")
        if option.dtype == "floating" and not is_floating_dtype(t.dtype):
            raise RuntimeError(f"{name}(): {argument} must be floating point, got {t.dtype}")
        if not broadcasts(t.shape, x.shape):
            raise RuntimeError(f"{name}(): {argument} of shape {t.shape} does not broadcast to input's {x.shape}")
        if option.kind == "row" and x.ndim:
            dims = checked_dims(name, settings.dim, x.ndim)
            check_one_per_row(f"{name}()", argument, t.shape, x.shape, dims)
    if options.causal:
        dims = checked_dims(name, settings.dim, x.ndim)
        if isinstance(settings.dim, tuple | list):
            raise ValueError(f"{name}(): causal needs one dim, got {settings.dim}")
        query_axis(name, dims[0], max(x.ndim, 1))


def checked_dims(name: str, dim: Any, ndim: int) -> tuple[int, ...]:
    """The softmax dimensions, counted from 0; an empty tuple means all dimensions.

    Raises:
        TypeError: a dimension is no integer.
        IndexError: a dimension is out of range.
        RuntimeError: a dimension appears twice.
    """
    several = isinstance(dim, tuple | list)
    dims = tuple(_checked_dim(name, d, ndim) for d in (dim if several else (dim,)))
    for d in dims:
        if dims.count(d) > 1:
            raise RuntimeError(f"{name}(): dim {d} appears twice in {tuple(dim)}")
    return dims or tuple(range(max(ndim, 1)))


def _checked_dim(name: str, dim: Any, ndim: int) -> int:
    if isinstance(dim, bool | np.bool_) or not hasattr(dim, "__index__"):
        raise TypeError(f"{name}(): argument 'dim' (position 2) must be int, not {type(dim).__name__}")
    return dim_from_end(operator.index(dim), ndim) + max(ndim, 1)
