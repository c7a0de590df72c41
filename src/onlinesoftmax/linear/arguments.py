"""The checks of the arguments of a head; errors have PyTorch's types and name the argument."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..core import arguments
from ..core.arguments import wrong_weight
from ..core.arrays import check_no_jax, dtype_name
from ..core.options import checked_options, is_number
from ..core.plan_log import Kind, note_plan
from ..core.task import ITEMSIZE
from ..core.wrong_calls import OTHER_MEANS, check_loss
from ..torch.arguments import TORCH, check_constant, check_first_derivative, is_batched
from ..torch.fast_path import is_transformed
from ..torch.formulas import accumulator_of
from ..torch.loss_arguments import signed
from .plans import LinearPlan, plan_of
from .problem import problem_of
from .sharing import Sharing

Tensor = torch.Tensor

NOT_COMPUTED = "is not computed; detach() it"
"""End of the error for an argument without a gradient."""


class Head(NamedTuple):
    """The tensors of a head, as its products take them.

    Attributes:
        input: (tokens, hidden).
        weight: (classes, hidden).
        bias: (classes,), or None.
        target: Class of each token, (tokens,) int64; or a probability of each class, (tokens, classes).
        shape: Shape of the input without its last dimension.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    shape: tuple[int, ...]


def noted(name: str, x: Tensor, weight: Tensor, plan: LinearPlan) -> LinearPlan:
    """The plan of a call of a public function, with a line in the log if it is new."""
    if not torch.compiler.is_compiling():
        kind = Kind.of(name, x)
        note_plan(kind, plan.told(len(x), len(weight), kind.dtype), plan.reason)
    return plan


def checked_head(
    name: str, input: Any, linear_weight: Any, target: Any, linear_bias: Any, soft: bool, part: bool = False
) -> Head:
    """The tensors of a head, in the dtype of autocast where it is active; arguments as for `check_head`."""
    check_tensors(name, input, linear_weight, target, linear_bias)
    probabilities = check_head(name, input, linear_weight, target, linear_bias, soft, part)
    input, linear_weight, linear_bias = _autocast(input, linear_weight, linear_bias)
    for argument, t in (("linear_weight", linear_weight), ("linear_bias", linear_bias)):
        if t is not None and t.dtype != input.dtype:
            raise RuntimeError(f"{name}(): {argument} has the dtype {t.dtype}, and input {input.dtype}")
    # In a narrow dtype, a comparison with the number of classes would be modulo its range.
    flat = target.reshape(-1, len(linear_weight)) if probabilities else signed(target).long().reshape(-1)
    rows = input.reshape(-1, input.shape[-1])
    return Head(rows, linear_weight, linear_bias, flat.contiguous(), tuple(input.shape[:-1]))


def check_head(
    name: str, input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, soft: bool,
    part: bool = False,
) -> bool:  # fmt: skip
    """Check the shapes of the tensors of a head, and return whether the target holds class probabilities.

    Args:
        name: Name of the public function, for errors.
        input, linear_weight, target, linear_bias: Its arguments.
        soft: True where the target may hold class probabilities.
        part: True where other processes have classes, so that this one may have none.
    """
    caller = f"{name}()"
    if is_transformed():
        instead = "call cross_entropy or token_logprobs on the logits of a linear layer"
        raise RuntimeError(f"{caller} has no derivatives for torch.func and forward mode; {instead}")
    if dtype_name(input.dtype) not in ITEMSIZE:
        raise RuntimeError(f"{caller}: input must be floating point of 16 to 64 bits, got {input.dtype}")
    if not input.dim() or linear_weight.dim() != 2 or linear_weight.shape[1] != input.shape[-1]:
        raise RuntimeError(
            f"{caller}: linear_weight must have shape (classes, {input.shape[-1] if input.dim() else 'hidden'}), the "
            f"last dimension being that of input, got {tuple(linear_weight.shape)} for input {tuple(input.shape)}"
            f"{wrong_weight(tuple(input.shape), tuple(linear_weight.shape), tuple(target.shape))}"
        )
    if not linear_weight.shape[1] or not (part or len(linear_weight)):
        raise ValueError(f"{caller}: linear_weight has no elements, its shape is {tuple(linear_weight.shape)}")
    classes, shape = len(linear_weight), input.shape[:-1]
    if linear_bias is not None and linear_bias.shape != (classes,):
        raise RuntimeError(f"{caller}: linear_bias must have shape ({classes},), got {tuple(linear_bias.shape)}")
    probabilities = soft and target.is_floating_point()
    if not probabilities and TORCH.kind_of(target) != "integer":
        raise RuntimeError(f"{caller}: target must have an integer dtype, got {target.dtype}")
    check_constant(caller, "target", target, NOT_COMPUTED)
    wanted = (*shape, classes) if probabilities else shape
    if target.shape != wanted:
        hint = "; class indices are integers: target.long()" if probabilities and target.shape == shape else ""
        raise ValueError(f"{caller}: target has shape {tuple(target.shape)}, and must have {tuple(wanted)}{hint}")
    return probabilities


