"""The operations as custom operators of PyTorch: opaque to torch.compile and torch.export, with fake implementations.

One operator for each declared operation; its schema and its fake implementation follow from the declaration.  Only
traced calls use these operators: an eager call saves the host time of PyTorch's C++ dispatcher.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..core.call import Call, Settings
from ..core.operations import Operation
from ..core.options import SCORE_OPTIONS, ScoreOptions
from ..core.task import Choice, output_shape
from ..ops import OPERATIONS
from . import gradients, operators_eager
from .autograd import save_for_gradient, saved_call
from .gradients import Kept, Wanted
from .namespace import NAMESPACE
from .prepare import DTYPE_NAMES, run

Tensor = torch.Tensor


def forward(call: Call) -> Tensor:
    """The result of a forward call as an operator, with derivatives."""
    result = _operator(call.operation)(*_flat(call))
    found: Tensor = result[0] if isinstance(result, tuple) else result
    return found


def outputs(call: Call, names: tuple[str, ...]) -> tuple[Tensor, ...]:
    """The outputs of a call of an operation with a target, as an operator without derivatives."""
    numbers = (call.beside.get(name) for name in call.operation.numbers)
    found: list[Tensor] = _operator(call.operation)(*_flat(call), *numbers, ",".join(names))
    return tuple(found)


def _operator(operation: Operation) -> Any:
    return getattr(getattr(torch.ops, NAMESPACE), operation.name)


def _tensors_of(operation: Operation) -> tuple[str, ...]:
    """Names of an operator's tensors: the operands, then what the score options may add."""
    optional = [name for name in operation.options if SCORE_OPTIONS[name].tensor]
    if operation.backward and "softcap" in operation.options and not operation.has_target:
        # The derivative of the softcap is computed from the logits.
        optional.append("logits")
    return (*(operand.name for operand in operation.operands if not operand.number), *optional)


SETTINGS = (
    "int dim, ScalarType? dtype, bool keepdim, str? backend, str? strategy, bool batch_invariant, "
    "float number, float? softcap, bool causal, bool zero"
)
"""Settings, their Choice, and the score options that are not tensors, in the order of `_flat`."""


def schema(operation: Operation) -> str:
    """The schema of an operator.

    >>> schema(OPERATIONS["softmax"]).partition(", int dim")[0]
    '(Tensor x, Tensor? scale, Tensor? bias, Tensor? mask'
    """
    required = {operand.name for operand in operation.operands if not operand.optional}
    tensors = [f"Tensor{'' if name in required else '?'} {name}" for name in _tensors_of(operation)]
    if operation.has_target:
        # A number is given as its bits.
        numbers = "".join(f"int? {name}, " for name in operation.numbers)
        return f"({', '.join(tensors)}, {SETTINGS}, {numbers}str outputs) -> Tensor[]"
    results = ", ".join("Tensor" for _ in _outputs_of(operation))
    return f"({', '.join(tensors)}, {SETTINGS}) -> {results if ',' not in results else f'({results})'}"


def _outputs_of(operation: Operation) -> tuple[str, ...]:
    return operation.always if operation.backward else operation.kept_outputs


def _flat(call: Call) -> tuple[Any, ...]:
    """The arguments of a call's operator."""
    options, (dim, dtype, keepdim, choice, _) = call.scores, call.settings
    is_tensor = isinstance(options.scale, Tensor)
    given = {"x": call.x, **call.beside, "bias": options.bias, "mask": options.mask}
    given["scale"] = options.scale if is_tensor else None
    number = 1.0 if is_tensor else options.scale
    return (
        *(given.get(name) for name in _tensors_of(call.operation)),
        dim, dtype, keepdim, *choice, number, options.softcap, options.causal, options.zero,
    )  # fmt: skip


