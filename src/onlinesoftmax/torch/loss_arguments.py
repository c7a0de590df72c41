"""The checks of the arguments of cross_entropy and token_logprobs on torch tensors.

The errors have the types that PyTorch raises, and name the argument.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..core.arrays import advice
from ..core.call import Call
from ..core.options import ScoreOptions
from ..ops import OPERATIONS
from .check import check_not_dtensor, check_options, checked_dim
from .loss import UNSIGNED, Loss, counted, equals, is_class, signed
from .prepare import INTEGERS

Tensor = torch.Tensor

TARGET_DTYPES = (*(getattr(torch, name) for name in INTEGERS), *UNSIGNED)


def class_dim(x: Tensor) -> int:
    """The dimension of the classes, as PyTorch has it: the second, or the only one."""
    return 1 if x.dim() > 1 else 0


def checked_loss(x: Any, target: Any, weight: Any, loss: Loss) -> Loss:
    """The result of `checked_numbers` for arguments that are right.

    The errors have the types that PyTorch raises, and name the argument.
    """
    name = "cross_entropy()"
    for argument, value in (("input", x), ("target", target)):
        _check_tensor(name, argument, value)
    _check_floating(name, "input", x, "target", target)
    loss = checked_numbers(loss)
    if x.dim() == 0:
        raise ValueError(f"{name}: input needs a dimension of classes, got shape ()")
    dim = class_dim(x)
    rows = (*x.shape[:dim], *x.shape[dim + 1 :])
    if target.is_floating_point():
        if target.shape != x.shape:
            raise RuntimeError(
                f"{name}: target with class probabilities has shape {tuple(target.shape)}, and input {tuple(x.shape)}"
                f"{'; class indices are integers: target.long()' if tuple(target.shape) == rows else ''}"
            )
    else:
        check_index(name, "target", x, target, rows)
    check_weight(name, weight, x, x.shape[dim], not target.is_floating_point())
    check_dtype(name, loss.settings.dtype)
    if loss.options is not None:
        check_options(Call(OPERATIONS["cross_entropy"], x, loss.settings._replace(dim=dim), loss.options))
        check_scale_is_constant(name, loss.options)
    for argument, value in (("target", target), ("weight", weight)):
        check_not_dtensor("cross_entropy", argument, value, x)
    return loss


def check_scale_is_constant(name: str, options: ScoreOptions | None) -> None:
    """Check that a scale that is a tensor requires no gradient, which losses do not compute."""
    scale = options and options.scale
    if isinstance(scale, Tensor) and scale.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{name}: scale requires a gradient, which this function does not compute; "
            "multiply the logits by it instead"
        )


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

    As in PyTorch, a tensor of one element is a number if it requires no gradient, and reading it waits for its GPU.
    PyTorch has no z_loss, so a tensor as z_loss is an error.

    Raises:
        TypeError, ValueError, RuntimeError: ignore_index, label_smoothing, z_loss or reduction is wrong.
    """
    _, index, _, smoothing, z_loss, _, _ = loss
    plain = type(index) is int and type(smoothing) in (float, int) and type(z_loss) in (float, int)
    if not plain:
        name = "cross_entropy"
        loss = loss._replace(
            ignore_index=checked_number(name, "ignore_index", index, int),
            smoothing=checked_number(name, "label_smoothing", smoothing, float),
            z_loss=checked_number(name, "z_loss", z_loss, float),
        )
    if loss.reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{loss.reduction} is not a valid value for reduction: 'none', 'mean' or 'sum'")
    if not 0.0 <= loss.smoothing <= 1.0:
        raise RuntimeError(f"cross_entropy(): label_smoothing must be between 0.0 and 1.0, got {loss.smoothing}")
    return loss


def checked_number(function: str, argument: str, value: Any, kind: type[Any]) -> Any:
    """Convert an argument to Python's type `kind`: `int` needs a value with __index__, `float` one with __float__.

    Raises:
        TypeError: the value is not a number of this kind.
    """
    is_number = hasattr(value, "__index__" if kind is int else "__float__")
    if isinstance(value, Tensor):
        is_floating = value.is_floating_point() or value.dtype == torch.bool
        is_number = value.numel() == 1 and not value.requires_grad and argument != "z_loss"
        is_number = is_number and not (kind is int and is_floating)
    if not is_number or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{function}(): argument '{argument}' must be {kind.__name__}, not {type(value).__name__}")
    return kind(value)


def check_targets(x: Any, target: Any, weight: Any, fields: tuple[Any, ...]) -> None:
    """Check the arguments, and the range of every target that counts, which waits for the GPU.

    Raises:
        IndexError: a target is out of range; the message has its position and its value.
    """
    loss = checked_loss(x, target, weight, Loss(*fields))
    if not target.is_floating_point():
        target = signed(target)
        _check_range("cross_entropy(): target", target, x.shape[class_dim(x)], counted(target, loss))


