"""Calls that autograd records: the forward pass, the gradient, derivatives of the gradient, and torch.func.

    most calls    forward saves the tensors that the declaration names; backward launches the gradient operation
    reduced loss  forward also writes the gradient of the scalar; backward multiplies it by the incoming gradient

PyTorch's operations compute derivatives of a gradient, and batches of gradients.  Autograd finds tensors only among the
arguments of `Recorded.apply`.  So the first argument is a Recording, whose call has no tensors, and each tensor follows
as an argument of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from ..core.call import Call
from ..ops import OPERATIONS
from .check import is_batched
from .fast_path import PREPARED_CALLS, keep, key_of
from .gradients import (
    Tensors,
    Wanted,
    gradient_call,
    gradients,
    is_traced,
    lse_of,
    outputs_of,
    outputs_to_keep,
    saved_names,
    split_tensors,
    with_tensors,
)
from .loss import Loss
from .prepare import operands_of, prepare
from .reductions import scale_gradient

Tensor = torch.Tensor


def launch(call: Call, outputs: tuple[str, ...]) -> tuple[Tensor, ...]:
    """The outputs of a checked call by our kernels, in a tuple.  In a trace, a custom operator replaces the launch."""
    if is_traced(call.x):
        from . import custom_op

        return custom_op.outputs(call, outputs)
    return outputs_of(call, outputs)


def by_kernels(recording: Recording, call: Call) -> tuple[Tensor, ...]:
    """The outputs of a recorded call, by the kernel of its operation."""
    found = launch(call, tuple(name for name in recording.outputs if name != "lse" or not recording.makes_lse))
    return (*found, lse_of(found[0], call.settings)) if recording.makes_lse else found


def gradients_by_kernels(call: Call, saved: Tensors, dys: Tensors, wanted: Wanted) -> dict[str, Tensor]:
    """The gradients of a recorded call, by the kernel of its gradient operation."""
    return gradients(call, saved, dys, wanted, launch)


class Places(NamedTuple):
    """Positions of three groups of tensors in the tuple (*tensors, *outputs) of a recorded call.

    Attributes:
        saved: Indices of the tensors and outputs that backward reads.
        results: Indices of the outputs that the caller gets.
        constant: Indices of the results that have no gradient.
    """

    saved: tuple[int, ...]
    results: tuple[int, ...]
    constant: tuple[int, ...]


class Recording(NamedTuple):
    """The description of a call that autograd records; all repetitions of a prepared call share one.

    Attributes:
        call: The call without its tensors (`split_tensors`).
        names: Names of its tensors, in the order in which `Recorded.apply` takes them.
        outputs: Names of the outputs that forward makes.
        results: Names of the outputs that the caller gets.
        dys: The name that the gradient operation has for the gradient of each result; empty where there is none.
        saved: Names of the tensors and outputs that are saved for backward.
        places: Indices of these in the tuple (*tensors, *outputs).
        wanted: Dtype of the input, and shape and dtype of the bias, for their gradients.  Backward replaces `names` by
            the names of the tensors that need a gradient.
        stores_gradient: True if forward writes the gradient of the scalar as its second output, which backward
            multiplies by the incoming gradient.
        makes_lse: True if "lse" is made from the result by dropping a kept dimension, and the kernel does not write it.
        forward: Function (recording, call) that computes the outputs.
        gradient: Function (call, saved, dys, wanted) that computes the gradients by kernels.
        by_pytorch: Function (recording, call) that computes the results by PyTorch's operations, by the names in `dys`.
            Autograd differentiates them if the gradient is itself to be differentiated.  With None, the formulas of
            torch/ops.py serve instead; if `stores_gradient` is True, None makes such a derivative an error.
        loss: Arguments of a cross-entropy that its call lacks.
        run: Function of the tensors that launches the prepared kernels; None for a call that is not prepared.
    """

    call: Call
    names: tuple[str, ...]
    outputs: tuple[str, ...]
    results: tuple[str, ...]
    dys: tuple[str, ...]
    saved: tuple[str, ...]
    places: Places
    wanted: Wanted
    stores_gradient: bool = False
    makes_lse: bool = False
    forward: Callable[..., tuple[Tensor, ...]] = by_kernels
    gradient: Callable[..., dict[str, Tensor]] = gradients_by_kernels
    by_pytorch: Callable[..., dict[str, Tensor]] | None = None
    loss: Loss | None = None
    run: Callable[..., Any] | None = None


def record(call: Call, outputs: tuple[str, ...], results: tuple[str, ...], **how: Any) -> tuple[Tensor, ...]:
    """The results of a call, recorded by autograd.

    Args:
        call: The call.
        outputs: Names of the outputs that forward makes.
        results: Names of the outputs to return.
        how: Fields of Recording that are not at their defaults.
    """
    recording, tensors = recording_of(call, outputs, results, **how)
    found = Recorded.apply(recording, *tensors)
    return found if isinstance(found, tuple) else (found,)


def recording_of(
    call: Call, outputs: tuple[str, ...], results: tuple[str, ...], **how: Any
) -> tuple[Recording, tuple[Tensor, ...]]:
    """(recording, tensors) with which `Recorded.apply` records a call.  Arguments as for `record`."""
    bare, tensors = split_tensors(call)
    scale = tensors.get("scale")
    saved = saved_names(call, tensors, outputs, scale is not None and scale.requires_grad)
    loss = how.get("loss")
    if loss is not None and loss.inplace and "y" in outputs:
        # The gradient may have overwritten the logits.
        saved = tuple([name for name in saved if name != "x"])
    operation = call.operation
    operands = [operand.name for operand in OPERATIONS[operation.gradient_name].operands]
    main = (operation.result.name, *operation.call_outputs)
    dys = tuple(["dy" if name in main else f"d{name}" if f"d{name}" in operands else "" for name in results])
    names = [*tensors, *outputs]
    constant = [results[i] for i, name in enumerate(dys) if not name]
    places = Places(*[tuple([names.index(name) for name in some]) for some in (saved, results, constant)])
    recording = Recording(
        bare, tuple(tensors), outputs, results, dys, saved, places, Wanted.of(tensors),
        "y" in outputs and "y" not in results, **how,
    )  # fmt: skip
    return recording, tuple(tensors.values())


def apply(call: Call) -> Tensor:
    """The result by our kernels, with derivatives with respect to input, bias and a scale that is a tensor."""
    operation = call.operation
    return record(call, operation.kept_outputs, (operation.result.name,), makes_lse=_makes_lse(call))[0]


def _makes_lse(call: Call) -> bool:
    return len(outputs_to_keep(call)) < len(call.operation.kept_outputs)


def prepared_call(call: Call) -> Callable[..., Any]:
    """The function (x, out) of cacheable, checked calls like this one without other tensors."""
    if not (call.x.requires_grad and torch.is_grad_enabled()):
        operands = operands_of(call)
        run = prepare(call, operands)
        return (lambda x, out: run(x, out, operands)) if operands else run
    operation, settings, run = call.operation, call.settings, prepared_launch(call, outputs_to_keep(call))
    with_lse = run
    if makes_lse := _makes_lse(call):

        def with_lse(x: Tensor) -> tuple[Tensor, Tensor]:
            y = run(x)
            return y, lse_of(y, settings)

    how = {"run": with_lse if makes_lse else run, "makes_lse": makes_lse}
    recorded = prepared_recording(call, operation.kept_outputs, (operation.result.name,), **how)
    return lambda x, _: recorded(x)


def prepared_launch(call: Call, outputs: tuple[str, ...], follows_divisor: bool = False) -> Callable[..., Any]:
    """The function of the tensors of calls like this one that launches a kernel, and returns its outputs.

    The plan is made from views that broadcast to the input (`operands_of`).  A prepared launch reads only addresses.  A
    view has the address of its tensor, so later calls pass their tensors without making views.
    """
    operands = operands_of(call)
    run = prepare(call, operands, outputs, follows_divisor)
    if not operands:
        return run
    numbers = {name: value for name, value in operands.items() if isinstance(value, int)}
    _, *names = split_tensors(call)[1]
    # The operands of most calls are the target, and the incoming gradient.
    if len(names) == 1:
        return lambda x, t, name=names[0]: run(x, None, {**numbers, name: t})
    if len(names) == 2:
        return lambda x, t, u, name=names[0], other=names[1]: run(x, None, {**numbers, name: t, other: u})
    return lambda x, *tensors: run(x, None, {**numbers, **{name: tensors[i] for i, name in enumerate(names)}})


def prepared_recording(
    call: Call, outputs: tuple[str, ...], results: tuple[str, ...], **how: Any
) -> Callable[..., Any]:
    """The function of the tensors of cacheable calls like this one, which autograd records.  Arguments as for `record`.

    With `run` among the arguments, that function launches the kernels; else the kernel of the operation is prepared.
    """
    recording, _ = recording_of(call, outputs, results, **how)
    recording = recording._replace(run=recording.run or prepared_launch(call, outputs))
    return partial(_apply, recording)


keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""True in a backward pass after which another may follow: with `retain_graph` or `create_graph`."""


