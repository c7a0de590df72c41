"""The outputs of every operator by PyTorch's operations, for tensors that no kernel of ours takes.

A program that was exported on a GPU names our operators, and runs on a CPU too.  Operations without a target use the
formulas of formulas.py, those with a target the table of ops/reference.py, in float64.
"""

from __future__ import annotations

import struct
from typing import Any

import torch

from ..core.arrays import namespace
from ..core.call import NOTHING, Call
from ..core.declaration import Output
from ..kernels import registry
from ..ops import OPERATIONS
from ..ops.cross_entropy.formulas import divisor_of
from ..ops.reference import evaluate, with_sums
from . import eager
from .formulas import accumulator_of
from .gradients import score_gradient, slope_of, unmasked
from .prepare import DTYPE_NAMES, broadcastable, operands_of

Tensor = torch.Tensor


def takes(call: Call) -> bool:
    """True for a call that no kernel runs: the input is on no GPU, and no other backend is forced."""
    backend = call.settings.choice.backend
    # Launches take care of inputs without elements.
    if not call.x.numel() or backend not in (None, "eager"):
        return False
    if backend == "eager" or not call.x.is_cuda:
        return True
    return registry.unavailable("cuda") is not None and registry.unavailable("triton") is not None


def outputs_of(call: Call, outputs: tuple[str, ...]) -> tuple[Tensor, ...]:
    """The outputs of these names, in the order of the declaration."""
    written = call.operation.written(outputs)
    if call.operation.has_target:
        return tuple(_by_formula(call, output, outputs) for output in written)
    return (_gradient(call),) if call.operation.backward else tuple(_forward(call, output) for output in written)


def _forward(call: Call, output: Output) -> Tensor:
    if output is not call.operation.result:
        # The other output that an operator without a target has is lse.
        wide = accumulator_of(call.x.dtype, call.settings.dtype or call.x.dtype)
        settings = call.settings._replace(dtype=wide, keepdim=False)
        call = Call(OPERATIONS["logsumexp"], call.x, settings, call.options)
    return eager.call_on_scores(call)


def _gradient(call: Call) -> Tensor:
    """The gradient with respect to the input of an operation without a target."""
    operation, x, options = call.operation, call.x, call.scores()
    operands = operands_of(call)
    saved = {"x": x} if operation.scores else {"y": x, **({"x": call.beside["logits"]} if "logits" in operands else {})}
    # `dy` already has the size 1 that keepdim keeps.
    settings = call.settings._replace(keepdim=True)
    dz = score_gradient(Call(operation.forward, x, settings, call.options, None, NOTHING), saved, operands["dy"])
    return (dz * (options.scale * slope_of(options, saved.get("x"), dz.dtype))).to(call.settings.dtype or x.dtype)


def _by_formula(call: Call, output: Output, outputs: tuple[str, ...]) -> Tensor:
    """One output of an operation with a target, in a call that writes these outputs."""
    operation, x, dim, options = call.operation, call.x, call.settings.dim, call.scores()
    values = {name: _value(name, value) for name, value in broadcastable(call).items()}
    values["x"] = eager.scores_of(x, dim, options, torch.float64)[0]
    xp = namespace(values["x"])
    if output.kind == "element" and "dy" not in values:
        # y is the gradient of the scalar that the call also writes: the mean or the sum.
        of_sums = with_sums(operation.name, xp, values, dim, operation.result.name)
        values["dy"] = 1.0 / divisor_of(xp, **of_sums) if "mean_loss" in outputs else 1.0
    y = evaluate(operation.name, xp, values, dim, output.name)
    if output.kind == "element":
        y = y * (options.scale * slope_of(options, x, y.dtype))
        mask = unmasked(options, x, dim)
        y = y if mask is None else y.masked_fill(~mask, 0.0)
    elif output.kind == "row":
        y = y.expand([1 if i == dim else size for i, size in enumerate(x.shape)]).squeeze(dim)
    names = DTYPE_NAMES[x.dtype], DTYPE_NAMES[call.settings.dtype or x.dtype]
    y = y.to(getattr(torch, output.dtype_of(*names)))
    # m is finite in its own dtype too.
    return xp.clip(y) if output.name == "m" else y


def _value(name: str, value: Any) -> Any:
    """An operand as the formulas read it: a number from its bits, and tensors that lose nothing."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value.long()
    number: float = struct.unpack("d", struct.pack("q", value))[0]
    return int(number) if name == "ignore_index" else number
