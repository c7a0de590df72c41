"""The checks of a call on torch tensors: PyTorch's error types, with the name of the argument."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import torch

from ..core.arrays import advice, broadcasts
from ..core.call import Call
from ..core.options import SCORE_OPTIONS, check_one_per_row, query_axis

TRACED_TYPES = ("FakeTensor", "FunctionalTensor")
"""Types of the tensors that replace real tensors while a program is traced."""


def checked_dim(operation: str, dim: Any, ndim: int) -> int:
    """`dim` as a number from 0 to ndim - 1.

    Raises:
        TypeError: dim is not an int.
        IndexError: dim is out of range.
    """
    if isinstance(dim, bool) or not isinstance(dim, int):
        dim = _converted_dim(operation, dim)
    ndim = max(ndim, 1)
    if not -ndim <= dim < ndim:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], but got {dim})")
    return dim % ndim


def _converted_dim(operation: str, dim: Any) -> int:
    """A dimension that is no `int`: an integer of another type, as numpy.int64, is converted."""
    # The host would have to wait for a tensor on a GPU.
    if not isinstance(dim, bool | torch.Tensor):
        with suppress(TypeError):
            return operator.index(dim)
    raise TypeError(f"{operation}(): argument 'dim' (position 2) must be int, not {type(dim).__name__}")


def reduced_shape(shape: Sequence[int], dims: Collection[int], keepdim: bool) -> tuple[int, ...]:
    """The shape of a result per row, from that of the input and the dimensions of a row, counted from 0."""
    return tuple(1 if i in dims else size for i, size in enumerate(shape) if keepdim or i not in dims)


def checked_out(operation: str, out: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raise PyTorch's error where a result of this shape, dtype and device does not fit `out`.

    Args:
        operation: Name of the public function.
        out: Properties of the tensor (`TensorKind`), or the tensor itself.
        shape, dtype, device: Properties of the result.
    """
    strides = out.stride() if isinstance(out, torch.Tensor) else out.strides
    if any(stride == 0 and size > 1 for size, stride in zip(out.shape, strides, strict=True)):
        raise RuntimeError(f"{operation}(): out has several elements at one memory location; clone() it first")
    if out.dtype != dtype:
        raise RuntimeError(f"{operation}(): Expected out tensor to have dtype {dtype}, but got {out.dtype} instead")
    if out.device != device:
        raise RuntimeError(f"{operation}(): out is on {out.device}, and input on {device}")
    check_out_shape(operation, out, shape)


def check_out_shape(operation: str, out: Any, shape: tuple[int, ...]) -> None:
    """Check that `out` has the shape of the result or is empty; arguments as for `checked_out`."""
    if out.shape != shape and out.shape.numel():
        raise RuntimeError(f"{operation}(): out has shape {tuple(out.shape)}, and the result has {tuple(shape)}")


def autocasts(x: torch.Tensor) -> bool:
    """True where autocast is on for the device of a tensor; meta tensors have no autocast."""
    return not x.is_meta and torch.is_autocast_enabled("cuda" if x.is_cuda else x.device.type)


def is_batched(t: torch.Tensor | None) -> bool:
    """True for a tensor in which vmap hides a dimension, as in the gradients of `is_grads_batched=True`.

    A kernel cannot read such a tensor, which has no memory of its own.
    """
    # dynamo cannot trace these functions, and hides no dimensions.
    if t is None or torch.compiler.is_dynamo_compiling():
        return False
    return _hides_for_autograd(t) or _hides_for_func(t)


# torch.autograd.grad and torch.func hide dimensions in two ways.
_hides_for_autograd: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
_hides_for_func: Callable[[torch.Tensor], bool] = torch._C._functorch.is_batchedtensor


def check_not_dtensor(operation: str, argument: str, t: torch.Tensor, x: torch.Tensor) -> None:
    """Raise an error for a DTensor operand if the input is not a DTensor.

    A kernel would read the memory of the wrapper.
    """
    if type(t) is not torch.Tensor and type(t).__name__ == "DTensor" and type(x).__name__ != "DTensor":
        raise TypeError(f"{operation}(): {argument} is a DTensor, and input is a {type(x).__name__}")


def check_options(call: Call) -> None:
    """Check the score options of a call against its input; each error names the argument."""
    operation, x, settings, options, _, _ = call
    name_of = operation.name
    if options is None:
        return
    for name, option in SCORE_OPTIONS.items():
        t = getattr(options, name)
        if not option.tensor or t is None or isinstance(t, float):
            continue
        if not isinstance(t, torch.Tensor):
            given = f"{type(t).__name__}{advice(type(t))}"
            raise TypeError(f"{name_of}(): {name} must be Tensor, as input is, not {given}")
        check_not_dtensor(name_of, name, t, x)
        if t.device != x.device:
            raise RuntimeError(f"{name_of}(): {name} is on {t.device}, and input on {x.device}")
        if option.dtype == "boolean" and t.dtype != torch.bool:
            raise RuntimeError(f"{name_of}(): {name} must be boolean (True keeps), got {t.dtype}")
        if option.dtype == "floating" and not t.is_floating_point():
            raise RuntimeError(f"{name_of}(): {name} must be floating point, got {t.dtype}")
        if not broadcasts(t.shape, x.shape):
            raise RuntimeError(
                f"{name_of}(): {name} of shape {tuple(t.shape)} does not broadcast to input's {tuple(x.shape)}"
            )
        if option.kind == "row" and t.dim():
            dims = settings.dim if isinstance(settings.dim, tuple | list) else (settings.dim,)
            # An empty tuple means all dimensions, as in PyTorch.
            axes = [checked_dim(name_of, dim, x.dim()) for dim in dims] or range(x.dim())
            check_one_per_row(f"{name_of}()", name, t.shape, x.shape, axes)
    if options.causal:
        if isinstance(settings.dim, tuple | list):
            raise ValueError(f"{name_of}(): causal needs one dim, got {settings.dim}")
        query_axis(name_of, checked_dim(name_of, settings.dim, x.dim()), max(x.dim(), 1))


def check_out_memory(call: Call) -> None:
    """Check that `out` may be written while the operands are read."""
    operation, x, _, options, out, _ = call
    name = operation.name
    if out.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{name}(): out requires a gradient, and functions with out=... do not support that")
    same = (
        out.data_ptr() == x.data_ptr() and out.stride() == x.stride() and out.dtype == x.dtype and out.shape == x.shape
    )
    if not same and out.device == x.device and _overlap(x, out):
        raise RuntimeError(f"{name}(): out overlaps input in memory without being the same tensor; clone() one of them")
    for operand in ("scale", "bias", "mask") if options is not None else ():
        t = getattr(options, operand)
        if isinstance(t, torch.Tensor) and _overlap(t, out):
            raise RuntimeError(f"{name}(): out overlaps {operand} in memory; clone() one of them")


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    begin_a, begin_b = a.data_ptr(), b.data_ptr()
    return begin_a < begin_b + extent(b) and begin_b < begin_a + extent(a)


def extent(t: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last."""
    if t.is_contiguous():
        return t.numel() * t.itemsize
    return (sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1) * t.itemsize if t.numel() else 0


def check_first_derivative(gradient: str, instead: str = "") -> None:
    """Refuse, inside a backward pass, a gradient that is to be differentiated itself.

    Without this, autograd would take the gradient for a constant, and a second derivative would be wrong.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(f"{gradient} cannot be differentiated again (create_graph=True){instead}")
