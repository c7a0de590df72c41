"""The public functions: PyTorch's signatures and semantics, on any device; NumPy arrays too."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from .arrays import Array
from .backends import eager


def softmax(
    input: Array,
    dim: int = -1,
    *,
    dtype: Any = None,
    out: Any = None,
    backend: str | None = None,
    strategy: str | None = None,
) -> Array:
    """exp(x) / sum(exp(x)) along `dim`: `torch.softmax` with a choice of kernel.

    Args:
        input: Floating-point torch tensor or NumPy array of any shape and strides; never copied.
        dim: Dimension to normalise, also counted from the end.
        dtype: Dtype of the result (and of the arithmetic, if wider); that of `input` by default.
            float16 and bfloat16 are accumulated in float32.
        out: Torch tensor to write to: right shape (or empty), dtype and device; may be `input` itself.
        backend: Force "triton" or "eager".  By default the planner chooses.
        strategy: Force "row", "looped", "split" or "column".

    Returns:
        Array of the shape of `input`.  Rows with a NaN, a +inf or nothing but -inf are NaN.

    Raises:
        IndexError: dim is out of range.
        TypeError: an argument is of the wrong type.
        NotImplementedError: the dtype is not floating point.
        RuntimeError: `out` does not fit.
        PlanError: what was forced cannot run; the message lists every reason.

    Note:
        Where a gradient is needed, and under torch.compile and torch.func, PyTorch's own
        operations run: the kernels have no derivatives yet.

    Source:
        Milakov and Gimelshein, arXiv:1805.02867.

    Example:
        >>> import torch
        >>> softmax(torch.zeros(2, 4), dim=1)
        tensor([[0.2500, 0.2500, 0.2500, 0.2500],
                [0.2500, 0.2500, 0.2500, 0.2500]])
    """
    return _runner(type(input))("softmax", input, dim, dtype, False, out, backend, strategy)


def log_softmax(
    input: Array,
    dim: int = -1,
    *,
    dtype: Any = None,
    out: Any = None,
    backend: str | None = None,
    strategy: str | None = None,
) -> Array:
    """X - logsumexp(x) along `dim`: `torch.log_softmax`.  Arguments and errors as for `softmax`.

    Example:
        >>> import torch
        >>> log_softmax(torch.zeros(3), dim=0)
        tensor([-1.0986, -1.0986, -1.0986])
    """
    return _runner(type(input))("log_softmax", input, dim, dtype, False, out, backend, strategy)


def logsumexp(
    input: Array,
    dim: int | tuple[int, ...] = -1,
    keepdim: bool = False,
    *,
    dtype: Any = None,
    out: Any = None,
    backend: str | None = None,
    strategy: str | None = None,
) -> Array:
    """log(sum(exp(x))) along `dim`: `torch.logsumexp`.  Other arguments and errors as for `softmax`.

    Args:
        dim: A dimension, or several.
        keepdim: Keep the reduced dimensions with size 1.

    Returns:
        Array without the reduced dimensions; -inf where all of a row is, +inf where any of it is.

    Example:
        >>> import torch
        >>> logsumexp(torch.zeros(2, 8))
        tensor([2.0794, 2.0794])
    """
    return _runner(type(input))("logsumexp", input, dim, dtype, keepdim, out, backend, strategy)


def _find_runner(kind: type) -> Callable[..., Any]:
    """What runs an operation on arrays of this type."""
    if issubclass(kind, np.ndarray):
        return _numpy
    try:
        from . import dispatch
    except ImportError as error:
        raise TypeError(f"input must be a NumPy array, as torch cannot be imported here ({error})") from error
    return dispatch.run


_runner: Callable[[Any], Callable[..., Any]] = cache(_find_runner)


def _numpy(operation: str, x: Any, dim: Any, dtype: Any, keepdim: bool, out: Any, backend: Any, strategy: Any) -> Any:
    if backend not in (None, "eager") or strategy not in (None, "row"):
        raise TypeError(
            f"backend={backend!r}, strategy={strategy!r}: a NumPy array runs on eager/row; pass a torch tensor"
        )
    if out is not None:
        raise TypeError("out: only torch tensors can be written to; a NumPy input gives a new array")
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"{operation}(): argument 'dim' (position 2) must be int, not {type(dim).__name__}")
    if dtype is not None:
        x = x.astype(dtype)
    if x.dtype.kind not in "fV":
        raise NotImplementedError(f"{operation}(): input of dtype {x.dtype} is not floating point; pass dtype=")
    return eager.numpy_call(operation, x, dim, keepdim)