class Recorded(torch.autograd.Function):
    """The results of a call, recorded by autograd."""

    @staticmethod
    def forward(ctx: Any, recording: Recording, *tensors: Any) -> Any:
        if recording.run is None:
            named = dict(zip(recording.names, tensors, strict=True))
            found = recording.forward(recording, with_tensors(recording.call, named))
        else:
            found = recording.run(*tensors)
        everything = (*tensors, *found) if isinstance(found, tuple) else (*tensors, found)
        ctx.recording = recording
        if recording.stores_gradient:
            ctx.gradient = everything[len(tensors) + 1]
        ctx.save_for_backward(*[everything[place] for place in recording.places.saved])
        ctx.set_materialize_grads(False)
        if len(recording.results) == 1:
            return everything[recording.places.results[0]]
        results = tuple([everything[place] for place in recording.places.results])
        if recording.places.constant:
            ctx.mark_non_differentiable(*[everything[place] for place in recording.places.constant])
        return results

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> Any:
        recording: Recording = ctx.recording
        nothing = (None,) * (len(recording.names) - 1)
        if recording.stores_gradient:
            # The other results, statistics, have no gradient.
            return None, None if dys[0] is None else _gradient_of_scalar(ctx, dys[0]), *nothing
        # `zip` with an argument `strict` takes the host a microsecond.
        given = {recording.dys[i]: dy for i, dy in enumerate(dys) if dy is not None and recording.dys[i]}
        if not given:
            return None, None, *nothing
        # A kernel's gradient has no derivative, and a kernel cannot read a batch.  PyTorch's operations can do both.
        needs_pytorch = torch.is_grad_enabled() or any(map(is_batched, given.values()))
        if recording.run is not None and not needs_pytorch:
            return None, _prepared_gradient(recording, ctx.saved_tensors, given), *nothing
        saved = dict(zip(recording.saved, ctx.saved_tensors, strict=True))
        call = with_tensors(recording.call, saved)
        if needs_pytorch and recording.by_pytorch is not None:
            return None, _gradient_by_pytorch(recording, call, given), *nothing
        needs = zip(recording.names, ctx.needs_input_grad[1:], strict=True)
        wanted = recording.wanted._replace(names=tuple([name for name, needed in needs if needed]))
        of_call = call, saved, given, wanted
        found = gradients(*of_call, None) if needs_pytorch else recording.gradient(*of_call)
        return None, *[found.get(name) for name in recording.names]


