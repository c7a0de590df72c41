"""Calls that autograd records: the forward pass, the gradient, derivatives of the gradient, and torch.func.

    most calls    forward saves the tensors that the declaration names; backward launches the gradient operation
    reduced loss  forward also writes the gradient of the scalar; backward multiplies it by the incoming gradient

PyTorch's operations compute derivatives of a gradient, and batches of gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..core.call import Call
from . import formulas
from .arguments import is_lazy
from .fast_path import PREPARED_CALLS, find, is_grad_enabled, is_transformed, keep
from .formulas import accumulator_of
from .gradients import (
    gradient_by_pytorch,
    gradient_call,
    gradients,
    is_traced,
    outputs_of,
    saved_of,
    slope_of,
    unmasked,
    with_states,
)
from .prepare import operands_of, prepare
from .recording import Recording, Tensors, outputs_to_keep, recording_of, save, split_tensors, with_tensors
from .small_kernels import scale_gradient

Tensor = torch.Tensor


def launch(call: Call, outputs: tuple[str, ...]) -> tuple[Tensor, ...]:
    """The outputs of a checked call by our kernels, in a tuple.  In a trace, a custom operator replaces the launch."""
    if is_traced(call.x):
        from . import custom_op

        return custom_op.outputs(call, outputs)
    return outputs_of(call, outputs)


def is_recorded(call: Call) -> bool:
    """True where autograd records a call that has a gradient with respect to its input alone."""
    # An exported program has the operator, whose gradient custom_op.py registers.
    return torch.is_grad_enabled() and call.x.requires_grad and not torch.compiler.is_exporting()


def results_of(call: Call, results: tuple[str, ...], **how: Any) -> tuple[Tensor, ...]:
    """The results of a checked call by our kernels, recorded by autograd where the input requires a gradient.

    Arguments as for `record`, which gets the outputs of the declaration.
    """
    return record(call, outputs_to_keep(call, results), results, **how) if is_recorded(call) else launch(call, results)


def prepared_results(call: Call, results: tuple[str, ...], **how: Any) -> Callable[..., Any]:
    """The function of the tensors of cacheable, checked calls like this one that does what `results_of` does."""
    if is_recorded(call):
        return prepared_recording(call, outputs_to_keep(call, results), results, **how)
    return prepared_launch(call, results)


def record(call: Call, outputs: tuple[str, ...], results: tuple[str, ...], **how: Any) -> tuple[Tensor, ...]:
    """The results of a call, recorded by autograd.

    Args:
        call: The call.
        outputs: Names of the outputs that forward makes.
        results: Names of the outputs to return.
        how: Fields of Recording that are not at their defaults.
    """
    found = Recorded.apply(recording_of(call, outputs, results, **how), *split_tensors(call)[1].values())
    return found if isinstance(found, tuple) else (found,)


def apply(call: Call) -> Tensor:
    """The result by our kernels, with derivatives with respect to input, bias and a scale that is a tensor."""
    if is_transformed():
        y: Tensor = Transformed.apply(recording_of(call, RESULT, RESULT), *split_tensors(call)[1].values())
        return y
    results = (call.operation.result.name,)
    return record(call, outputs_to_keep(call, results), results)[0]


def prepared_call(call: Call) -> Callable[..., Any]:
    """The function (x, out) of cacheable, checked calls like this one without other tensors."""
    if call.x.requires_grad and torch.is_grad_enabled():
        recorded = prepared_results(call, (call.operation.result.name,))
        return lambda x, _: recorded(x)
    operands = operands_of(call)
    run = prepare(call, operands)
    return (lambda x, out: run(x, out, operands)) if operands else run


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
    call: Call, outputs: tuple[str, ...], results: tuple[str, ...], run: Callable[..., Any] | None = None, **how: Any
) -> Callable[..., Any]:
    """The function of the tensors of cacheable calls like this one, which autograd records.  Arguments as for `record`.

    The function `run` launches the kernels; with None, the kernel of the operation is prepared.
    """
    run = run or prepared_launch(call, outputs)
    return partial(_apply, recording_of(call, outputs, results, run=run, **how))


keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""True in a backward pass after which another may follow: with `retain_graph` or `create_graph`."""


_top_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks


def has_saved_tensor_hooks() -> bool:
    """True inside a checkpoint, save_on_cpu and other hooks, which are given the tensors that wait for backward."""
    return _top_hooks(False) is not None