def check_tensors(
    name: str, input: Any, linear_weight: Any, target: Any, linear_bias: Any, dtensors: bool = False
) -> None:
    """Check that the arguments of a head are tensors on one device, and DTensors only where the caller takes them."""
    given = {"input": input, "linear_weight": linear_weight, "target": target}
    given |= {} if linear_bias is None else {"linear_bias": linear_bias}
    for argument, t in given.items():
        if not isinstance(t, Tensor):
            check_no_jax(name, type(t))
        TORCH.check_array(f"{name}()", argument, t)
        if type(t).__name__ == "DTensor" and not dtensors:
            raise TypeError(f"{name}(): {argument} is a DTensor here; pass its to_local()")
        if t.device != input.device:
            raise RuntimeError(f"{name}(): {argument} is on {t.device}, and input on {input.device}")


def _autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors as torch.nn.functional.linear would take them under autocast."""
    return tuple([t if t is None else t.to(autocast_dtype(t)) for t in tensors])


def autocast_dtype(t: Tensor) -> torch.dtype:
    """The dtype in which torch.nn.functional.linear takes a tensor."""
    casts = is_autocast(t) and t.dtype != torch.float64
    return torch.get_autocast_dtype(t.device.type) if casts else t.dtype


def is_autocast(t: Tensor) -> bool:
    """True where autocast is active for the device of a tensor."""
    # For "meta", which has no autocast, PyTorch raises an error.
    return not t.is_meta and torch.is_autocast_enabled(t.device.type)


def check_gradients(*dys: Tensor | None) -> None:
    """Refuse, in a backward pass, to differentiate the gradient, and to compute gradients for a batch of `dys`."""
    if any(dy is not None for dy in dys):
        check_first_derivative("the gradient of a head without logits")
    if any(map(is_batched, dys)):
        raise RuntimeError("the gradient of a head without logits takes no batch (is_grads_batched, torch.func.vmap)")


def checked_options_of(name: str, scale: Any, softcap: Any, head: Head | None = None) -> Any:
    """The score options, or None; a scale that is a tensor gets the shape (tokens, 1) or ().

    Args:
        name, scale, softcap: The name of the public function, and its arguments.
        head: Its tensors; None where the scale must be a number.
    """
    if not isinstance(scale, Tensor) and not is_number(scale):
        # checked_options takes an array of any library, which the caller compares with the input.
        raise TypeError(f"{name}(): scale must be a number or a tensor, not {type(scale).__name__}")
    if isinstance(scale, Tensor):
        TORCH.check_array(f"{name}()", "scale", scale)
        if head is None:
            raise TypeError(f"{name}(): scale must be a number, not Tensor")
        caller, dtype = f"{name}()", head.input.dtype
        if not scale.is_floating_point():
            raise RuntimeError(f"{caller}: scale must be floating point, got {scale.dtype}")
        if scale.dim() and tuple(scale.shape) != head.shape:
            raise ValueError(f"{caller}: scale has shape {tuple(scale.shape)}, and must have () or {head.shape}")
        if scale.device != head.input.device:
            raise RuntimeError(f"{caller}: scale is on {scale.device}, and input on {head.input.device}")
        check_constant(caller, "scale", scale, "is not computed; without a bias, multiply input by it instead")
        # A copy, because the backward pass reads it too.
        scale = scale.detach().to(accumulator_of(dtype, dtype), copy=True)
        scale = scale.reshape(-1, 1) if scale.dim() else scale
    return checked_options(name, scale, softcap, None, None, False, "nan")


def constant(number: Any) -> Any:
    """The number; in a trace, which may have a symbol in its place, a program is compiled for each number."""
    if not torch.compiler.is_dynamo_compiling():
        return number
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    return guard_scalar(number)


def checked_memory(name: str, memory: Any) -> int | None:
    """The bytes that buffers may take; None for the usual ones."""
    return memory if memory is None else arguments.checked_memory(f"{name}()", constant(memory))


def checked_acc_dtype(name: str, acc_dtype: Any, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the gradient of a weight of this dtype is added up; None is float32 or float64."""
    wide = accumulator_of(dtype, dtype)
    if acc_dtype is None:
        return wide
    if not isinstance(acc_dtype, torch.dtype):
        raise TypeError(f"{name}(): argument 'acc_dtype' must be torch.dtype, not {type(acc_dtype).__name__}")
    if acc_dtype == torch.float16:
        raise ValueError(f"{name}(): acc_dtype=torch.float16 would overflow: its largest number is 65504")
    if acc_dtype not in (dtype, wide):
        raise ValueError(f"{name}(): acc_dtype must be {wide} or the dtype of the weight, {dtype}, got {acc_dtype}")
    return acc_dtype