# `apply` of the base class in C++, without the check for transforms in torch.autograd.Function.
_apply = super(torch.autograd.Function, Recorded).apply


def _prepared_gradient(recording: Recording, saved: tuple[Tensor, ...], dys: Tensors) -> Tensor:
    """The gradient of a prepared call with respect to its input, by a launch that is prepared too."""
    tensors = (*saved, *dys.values())
    key = key_of((recording.run, *dys), tensors[0], tensors[1:])
    run = PREPARED_CALLS.get(key)
    if run is None:
        named = dict(zip(recording.saved, saved, strict=True))
        call = gradient_call(with_tensors(recording.call, named), named, dys, recording.wanted.dtype)
        run = keep(PREPARED_CALLS, key, _gradient_launch(call, (*recording.saved, *dys)))
    dx: Tensor = run(tensors)
    return dx


def _gradient_launch(call: Call, names: tuple[str, ...]) -> Callable[[tuple[Tensor, ...]], Tensor]:
    """The function of tensors of these names that launches the gradient of calls like this one."""
    operands = operands_of(call)
    run = prepare(call, operands)
    numbers = {name: value for name, value in operands.items() if not isinstance(value, Tensor)}
    # A kernel calls the saved input "logits" if its own input is the saved output.
    saved_as = {"logits": "x"}
    place_of_input = names.index("x" if call.operation.scores else "y")
    # If the main result has no incoming gradient, dy is a tensor of zeros.
    zeros = "dy" in operands and "dy" not in names
    needed = [name for name in operands if name not in numbers and (name != "dy" or not zeros)]
    places = [(name, names.index(saved_as.get(name, name))) for name in needed]
    place_like_dy = names.index("m") if zeros else 0

    def gradient(tensors: tuple[Tensor, ...]) -> Tensor:
        given = {name: tensors[place] for name, place in places}
        if zeros:
            given["dy"] = torch.zeros_like(tensors[place_like_dy])
        dx: Tensor = run(tensors[place_of_input], None, {**given, **numbers} if numbers else given)
        return dx

    return gradient