class Recorded(torch.autograd.Function):
    """The results of a call, recorded by autograd."""

    @staticmethod
    def forward(ctx: Any, recording: Recording, *tensors: Any) -> Any:
        if recording.run is None:
            call = with_tensors(recording.call, dict(zip(recording.names, tensors, strict=True)))
            found = recording.forward(recording, call) if recording.forward else launch(call, recording.outputs)
        else:
            found = recording.run(*tensors)
        everything = (*tensors, *found) if isinstance(found, tuple) else (*tensors, found)
        if recording.stores_gradient:
            _save_with_gradient(ctx, recording, everything)
        else:
            save(ctx, recording, everything)
        ctx.set_materialize_grads(False)
        return recording.results_of(everything)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> Any:
        recording: Recording = ctx.recording
        run, nothing = recording.run, (None,) * (len(recording.names) - 1)
        if recording.stores_gradient:
            # The other results, statistics, have no gradient.
            return None, None if dys[0] is None else _gradient_of_scalar(ctx, dys[0]), *nothing
        if run is not None and not is_grad_enabled():
            tensors = (*ctx.saved_tensors, *dys)
            key, gradient = find((run,), tensors)
            if key and gradient is None:
                gradient = keep(PREPARED_CALLS, key, _prepared_gradient(recording, tensors))
            if gradient is not None:
                return None, gradient(tensors), *nothing
        given = {name: dy for name, dy in zip(recording.dys, dys, strict=True) if dy is not None and name}
        if not given:
            return None, None, *nothing
        # A kernel's gradient has no derivative, and a kernel cannot read a lazy tensor.  PyTorch's operations can.
        needs_pytorch = torch.is_grad_enabled() or any(map(is_lazy, given.values()))
        saved = dict(zip(recording.saved, ctx.saved_tensors, strict=True))
        call = with_tensors(recording.call, saved)
        if needs_pytorch and recording.by_pytorch is not None:
            return None, _gradient_by_pytorch(recording, call, given), *nothing
        needs = zip(recording.names, ctx.needs_input_grad[1:], strict=True)
        if recording.gradient and not needs_pytorch:
            return None, recording.gradient(call, saved, given), *nothing
        wanted = tuple([name for name, needed in needs if needed])
        found = gradients(wanted, call, saved, given, recording.types, None if needs_pytorch else launch)
        return None, *[found.get(name) for name in recording.names]


# `apply` of the base class in C++, without the check for transforms in torch.autograd.Function.
_apply = super(torch.autograd.Function, Recorded).apply


def _prepared_gradient(recording: Recording, tensors: tuple[Any, ...]) -> Callable[[tuple[Tensor, ...]], Tensor | None]:
    """The function of (*saved tensors, *incoming gradients) that launches the gradient of calls like this one."""
    names = (*recording.saved, *recording.dys)
    named = {name: t for name, t in zip(names, tensors, strict=True) if t is not None and name}
    saved = {name: named[name] for name in recording.saved}
    dys = {name: named[name] for name in recording.dys if name in named}
    if not dys:
        return lambda _: None
    call = with_tensors(recording.call, saved)
    call = gradient_call(call, with_states(call, saved, dys, launch), dys, recording.types.dtype)
    operands = operands_of(call)
    run = prepare(call, operands)
    numbers = {name: value for name, value in operands.items() if not isinstance(value, Tensor)}
    # A kernel calls the saved input "logits" if its own input is the saved output.  The result of logsumexp is lse.
    saved_as = {"logits": "x"} if "lse" in named else {"logits": "x", "lse": "y"}
    place_of_input = names.index("x" if call.operation.scores else "y")
    # If the main result has no incoming gradient, dy is a tensor of zeros.
    zeros = "dy" in operands and "dy" not in named
    needed = [name for name in operands if name not in numbers and (name != "dy" or not zeros)]
    places = [(name, names.index(saved_as.get(name, name))) for name in needed]
    place_like_dy = names.index("m") if zeros else 0

    def gradient(tensors: tuple[Tensor, ...]) -> Tensor:
        given: dict[str, Any] = {**numbers}
        for name, place in places:
            given[name] = tensors[place]
        if zeros:
            given["dy"] = torch.zeros_like(tensors[place_like_dy])
        dx: Tensor = run(tensors[place_of_input], None, given)
        return dx

    return gradient


def _save_with_gradient(ctx: Any, recording: Recording, everything: tuple[Tensor, ...]) -> None:
    """Save for backward as `save` does, with the gradient that forward has written.

    The gradient is no saved tensor, because only derivatives of it may unpack the saved tensors: otherwise the logits
    could not change after forward.  Hooks are given it as a saved tensor, and PyTorch notices no change where they are.
    """
    gradient = everything[len(recording.names) + 1]
    # No prepared call is traced, and a trace cannot look for hooks.
    if (recording.run is not None or not torch.compiler.is_compiling()) and has_saved_tensor_hooks():
        ctx.gradient = None
        save(ctx, recording, everything, gradient)
    else:
        ctx.gradient = gradient
        save(ctx, recording, everything)


