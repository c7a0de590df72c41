"""The checks of the arguments of cross_entropy and token_logprobs on torch tensors.

The rules for all libraries stand in the rooms of the operations; here is what only tensors have.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..core import arguments
from ..core.call import Call
from ..core.options import ScoreOptions
from ..ops import OPERATIONS
from ..ops.cross_entropy import arguments as rules
from ..ops.token_logprobs.arguments import checked_axis
from .check import TORCH, check_options
from .loss import Loss, counted, equals, is_class, signed

Tensor = torch.Tensor

check_index = partial(arguments.check_index, TORCH)
checked_number = partial(arguments.checked_number, TORCH)
check_token_arguments = partial(checked_axis, TORCH)


def checked_loss(x: Any, target: Any, weight: Any, loss: Loss) -> Loss:
    """The result of `checked_numbers` for arguments that are right."""
    rules.check_arrays(TORCH, x, target, weight)
    name, loss = "cross_entropy()", checked_numbers(loss)
    if not target.is_floating_point():
        _check_constant(name, "weight", weight, "is not computed; detach() it")
    check_dtype(name, loss.settings.dtype)
    if loss.options is not None:
        settings = loss.settings._replace(dim=rules.class_dim(x))
        check_options(Call(OPERATIONS["cross_entropy"], x, settings, loss.options))
        check_scale_is_constant(name, loss.options)
    return loss


def check_weight(name: str, weight: Any, x: Tensor, classes: int) -> None:
    """Check the weights of so many classes, if there are any, where targets are classes.

    PyTorch computes the gradient with respect to the weights only if the targets are class probabilities.
    """
    rules.check_weight(TORCH, name, weight, x, classes)
    _check_constant(name, "weight", weight, "is not computed; detach() it")


def check_scale_is_constant(name: str, options: ScoreOptions | None) -> None:
    """Check that a scale that is a tensor requires no gradient, which losses do not compute."""
    scale = options and options.scale
    _check_constant(name, "scale", scale, "this function does not compute; multiply the logits by it instead")


def _check_constant(name: str, argument: str, value: Any, why: str) -> None:
    if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
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


def check_targets(x: Any, target: Any, weight: Any, fields: tuple[Any, ...]) -> None:
    """Check the arguments, and the range of every target that counts, which waits for the GPU.

    Raises:
        IndexError: a target is out of range; the message has its position and its value.
    """
    loss = checked_loss(x, target, weight, Loss(*fields))
    if not target.is_floating_point():
        target, classes = signed(target), x.shape[rules.class_dim(x)]
        wrong = ~is_class(target, classes) & counted(target, loss)
        arguments.check_range("cross_entropy(): target", target, classes, wrong)


def check_tokens(x: Any, index: Any, dim: Any, ignore_index: Any = None) -> None:
    """Check the arguments, and the range of every index, which waits for the GPU.

    Raises:
        IndexError: an index is out of range; the message has its position and its value.
    """
    tokens = x.shape[check_token_arguments(x, index, dim)]
    index = signed(index)
    wrong = ~is_class(index, tokens)
    if ignore_index is not None:
        wrong &= ~equals(index, checked_number("token_logprobs", "ignore_index", ignore_index, int))
    arguments.check_range("token_logprobs(): index", index, tokens, wrong)