def _call(operation: Operation, arguments: tuple[Any, ...]) -> Call:
    """The call that `_flat` was given."""
    names = _tensors_of(operation)
    given = dict(zip(names, arguments, strict=False))
    dim, dtype, keepdim, backend, strategy, invariant, number, softcap, causal, zero = arguments[len(names) :]
    scale = given.pop("scale", None)
    options = ScoreOptions(
        number if scale is None else scale, softcap, given.pop("bias", None), given.pop("mask", None), causal, zero
    )
    settings = Settings(dim, dtype, keepdim, Choice(backend, strategy, invariant))
    x = given.pop("x")
    beside = {name: t for name, t in given.items() if t is not None}
    return Call(operation, x, settings, None if options.plain else options, None, beside)


def _fake(call: Call, outputs: tuple[str, ...]) -> list[Tensor]:
    """Empty tensors of the shapes and dtypes of a call's outputs."""
    x, (dim, dtype, keepdim, choice, _), result = call.x, call.settings, call.operation.result
    axis, names = dim % max(x.dim(), 1), (DTYPE_NAMES[x.dtype], DTYPE_NAMES[dtype or x.dtype])
    return [
        torch.empty_like(x, dtype=getattr(torch, output.dtype_of(*names)))
        if call.operation.follows_input(output) and not choice.batch_invariant
        else x.new_empty(
            output_shape(output, x.shape, axis, keepdim and output is result),
            dtype=getattr(torch, output.dtype_of(*names)),
        )
        for output in call.operation.written(outputs)
    ]


def _registered(operation: Operation, kernel: Any, fake: Any) -> Any:
    """The new operator of an operation, with its kernel and its fake implementation."""
    name = f"{NAMESPACE}::{operation.name}"
    operator = torch.library.custom_op(name, kernel, mutates_args=(), schema=schema(operation))
    operator.register_fake(fake)
    return operator


def _outputs(call: Call, names: tuple[str, ...]) -> tuple[Tensor, ...]:
    """The outputs of a call by a kernel, or by PyTorch's operations where no kernel takes the call."""
    if operators_eager.takes(call):
        return operators_eager.outputs_of(call, names)
    if call.operation.has_target or not call.operation.backward:
        return gradients.outputs_of(call, names)
    return (run(call, names),)


def _define_with_target(operation: Operation) -> None:
    """Define the operator of an operation with a target; its last argument names the outputs.

    A compiled call has its derivatives from torch/targets.py; those here serve an exported program.
    """
    count = len(operation.numbers) + 1

    def call_of(arguments: tuple[Any, ...]) -> tuple[Call, tuple[str, ...]]:
        call = _call(operation, arguments[:-count])
        *numbers, names = arguments[-count:]
        given = {name: value for name, value in zip(operation.numbers, numbers, strict=True) if value is not None}
        return call._replace(beside={**call.beside, **given}), tuple(names.split(","))

    def kernel(*arguments: Any) -> list[Tensor]:
        return list(_outputs(*call_of(arguments)))

    def fake(*arguments: Any) -> list[Tensor]:
        return _fake(*call_of(arguments))

    operator, names = _registered(operation, kernel, fake), _tensors_of(operation)
    if operation.backward:
        return

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        refused = [name for name, needed in zip(names, ctx.needs_input_grad, strict=False) if needed and name != "x"]
        if refused:
            raise RuntimeError(f"{NAMESPACE}::{operation} has no gradient with respect to {', '.join(refused)}")
        ctx.names, ctx.rest = inputs[-1].split(","), inputs[len(names) :]
        kept = [t for name, t in zip(ctx.names, output, strict=True) if name not in differentiable_outputs(operation)]
        ctx.mark_non_differentiable(*kept)
        ctx.save_for_backward(*inputs[: len(names)])

    def differentiate(ctx: Any, dys: list[Tensor | None]) -> tuple[Any, ...]:
        call, _ = call_of((*ctx.saved_tensors, *ctx.rest))
        given = {name: dy for name, dy in zip(ctx.names, dys, strict=True) if dy is not None}
        dx = gradient_of(call, {name: given[name] for name in differentiable_outputs(operation) if name in given})
        return (dx, *(None for _ in range(len(names) - 1 + len(ctx.rest))))

    operator.register_autograd(differentiate, setup_context=setup_context)


