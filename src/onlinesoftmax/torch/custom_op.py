"""The operations as custom operators of PyTorch: opaque to torch.compile and torch.export, with fake implementations.

One operator for each declared operation; its schema and its fake implementation follow from the declaration.  Only
traced calls use these operators: an eager call saves the host time of PyTorch's C++ dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core.call import Call, Settings
from ..core.declaration import Operation
from ..core.options import SCORE_OPTIONS, ScoreOptions
from ..core.task import Choice, output_shape
from ..ops import OPERATIONS
from . import custom_op_eager, gradients
from .namespace import NAMESPACE
from .prepare import DTYPE_NAMES
from .recording import GradientTypes, Tensors, recording_of, save, split_tensors, with_tensors

Tensor = torch.Tensor


def forward(call: Call) -> Tensor:
    """The result of a forward call as an operator, with derivatives."""
    return outputs(call, _outputs_of(call.operation))[0]


def outputs(call: Call, names: tuple[str, ...]) -> tuple[Tensor, ...]:
    """The outputs of a call as an operator.  An operation without a target has those of `_outputs_of`."""
    arguments = _flat(call)
    if call.operation.has_target:
        arguments = (*arguments, *(call.beside.get(name) for name in call.operation.numbers), ",".join(names))
    found = _operator(call.operation)(*arguments)
    return (found,) if isinstance(found, Tensor) else tuple(found)


def _operator(operation: Operation) -> Any:
    return getattr(getattr(torch.ops, NAMESPACE), operation.name)


def _tensors_of(operation: Operation) -> tuple[str, ...]:
    """Names of an operator's tensors: the operands, then what the score options may add."""
    optional = [name for name in operation.options if SCORE_OPTIONS[name].tensor]
    if "softcap" in operation.options and not operation.scores:
        # The derivative of the softcap is computed from the logits, which the input is not.
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
    """The arguments of a call's operator, without the numbers among its operands."""
    bare, tensors = split_tensors(call)
    options, settings = bare.scores(), call.settings
    return (
        *(tensors.get(name) for name in _tensors_of(call.operation)),
        settings.dim, settings.dtype, settings.keepdim, *settings.choice,
        options.scale, options.softcap, options.causal, options.zero,
    )  # fmt: skip


def _call(operation: Operation, arguments: tuple[Any, ...]) -> Call:
    """The call that `_flat` was given."""
    names = _tensors_of(operation)
    tensors = dict(zip(names, arguments, strict=False))
    dim, dtype, keepdim, backend, strategy, invariant, number, softcap, causal, zero = arguments[len(names) :]
    options = ScoreOptions(number, softcap, None, None, causal, zero)
    settings = Settings(dim, dtype, keepdim, Choice(backend, strategy, invariant))
    return with_tensors(Call(operation, None, settings, options), tensors)


def _fake(call: Call, outputs: tuple[str, ...]) -> list[Tensor]:
    """Empty tensors of the shapes and dtypes of a call's outputs."""
    x, settings, result = call.x, call.settings, call.operation.result
    axis, names = settings.dim % max(x.dim(), 1), (DTYPE_NAMES[x.dtype], DTYPE_NAMES[settings.dtype or x.dtype])
    return [
        torch.empty_like(x, dtype=getattr(torch, output.dtype_of(*names)))
        if call.operation.follows_input(output) and not settings.choice.batch_invariant
        else x.new_empty(
            output_shape(output, x.shape, axis, settings.keepdim and output is result),
            dtype=getattr(torch, output.dtype_of(*names)),
        )
        for output in call.operation.written(outputs)
    ]


def _outputs(call: Call, names: tuple[str, ...]) -> tuple[Tensor, ...]:
    """The outputs of a call by a kernel, or by PyTorch's operations where no kernel takes the call."""
    if custom_op_eager.takes(call):
        return custom_op_eager.outputs_of(call, names)
    return gradients.outputs_of(call, names)