def check_token_loss(name: str, loss: Any, per_token: int, reduction: Any) -> None:
    """Check the loss of `linear_token_loss`, which is called with so many tensors of `per_token`, and its reduction."""
    if not callable(loss):
        raise TypeError(f"{name}(): argument 'loss' must be a function, not {type(loss).__name__}")
    if not torch.compiler.is_dynamo_compiling():  # which cannot trace the check
        check_loss(f"{name}()", loss, per_token)
    if not isinstance(reduction, str) or reduction not in ("mean", "sum"):
        raise ValueError(f"{name}(): reduction must be 'mean' or 'sum', got {reduction!r}{OTHER_MEANS}")


def checked_per_token(name: str, argument: str, t: Any, head: Head) -> Tensor:
    """A tensor with one number for each token, flat."""
    check_per_token(name, argument, t, head.shape, head.input.device)
    found: Tensor = t.reshape(-1)
    return found


def check_per_token(name: str, argument: str, t: Any, shape: tuple[int, ...], device: torch.device) -> None:
    """Check a tensor with one number for each token of this shape."""
    TORCH.check_array(f"{name}()", argument, t)
    if TORCH.kind_of(t) == "other":
        raise TypeError(f"{name}(): {argument} must hold real numbers, got {t.dtype}")
    if tuple(t.shape) != tuple(shape):
        raise ValueError(f"{name}(): {argument} has shape {tuple(t.shape)}, and must have {tuple(shape)}")
    if t.device != device:
        raise RuntimeError(f"{name}(): {argument} is on {t.device}, and input on {device}")
    check_constant(f"{name}()", argument, t, NOT_COMPUTED)


def wanted_of(head: Head) -> tuple[bool, bool, bool]:
    """True for each gradient that autograd records: of input, weight and bias."""
    records, bias = torch.is_grad_enabled(), head.bias
    of_bias = bias is not None and bias.requires_grad
    return records and head.input.requires_grad, records and head.weight.requires_grad, records and of_bias


def records(head: Head) -> bool:
    """True where autograd records the call."""
    return any(wanted_of(head))


def plan_for(
    name: str, head: Head, memory: int | None, each: bool = False, whole_rows: bool = False,
    sharing: Sharing | None = None, in_place: bool = False, in_two: bool = False,
) -> LinearPlan:  # fmt: skip
    """The plan of a call; arguments as for `problem_of`, and `in_two` as in LinearProblem."""
    x, weight = head.input, head.weight
    classes = len(weight) if sharing is None else sharing.largest
    sizes, dtype = (len(x), x.shape[1], classes), dtype_name(x.dtype)
    problem = problem_of(name, sizes, dtype, wanted_of(head), each, whole_rows, in_place, sharing is not None)
    return plan_of(problem._replace(in_two=in_two), memory)
