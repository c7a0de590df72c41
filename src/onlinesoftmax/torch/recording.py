"""The description of a call that autograd records: its tensors by name, what is saved, and which gradients are wanted.

Autograd finds tensors only among the arguments of a function.  So a recording has a call without tensors, and each
tensor is an argument of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from ..core.call import Call
from ..core.options import PLAIN
from ..ops import OPERATIONS
from .formulas import accumulator_of
from .loss_arguments import Loss

Tensor = torch.Tensor

Tensors = Mapping[str, Tensor]
"""Tensors by name: operands and outputs of an operation."""


OPTION_TENSORS = ("scale", "bias", "mask")
"""Names of the score options that may be tensors."""


def split_tensors(call: Call) -> tuple[Call, dict[str, Tensor]]:
    """The call without its tensors, and its tensors by name, the input first."""
    options, tensors, numbers, defaults = call.options, {"x": call.x}, {}, {}
    if options is not None:
        for name in OPTION_TENSORS:
            if isinstance(getattr(options, name), Tensor):
                tensors[name], defaults[name] = getattr(options, name), getattr(PLAIN, name)
        options = options._replace(**defaults) if defaults else options
    for name, value in call.beside.items():
        if isinstance(value, Tensor):
            tensors[name] = value
        else:
            numbers[name] = value
    return call._replace(x=None, options=options, beside=numbers), tensors


def with_tensors(bare: Call, tensors: Mapping[str, Tensor | None]) -> Call:
    """The call that `split_tensors` was given; tensors that are None, and outputs, are left out."""
    options, operation = bare.options, bare.operation
    given = {name: t for name, t in tensors.items() if t is not None}
    of_options: dict[str, Any] = {name: given[name] for name in OPTION_TENSORS if name in given}
    if of_options:
        options = (options or PLAIN)._replace(**of_options)
    if options is not None and options.is_plain():
        options = None
    others = ["x", *OPTION_TENSORS, *[output.name for output in operation.outputs]]
    beside = {**bare.beside, **{name: t for name, t in given.items() if name not in others}}
    return bare._replace(x=given.get("x"), options=options, beside=beside)


def outputs_to_keep(call: Call, results: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the outputs of a call with a gradient, in the order of the declaration: results, and what is saved.

    A statistic that has a gradient of its own is read only if it is a result.  In the dtype of lse, the result of
    logsumexp is lse, which is not written twice.
    """
    operation, dtype = call.operation, call.settings.dtype or call.x.dtype
    unread = unread_statistics(call, [f"d{name}" for name in results])
    if operation.result.dtype == "result" and dtype == accumulator_of(call.x.dtype, dtype):
        unread.append("lse")
    kept = {*results, *[name for name in operation.saved if name not in unread]}
    return tuple([output.name for output in operation.outputs if output.name in kept])


def unread_statistics(call: Call, dys: Collection[str]) -> list[str]:
    """Names of the statistics that the gradient of a call reads only with gradients that are not among `dys`."""
    operands = [operand.name for operand in OPERATIONS[call.operation.gradient_name].operands]
    return [name for name in operands if f"d{name}" in operands and f"d{name}" not in dys]


def saved_names(call: Call, tensors: Tensors, outputs: tuple[str, ...], wants_scale: bool) -> tuple[str, ...]:
    """Names of the tensors and outputs that the gradient of a call reads."""
    gradient, known = OPERATIONS[call.operation.gradient_name], {*tensors, *outputs}
    operands = {operand.name for operand in gradient.operands[1:]}
    names = [name for name in call.operation.saved if name in known]
    if "lse" in call.operation.saved and "lse" not in known:
        names.append(call.operation.result.name)
    names += [name for name in tensors if (name in operands or name in gradient.options) and name not in names]
    reads_x = "x" in call.operation.saved or call.scores().softcap is not None or wants_scale
    if reads_x and "x" not in names:
        names.append("x")
    return tuple(names)


class GradientTypes(NamedTuple):
    """The dtypes and shapes of gradients that a call's own tensors do not tell.

    Attributes:
        dtype: Dtype of the input.
        bias_like: Shape and dtype of the bias; None without one.
    """

    dtype: torch.dtype
    bias_like: tuple[torch.Size, torch.dtype] | None = None

    @classmethod
    def of(cls, tensors: Tensors) -> GradientTypes:
        """The types for a call with these tensors."""
        bias = tensors.get("bias")
        return cls(tensors["x"].dtype, None if bias is None else (bias.shape, bias.dtype))