def _define(operation: Operation) -> None:
    """Define the operator of an operation.  With a target, its last arguments are the numbers and the outputs.

    A compiled call of an operation with a target has its derivatives from autograd.py; those here serve an exported
    program.
    """
    fixed, count = _outputs_of(operation), len(operation.numbers) + 1 if operation.has_target else 0

    def call_of(arguments: tuple[Any, ...]) -> tuple[Call, tuple[str, ...]]:
        call = _call(operation, arguments[: len(arguments) - count])
        if not count:
            return call, fixed
        *numbers, asked = arguments[-count:]
        given = {name: value for name, value in zip(operation.numbers, numbers, strict=True) if value is not None}
        return call.with_operands(**given), tuple(asked.split(","))

    def returned(found: Sequence[Tensor]) -> Any:
        if count:
            return list(found)
        return tuple(found) if len(found) > 1 else found[0]

    def kernel(*arguments: Any) -> Any:
        return returned(_outputs(*call_of(arguments)))

    def fake(*arguments: Any) -> Any:
        return returned(_fake(*call_of(arguments)))

    operator = torch.library.custom_op(
        f"{NAMESPACE}::{operation.name}", kernel, mutates_args=(), schema=schema(operation)
    )
    operator.register_fake(fake)
    if not operation.backward:
        _define_gradient(operator, operation, call_of)


def _define_gradient(operator: Any, operation: Operation, call_of: Callable[..., tuple[Call, tuple[str, ...]]]) -> None:
    """Register the gradient of an operator, whose arguments `call_of` makes a call."""
    names = _tensors_of(operation)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        call, outputs = call_of(inputs)
        needed = [name for name, needed in zip(names, ctx.needs_input_grad, strict=False) if needed]
        refused = [name for name in needed if name != "x" and operation.has_target]
        if refused:
            raise RuntimeError(f"{NAMESPACE}::{operation} has no gradient with respect to {', '.join(refused)}")
        ctx.count, found = len(inputs), (output,) if isinstance(output, Tensor) else output
        recording = recording_of(call, outputs, outputs, "scale" in needed)
        save(ctx, recording, (*split_tensors(call)[1].values(), *found))

    def differentiate(ctx: Any, *dys: Any) -> tuple[Any, ...]:
        recording = ctx.recording
        saved = dict(zip(recording.saved, ctx.saved_tensors, strict=True))
        needed = tuple(name for name, needed in zip(names, ctx.needs_input_grad, strict=False) if needed)
        each = zip(recording.results, recording.dys, dys[0] if operation.has_target else dys, strict=True)
        given = {name: dy for name, has_gradient, dy in each if has_gradient and dy is not None}
        found = _gradients(needed, with_tensors(recording.call, saved), saved, given, recording.types)
        return (*(found.get(name) for name in names), *(None for _ in range(ctx.count - len(names))))

    operator.register_autograd(differentiate, setup_context=setup_context)


def _gradients(
    wanted: tuple[str, ...], call: Call, saved: Tensors, dys: Tensors, types: GradientTypes
) -> dict[str, Tensor]:  # fmt: skip
    """The gradients of a call from those of its outputs, by operators; arguments as for `gradients.gradients`."""
    operation, total = call.operation, None
    for name in operation.call_outputs:
        if name in dys and "x" in wanted:
            # The call that writes a scalar also writes the gradient of this scalar.
            _, y = outputs(call, (name, "y"))
            total = y * dys[name] if total is None else total + y * dys[name]
    main = operation.result.name
    given = {"dy" if name == main else f"d{name}": dy for name, dy in dys.items() if name not in operation.call_outputs}
    if not given:
        return {} if total is None else {"x": total}
    # An exported program does not write the states that the gradient reads, so `gradients` computes them again.
    found = gradients.gradients(wanted, call, saved, given, types, outputs)
    return found if total is None else {"x": total + found["x"]}


for _operation in OPERATIONS.values():
    _define(_operation)
