"""The checks of a call on NumPy arrays, with the error types of calls on torch tensors (torch/check.py)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.arguments import Kind, Library, check_options
from ..core.arrays import advice, check_plain, is_floating_dtype, is_real_dtype
from ..core.call import Call
from ..core.task import Choice

ARRAY_TYPES = (np.ndarray, np.generic)
"""Types of the arrays that an argument may be; NumPy's scalars are 0-d arrays."""


def check_array(caller: str, argument: str, t: Any, x: Any = None) -> None:
    """Check that an argument is an array of real numbers, which is neither masked nor a matrix."""
    if not isinstance(t, ARRAY_TYPES):
        given = f"{type(t).__name__}{advice(type(t))}"
        raise TypeError(f"{caller}: {argument} must be a NumPy array, as input is, not {given}")
    check_plain(f"{caller}: {argument}", t)
    if t.dtype.kind != "c" and not is_real_dtype(t.dtype):
        raise TypeError(f"{caller}: {argument} of dtype {t.dtype} does not hold real numbers")


def _kind_of(t: Any) -> Kind:
    if is_floating_dtype(t.dtype):
        return "floating"
    return {"b": "boolean", "i": "integer", "u": "integer"}.get(t.dtype.kind, "other")  # type: ignore[return-value]  # a Kind


def _shape_hint(argument: str, x: Any, target: Any, rows: tuple[int, ...]) -> str:
    if argument == "target" and x.ndim > 2 and target.shape == x.shape[:-1]:
        return "; the classes are dimension 1, as in PyTorch: pass numpy.moveaxis(input, -1, 1)"
    return ""


NUMPY = Library(check_array, lambda *_: None, _kind_of, lambda *_: True, _shape_hint)
"""NumPy's arrays for the checks that all libraries share.  All of them are in one place."""


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
    check_array(f"{name}()", "input", x)
    if x.dtype.kind == "c":
        raise NotImplementedError(f"{name}(): input of dtype {x.dtype} is complex; pass its real part")
    if not is_floating_dtype(checked_dtype(name, dtype, x)):
        given = f"dtype={np.dtype(dtype)}" if dtype is not None else f"input of dtype {x.dtype}"
        raise NotImplementedError(f"{name}(): {given} is not floating point; pass dtype=")
    check_options(NUMPY, call)


def checked_dtype(name: str, dtype: Any, x: Any) -> np.dtype[Any]:
    """The dtype of the result: that of the input where the call names none."""
    try:
        return np.dtype(x.dtype if dtype is None else dtype)
    except TypeError:
        raise TypeError(f"{name}(): dtype must be one of NumPy's, as input is an array, not {dtype!r}") from None