def check_tokens(x: Any, index: Any, dim: Any, ignore_index: Any = None) -> None:
    """Check the arguments, and the range of every index, which waits for the GPU.

    Raises:
        IndexError: an index is out of range; the message has its position and its value.
    """
    check_token_arguments(x, index, dim)
    tokens = x.shape[checked_dim("token_logprobs", dim, x.dim())]
    index = signed(index)
    number = -1 if ignore_index is None else checked_number("token_logprobs", "ignore_index", ignore_index, int)
    counts = torch.ones_like(index, dtype=torch.bool) if ignore_index is None else ~equals(index, number)
    _check_range("token_logprobs(): index", index, tokens, counts)


def _check_range(name: str, index: Tensor, classes: int, counts: Tensor) -> None:
    wrong = ~is_class(index, classes) & counts
    if not wrong.any():
        return
    position = wrong.nonzero()[0].tolist()
    where = f" at position {position[0] if len(position) == 1 else tuple(position)}" if position else ""
    value, count = index[tuple(position)].item(), int(wrong.sum())
    more = f"; {count} of {index.numel()} are out of range" if count > 1 else ""
    raise IndexError(f"{name} is {value}{where}, which is not in [0, {classes}){more}")


def _check_tensor(name: str, argument: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        given = f"{type(value).__name__}{advice(type(value))}"
        raise TypeError(f"{name}: argument '{argument}' must be Tensor, not {given}")
    if value.is_nested:
        raise RuntimeError(f"{name}: {argument} is a nested tensor; pass its values, whose rows have one length")


def _check_floating(name: str, argument: str, x: Tensor, other: str, t: Tensor) -> None:
    if not x.is_floating_point():
        swapped = f"; are {argument} and {other} swapped?" if t.is_floating_point() else ""
        # PyTorch's error, which is a RuntimeError too.
        raise NotImplementedError(f"{name}: {argument} must be floating point, got {x.dtype}{swapped}")


def _shape_hint(argument: str, x: Tensor, shape: tuple[int, ...], rows: tuple[int, ...]) -> str:
    """End of the message for integer targets of a wrong shape: what the caller may have meant."""
    before = tuple(x.shape[:-1])
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


def check_index(name: str, argument: str, x: Tensor, index: Tensor, rows: tuple[int, ...]) -> None:
    """Check dtype, shape and device of the targets of rows of this shape; an error names the argument."""
    if index.dtype not in TARGET_DTYPES:
        raise RuntimeError(f"{name}: {argument} must have an integer dtype, got {index.dtype}")
    if tuple(index.shape) != rows:
        hint = _shape_hint(argument, x, tuple(index.shape), rows)
        raise ValueError(f"{name}: {argument} has shape {tuple(index.shape)}, and the rows of input {rows}{hint}")
    if index.device != x.device:
        raise RuntimeError(f"{name}: {argument} is on {index.device}, and input on {x.device}")


def check_weight(name: str, weight: Any, x: Tensor, classes: int, constant: bool = True) -> None:
    """Check type, shape and device of the weights of so many classes, if there are any.

    With `constant`, the weights must not require a gradient: PyTorch computes the gradient with respect to the weights
    only if the targets are class probabilities.
    """
    if weight is None:
        return
    if not isinstance(weight, Tensor):
        raise TypeError(f"{name}: argument 'weight' must be Tensor, not {type(weight).__name__}")
    if weight.dim() != 1 or weight.numel() != classes:
        raise RuntimeError(
            f"{name}: weight must have shape ({classes},), one value per class, got {tuple(weight.shape)}"
        )
    if weight.device != x.device:
        raise RuntimeError(f"{name}: weight is on {weight.device}, and input on {x.device}")
    if constant and weight.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{name}: weight requires a gradient, which is not computed; detach() it")


def check_token_arguments(x: Any, index: Any, dim: Any) -> None:
    """Check the arguments of `token_logprobs`; each error names the argument."""
    name = "token_logprobs()"
    for argument, value in (("logits", x), ("index", index)):
        _check_tensor(name, argument, value)
    _check_floating(name, "logits", x, "index", index)
    if x.dim() == 0:
        raise ValueError(f"{name}: logits need a dimension of tokens, got shape ()")
    axis = checked_dim("token_logprobs", dim, x.dim())
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    # Several tokens of each row lie along the dimension of the logits' tokens.
    tokens = index.shape[axis : axis + 1] if index.dim() == x.dim() else ()
    check_index(name, "index", x, index, (*before, *tokens, *after))
    check_not_dtensor("token_logprobs", "index", index, x)