def differentiable_outputs(operation: Operation) -> tuple[str, ...]:
    """Names of the outputs of an operation with a target through which its operator has a gradient."""
    per_row = ("lse", "entropy") if "entropy" in operation.saved else ()
    return (operation.result.name, *operation.call_outputs, *per_row)


def gradient_of(call: Call, dys: Mapping[str, Tensor]) -> Tensor | None:
    """The gradient of a call of an operation with a target, from those of its outputs, by operators."""
    operation, x, dim = call.operation, call.x, call.settings.dim
    beside = {name: value for name, value in call.beside.items() if name != "dy"}
    forward = call._replace(beside=beside)
    total: Tensor | None = None
    for name in operation.call_outputs:
        if name in dys:
            # The call that writes a scalar also writes the gradient of this scalar.
            _, y = outputs(forward, (name, "y"))
            total = y * dys[name] if total is None else total + y * dys[name]
    per_row = {name: dy for name, dy in dys.items() if name not in operation.call_outputs}
    if not per_row:
        return total
    states = ("m", "l", *(("entropy",) if "entropy" in per_row else ()))
    found = dict(zip(states, outputs(forward, states), strict=True))
    first, *others = (operation.result.name, *(name for name in per_row if name != operation.result.name))
    found["dy"] = per_row.get(first, torch.zeros_like(found["m"]))
    found |= {f"d{name}": per_row[name] for name in others}
    gradient = OPERATIONS[operation.gradient_name]
    settings = call.settings._replace(dtype=x.dtype, keepdim=False)
    beside |= {name: t.unsqueeze(dim) for name, t in found.items()}
    options = call.options and call.options.of(gradient.options)
    (dx,) = outputs(Call(gradient, x, settings, options, None, beside), ("y",))
    return dx if total is None else total + dx


def _define(operation: Operation) -> None:
    outputs = _outputs_of(operation)

    def kernel(*arguments: Any) -> Any:
        found = _outputs(_call(operation, arguments), outputs)
        return found if len(found) > 1 else found[0]

    def fake(*arguments: Any) -> Any:
        found = _fake(_call(operation, arguments), outputs)
        return tuple(found) if len(found) > 1 else found[0]

    operator = _registered(operation, kernel, fake)
    if operation.backward:
        return
    names = _tensors_of(operation)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        y, lse = output if isinstance(output, tuple) else (output, None)
        if lse is not None:
            ctx.mark_non_differentiable(lse)
        ctx.count = len(inputs)
        save_for_gradient(ctx, _call(operation, inputs), y, lse, ctx.needs_input_grad[names.index("scale")])

    def differentiate(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
        call, kept = saved_call(ctx)
        needs = dict(zip(names, ctx.needs_input_grad, strict=False))
        wanted = Wanted(needs["x"], needs["bias"], needs["scale"], ctx.dtype, ctx.bias_like)
        found = dict(zip(("x", "bias", "scale"), gradients.gradients(call, kept, dy, wanted, _backward), strict=True))
        return (*(found.get(name) for name in names), *(None for _ in range(ctx.count - len(names))))

    operator.register_autograd(differentiate, setup_context=setup_context)


def _backward(call: Call, kept: Kept, dy: Tensor, dtype: torch.dtype, to_logits: bool) -> Tensor:
    """`gradients.backward` as an operator."""
    of_gradient = gradients.gradient_call(call, kept, dy, dtype, to_logits)
    found: Tensor = _operator(of_gradient.operation)(*_flat(of_gradient))
    return found


for _operation in OPERATIONS.values():
    (_define_with_target if _operation.has_target else _define)(_operation)