class Recording(NamedTuple):
    """The description of a call that autograd records; all repetitions of a prepared call share one.

    Attributes:
        call: The call without its tensors (`split_tensors`).
        names: Names of its tensors, in the order in which `Recorded.apply` takes them.
        outputs: Names of the outputs that forward makes.
        results: Names of the outputs that the caller gets.
        dys: The name that the gradient operation has for the gradient of each result; empty where there is none.
        saved: Names of the tensors and outputs that are saved for backward.
        saved_of, constant_of: Functions of the tuple (*tensors, *outputs) that give the tuple of the saved ones, and
            that of the results that have no gradient.
        results_of: The function of the same tuple that gives the results: a tensor, or a tuple of several.
        types: Dtype of the input, and shape and dtype of the bias, for their gradients.
        stores_gradient: True if forward writes the gradient of the scalar as its second output, which backward
            multiplies by the incoming gradient.
        forward: Function (recording, call) that computes the outputs; None for the kernel of the operation.
        gradient: Function (call, saved, dys) that computes the gradient with respect to the input; None for the kernel
            of the gradient.
        by_pytorch: Function (recording, call) that computes the results by PyTorch's operations, by the names in `dys`.
            Autograd differentiates them if the gradient is itself to be differentiated.  With None, the formulas of
            torch/formulas.py serve instead; if `stores_gradient` is True, None makes such a derivative an error.
        loss: Arguments of a cross-entropy that its call lacks.
        run: Function of the tensors that launches the prepared kernels; None for a call that is not prepared.
    """

    call: Call
    names: tuple[str, ...]
    outputs: tuple[str, ...]
    results: tuple[str, ...]
    dys: tuple[str, ...]
    saved: tuple[str, ...]
    saved_of: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
    results_of: Callable[[tuple[Tensor, ...]], Any]
    constant_of: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] | None
    types: GradientTypes
    stores_gradient: bool = False
    forward: Callable[..., tuple[Tensor, ...]] | None = None
    gradient: Callable[..., Tensor] | None = None
    by_pytorch: Callable[..., dict[str, Tensor]] | None = None
    loss: Loss | None = None
    run: Callable[..., Any] | None = None


def recording_of(
    call: Call, outputs: tuple[str, ...], results: tuple[str, ...], wants_scale: bool = False, **how: Any
) -> Recording:
    """The recording with which `Recorded.apply` records a call; arguments as for `record`.

    `wants_scale` is True where a gradient with respect to the scale is wanted.
    """
    bare, tensors = split_tensors(call)
    scale = tensors.get("scale")
    saved = saved_names(call, tensors, outputs, wants_scale or (scale is not None and scale.requires_grad))
    loss = how.get("loss")
    if loss is not None and loss.inplace and "y" in outputs:
        # The gradient may have overwritten the logits.
        saved = tuple([name for name in saved if name != "x"])
    operation, names = call.operation, [*tensors, *outputs]
    operands = [operand.name for operand in OPERATIONS[operation.gradient_name].operands]
    main = (operation.result.name, *operation.call_outputs)
    dys = tuple(["dy" if name in main else f"d{name}" if f"d{name}" in operands else "" for name in results])
    constant = [name for name, dy in zip(results, dys, strict=True) if not dy]
    return Recording(
        bare, tuple(tensors), outputs, results, dys, saved, _tuple_of(names, saved),
        itemgetter(*map(names.index, results)), _tuple_of(names, constant) if constant else None,
        GradientTypes.of(tensors), "y" in outputs and "y" not in results, **how,
    )  # fmt: skip


def _tuple_of(names: list[str], some: Sequence[str]) -> Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """The function of a tuple of tensors with these names that gives a tuple of some; faster than a comprehension."""
    places = [names.index(name) for name in some]
    # With one index, an itemgetter would give the tensor itself.
    return itemgetter(*places) if len(places) > 1 else itemgetter(slice(sum(places), sum(places) + len(places)))


def save(ctx: Any, recording: Recording, everything: tuple[Tensor, ...], *more: Tensor) -> None:
    """Save for backward what a recording names among `everything`: (*tensors, *outputs); then further tensors."""
    ctx.recording = recording
    ctx.save_for_backward(*recording.saved_of(everything), *more)
    if recording.constant_of is not None:
        ctx.mark_non_differentiable(*recording.constant_of(everything))