def _gradient_of_scalar(ctx: Any, dy: Tensor) -> Tensor:
    """The gradient of a loss that is reduced to a scalar, from the gradient that forward has written."""
    recording: Recording = ctx.recording
    traced, gradient = recording.run is None and torch.compiler.is_compiling(), ctx.gradient
    first = traced or not is_grad_enabled()
    if first and gradient is not None:
        keeps = not traced and keeps_graph()
        if not keeps:
            ctx.gradient = None
        return scale_gradient(gradient, dy, in_place=not keeps)
    # Raises PyTorch's error where an earlier backward pass has freed the graph.
    tensors = ctx.saved_tensors
    saved = dict(zip(recording.saved, tensors, strict=False))
    if first and len(tensors) > len(saved):
        return scale_gradient(tensors[-1], dy, in_place=not keeps_graph())
    if recording.by_pytorch is None:
        raise RuntimeError("the gradient of numbers of sharded rows cannot be differentiated again (create_graph=True)")
    if "x" not in saved:
        raise RuntimeError(
            "cross_entropy(): the gradient cannot be differentiated again (create_graph=True), because "
            "inplace_backward=True has overwritten input"
        )
    return _gradient_by_pytorch(recording, with_tensors(recording.call, saved), {"dy": dy})


def _gradient_by_pytorch(recording: Recording, call: Call, dys: Tensors) -> Tensor:
    """The gradient with respect to the logits by PyTorch's operations."""

    def results(x: Tensor) -> list[Tensor]:
        assert recording.by_pytorch is not None
        found = recording.by_pytorch(recording, call._replace(x=x))
        return [found[name] for name in dys]

    return gradient_by_pytorch(call.x, results, [*dys.values()])


RESULT = ("y",)
"""The one output that `setup_context` of `Transformed` sees; the gradient computes again what else it reads."""


class Transformed(Recorded):
    """A call under torch.func or in forward mode; its gradient is that of Recorded."""

    @staticmethod
    def forward(recording: Recording, *tensors: Any) -> Any:  # type: ignore[override]  # there is a setup_context
        named = dict(zip(recording.names, tensors, strict=True))
        return outputs_of(with_tensors(recording.call, named), RESULT)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        recording, *tensors = inputs
        call = with_tensors(recording.call, dict(zip(recording.names, tensors, strict=True)))
        needed = dict(zip(recording.names, ctx.needs_input_grad[1:], strict=True))
        save(ctx, recording_of(call, RESULT, RESULT, needed.get("scale", False)), (*tensors, output))
        if torch.autograd.forward_ad._current_level >= 0:
            # jvp runs right after forward, so saving these tensors does not prolong their lives.
            ctx.save_for_forward(output, *tensors)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Tensor:
        y, *tensors = ctx.saved_tensors
        names = ctx.recording.names
        call = with_tensors(ctx.recording.call, dict(zip(names, tensors, strict=True)))
        given = {name: t for name, t in zip(names, tangents, strict=True) if t is not None}
        x, options, dim = call.x, call.scores(), call.settings.dim
        wide = accumulator_of(x.dtype, y.dtype)
        slope = slope_of(options, x, wide)
        dz: Any = 0.0
        if "x" in given:
            dz = given["x"].to(wide) * options.scale * slope
        if "scale" in given:
            dz = dz + given["scale"] * x.to(wide) * slope
        if "bias" in given:
            dz = dz + given["bias"]
        dz = dz.expand(x.shape)
        mask = unmasked(options, x, dim)
        if mask is not None:
            dz = dz.masked_fill(~mask, 0.0)
        tangent = formulas.tangent(call.operation.name, saved_of(call, {"x": x, "y": y}, wide), dz)
        if call.operation.per_row and not call.settings.keepdim and x.dim():
            tangent = tangent.squeeze(dim)
        return tangent.to(y.dtype)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], recording: Recording, *tensors: Any) -> Any:
        (x, *others), (_, x_dim, *dims) = tensors, in_dims
        x = x.unsqueeze(0).expand(info.batch_size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
        # A 0-d sample becomes a row of one element.
        lone = x.dim() == 1
        x = x.unsqueeze(1) if lone else x
        others = [_batch_first(t, dim, x.dim()) for t, dim in zip(others, dims, strict=True)]
        call = recording.call.with_settings(dim=recording.call.settings.dim % (x.dim() - 1) + 1)
        y = Transformed.apply(recording._replace(call=call), x, *others)
        return (y.reshape(info.batch_size) if lone else y), 0


def _batch_first(t: Tensor, dim: int | None, ndim: int) -> Tensor:
    """A batch of tensors that broadcast to one sample, as one tensor that broadcasts to the batch of samples."""
    if dim is None:
        return t
    t = t.movedim(dim, 0)
    return t.reshape(t.shape[0], *[1] * (ndim - t.dim()), *t.shape[1:])