def _gradient_of_scalar(ctx: Any, dy: Tensor) -> Tensor:
    """The gradient of a loss that is reduced to a scalar, from the gradient that forward has written.

    Only derivatives of this gradient unpack the saved tensors, so the logits may change after forward if no such
    derivative is asked for.
    """
    traced, gradient = torch.compiler.is_compiling(), ctx.gradient
    if gradient is not None and (traced or not torch.is_grad_enabled()):
        if not traced and keeps_graph():
            return scale_gradient(gradient.clone(), dy)
        ctx.gradient = None
        return scale_gradient(gradient, dy)
    recording: Recording = ctx.recording
    # Raises PyTorch's error where an earlier backward pass has freed the graph.
    saved = dict(zip(recording.saved, ctx.saved_tensors, strict=True))
    if recording.by_pytorch is None:
        raise RuntimeError("the gradient of numbers of sharded rows cannot be differentiated again (create_graph=True)")
    if "x" not in saved:
        raise RuntimeError(
            "cross_entropy(): the gradient cannot be differentiated again (create_graph=True), because "
            "inplace_backward=True has overwritten input"
        )
    return _gradient_by_pytorch(recording, with_tensors(recording.call, saved), {"dy": dy})


def _gradient_by_pytorch(recording: Recording, call: Call, dys: Tensors) -> Tensor:
    """The gradient with respect to the logits by PyTorch's operations, which have derivatives."""
    assert recording.by_pytorch is not None
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # The view has no hooks: those of x run once, after this function.
        x = call.x.view_as(call.x)
        results = recording.by_pytorch(recording, call._replace(x=x))
    ys, gradients = [results[name] for name in dys], [dy.to(results[name].dtype) for name, dy in dys.items()]
    (dx,) = torch.autograd.grad(ys, x, gradients, create_graph=create_graph)
    found: Tensor = dx
    return found
