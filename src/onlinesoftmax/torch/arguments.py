"""The checks of a call on torch tensors: PyTorch's error types, with the name of the argument.

The rules for all libraries stand in core/arguments.py and in the rooms of the operations; here is what only tensors
have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch

from ..core import arguments
from ..core.arguments import Kind, Library
from ..core.arrays import advice, check_strided
from ..core.call import Call, Settings
from ..core.options import ScoreOptions
from ..ops import OPERATIONS
from ..ops.cross_entropy import arguments as rules
from .loss_arguments import Loss

TRACED_TYPES = ("FakeTensor", "FunctionalTensor")
"""Types of the tensors that replace real tensors while a program is traced."""

FLOATING_DTYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64
"""Dtypes of logits; PyTorch's operations cannot compute with smaller ones."""

INTEGER_DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip


def reduced_shape(shape: Sequence[int], dims: Collection[int], keepdim: bool) -> tuple[int, ...]:
    """The shape of a result per row, from that of the input and the dimensions of a row, counted from 0."""
    return tuple(1 if i in dims else size for i, size in enumerate(shape) if keepdim or i not in dims)


def checked_out(operation: str, out: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raise PyTorch's error where a result of this shape, dtype and device does not fit `out`.

    Args:
        operation: Name of the public function.
        out: The tensor.
        shape, dtype, device: Properties of the result.
    """
    if any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True)):
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


def is_lazy(t: torch.Tensor | None) -> bool:
    """True for a tensor whose memory does not hold its values, so that a kernel cannot read it.

    It is a batch (`is_batched`), or the result of a negation that PyTorch has put off, as in `z.conj().imag`.
    """
    return is_batched(t) or (t is not None and not torch.compiler.is_dynamo_compiling() and t.is_neg())


# torch.autograd.grad and torch.func hide dimensions in two ways.
_hides_for_autograd: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
_hides_for_func: Callable[[torch.Tensor], bool] = torch._C._functorch.is_batchedtensor


def _check_array(caller: str, argument: str, value: Any, x: torch.Tensor | None = None) -> None:
    if not isinstance(value, torch.Tensor):
        given = f"{type(value).__name__}{advice(type(value))}"
        wanted = f"argument '{argument}' must be Tensor" if x is None else f"{argument} must be Tensor, as input is"
        raise TypeError(f"{caller}: {wanted}, not {given}")
    check_strided(f"{caller}: {argument}", value, torch.strided)
    if x is not None:
        _check_place(caller, argument, value, x)


def _check_place(caller: str, argument: str, t: torch.Tensor, x: torch.Tensor) -> None:
    # A kernel would read the memory of the wrapper.
    if type(t) is not torch.Tensor and type(t).__name__ == "DTensor" and type(x).__name__ != "DTensor":
        raise TypeError(f"{caller}: {argument} is a DTensor, and input is a {type(x).__name__}")
    if t.device != x.device:
        raise RuntimeError(f"{caller}: {argument} is on {t.device}, and input on {x.device}")


def _kind_of(t: torch.Tensor) -> Kind:
    if t.dtype in FLOATING_DTYPES:
        return "floating"
    if t.dtype == torch.bool:
        return "boolean"
    return "integer" if t.dtype in INTEGER_DTYPES else "other"


def _is_number(argument: str, value: Any, kind: type[Any]) -> bool:
    """A tensor of one element is a number if it requires no gradient, as in PyTorch, which has no z_loss."""
    if not isinstance(value, torch.Tensor):
        return True
    is_number = value.numel() == 1 and not value.requires_grad and argument != "z_loss"
    return is_number and not (kind is int and value.is_floating_point())


def _shape_hint(argument: str, x: torch.Tensor, target: torch.Tensor, rows: tuple[int, ...]) -> str:
    """End of the message for targets of a wrong shape: what the caller may have meant."""
    shape, before = tuple(target.shape), tuple(x.shape[:-1])
    if target.is_floating_point():
        return "; class indices are integers: target.long()" if shape == rows else ""
    if argument != "target" or x.dim() < 2:
        return ""
    if x.dim() > 2 and shape in (before, (math.prod(before),)):
        flat = "" if len(shape) == 1 else ", target.flatten()"
        moved = "" if len(shape) == 1 else ", or pass input.movedim(-1, 1)"
        return f"; the classes are dimension 1, as in PyTorch: pass input.flatten(0, -2){flat}{moved}"
    if shape == tuple(x.shape):
        return "; class probabilities are floating point: target.to(input.dtype), or target.argmax(1) for the classes"
    if math.prod(shape) == math.prod(rows):
        return f"; pass target.reshape({', '.join(map(str, rows))})"
    return ""


TORCH = Library(_check_array, _check_place, _kind_of, _is_number, _shape_hint)
"""PyTorch's tensors for the checks that all libraries share."""

check_options = partial(arguments.check_options, TORCH)
check_index = partial(arguments.check_index, TORCH)
checked_ignore_index = partial(rules.checked_ignore_index, TORCH)


def check_out_memory(name: str, x: torch.Tensor, options: ScoreOptions | None, out: torch.Tensor) -> None:
    """Check that `out` may be written while the operands of the operation of this name are read."""
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


def check_first_derivative(gradient: str) -> None:
    """Refuse, inside a backward pass, a gradient that is to be differentiated itself.

    Without this, autograd would take the gradient for a constant, and a second derivative would be wrong.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(f"{gradient} cannot be differentiated again (create_graph=True)")


def checked_loss(x: Any, target: Any, weight: Any, loss: Loss) -> Loss:
    """The result of `checked_numbers` for arguments that are right."""
    rules.check_arrays(TORCH, x, target, weight)
    name, loss = "cross_entropy()", checked_numbers(loss)
    if not target.is_floating_point():
        check_constant(name, "weight", weight, "is not computed; detach() it")
    check_dtype(name, loss.settings.dtype)
    if loss.options is not None:
        check_options(Call(OPERATIONS[rules.NAME], x, Settings(rules.class_dim(x)), loss.options))
        check_scale_is_constant(name, loss.options)
    return loss


def check_weight(name: str, weight: Any, x: torch.Tensor, classes: int) -> None:
    """Check the weights of so many classes, if there are any, where targets are classes.

    PyTorch computes the gradient with respect to the weights only if the targets are class probabilities.
    """
    rules.check_weight(TORCH, name, weight, x, classes)
    check_constant(name, "weight", weight, "is not computed; detach() it")


def check_scale_is_constant(name: str, options: ScoreOptions | None) -> None:
    """Check that a scale that is a tensor requires no gradient, which losses do not compute."""
    scale = options and options.scale
    check_constant(name, "scale", scale, "this function does not compute; multiply the logits by it instead")


def check_constant(name: str, argument: str, value: Any, why: str) -> None:
    """Refuse a tensor that requires a gradient where none is computed; `why` ends the sentence."""
    if isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{name}: {argument} requires a gradient, which {why}")


def check_dtype(name: str, dtype: Any) -> None:
    """Check the dtype that a caller asks for; None is any."""
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name}: argument 'dtype' must be torch.dtype, not {type(dtype).__name__}")
    if not dtype.is_floating_point:
        raise RuntimeError(f"{name}: dtype must be floating point, got {dtype}")


def checked_numbers(loss: Loss) -> Loss:
    """The arguments with Python's numbers for those of another type; `loss` itself where there are none.

    Reading a tensor waits for its GPU.
    """
    given = loss.ignore_index, loss.smoothing, loss.z_loss
    numbers = rules.checked_numbers(TORCH, loss.reduction, given)
    if numbers is given:
        return loss
    return loss._replace(ignore_index=numbers[0], smoothing=numbers[1], z_loss=numbers[2])
