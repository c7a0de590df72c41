"""Preparation of calls on torch tensors: task, plan and kernel are found once for each kind of call.

The first call of a kind describes its tensors, makes the task, has it planned and has the backend prepare the request.
Later calls find the prepared function under a key of shapes, strides, dtypes and settings, and run it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from ..core.arguments import checked_dim
from ..core.call import NOTHING, Call, Settings
from ..core.layout import contiguous_strides, strides_of_rows
from ..core.operations import Operation
from ..core.options import SCORE_OPTIONS, bits
from ..core.task import BYTES, INTEGER_BYTES, Choice, Flags, Task, TensorSpec, one_row_as_many, output_shape, task_of
from ..kernels import registry
from ..kernels.request import Request
from ..planner.plan import Plan
from . import eager, ops
from .check import checked_out
from .device import from_torch
from .fast_path import PREPARED_CALLS, keep, key_of
from .plans import planner_for

ROW_OPTIONS = frozenset(name for name, option in SCORE_OPTIONS.items() if option.kind == "row")
"""Names of the score options that may have one value per row."""

INTEGERS = tuple(INTEGER_BYTES)
"""Names of the integer dtypes that an operand may have."""

DTYPE_NAMES = {getattr(torch, name): name for name in BYTES}


class TensorKind(NamedTuple):
    """The properties of one tensor that form part of a Kind; `strides` are those for the shape of the input."""

    name: str
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool
    device: torch.device


class Kind(NamedTuple):
    """The kind of a call: calls of one kind share a prepared function.

    Attributes:
        operation, outputs, settings: As in Call and Task.
        tensors: The input, the other tensors that are read, and `out` where it is given.
        flags: As in Task.
    """

    operation: Operation
    outputs: tuple[str, ...]
    settings: Settings
    tensors: tuple[TensorKind, ...]
    flags: Flags

    @property
    def out(self) -> TensorKind | None:
        """The tensor that receives the result; None for a new one."""
        return self.tensors[-1] if self.tensors[-1].name == "out" else None


def run(call: Call, outputs: tuple[str, ...] = ("y",)) -> Any:
    """Run a call by a kernel, or by PyTorch's operation where the plan says so; the call has been checked.

    Returns:
        The output "y"; a tuple where several outputs are asked for.
    """
    function, operands = prepared(call, outputs)
    return function(call.x, call.out, operands)


Prepared = Callable[..., Any]
"""The function (x, out, operands), without an `out` and operands by default, that runs the calls of a kind.

The function makes the first output if `out` is None, and the others unless they are among the operands.
"""


def prepared(call: Call, outputs: tuple[str, ...]) -> tuple[Prepared, Mapping[str, Any]]:
    """The prepared function of a checked call, and the call's operands."""
    operands = operands_of(call)
    key = _key("kernel", call, operands, outputs)
    found: Prepared = PREPARED_CALLS.get(key) or keep(PREPARED_CALLS, key, prepare(kind_of(call, operands, outputs)))
    return found, operands


def _key(value: str, call: Call, operands: Mapping[str, Any], outputs: tuple[str, ...]) -> tuple[Any, ...]:
    """The key of a value that follows from the Kind of a call.  Calls with other numbers have the same key."""
    options = call.options
    flags = None if options is None else (options.causal, options.zero)
    arguments = (value, call.operation, outputs, call.settings, flags, tuple(operands))
    tensors = [t if isinstance(t, torch.Tensor) else None for t in operands.values()]
    return key_of(arguments, call.x, tensors if call.out is None else [*tensors, call.out])


def backend_of(call: Call, outputs: tuple[str, ...]) -> str:
    """The backend that the plan of a checked call takes."""
    operands = operands_of(call)
    key = _key("backend", call, operands, outputs)
    found: str | None = PREPARED_CALLS.get(key)
    if found is not None:
        return found
    kind = kind_of(call, operands, outputs)
    task = _task(kind, checked_dim(call.operation.name, call.settings.dim, call.x.dim()), None)
    return keep(PREPARED_CALLS, key, plan_of(task, call.x.device, call.settings.choice).backend)


def operands_of(call: Call) -> Mapping[str, Any]:
    """The operands besides the input, by the names that kernels have for them, in shapes that broadcast to the input.

    A number is given as its bits.
    """
    options = call.options
    operands = _broadcastable(call) if call.beside else {}
    if options is None:
        return operands
    scale, softcap, bias, mask, _, _ = options
    if bias is not None:
        operands["bias"] = bias
    if mask is not None:
        operands["mask"] = mask
    if isinstance(scale, torch.Tensor):
        operands["scale"] = scale
    elif scale != 1:
        operands["scale"] = bits(scale)
    if softcap is not None:
        operands["softcap"] = bits(softcap)
    return operands


def _broadcastable(call: Call) -> dict[str, Any]:
    """The operands of a call: those of the rows get the softmax dimension, and those of the classes the ones after."""
    operation, dim, ndim = call.operation, call.settings.dim, call.x.dim()
    operands = dict(call.beside)
    for name, t in operands.items():
        if not isinstance(t, torch.Tensor):
            continue
        if name in operation.row_operands:
            operands[name] = t.unsqueeze(dim) if t.dim() == ndim - 1 else t
        elif t.dim() == 1 and ndim > 1:
            operands[name] = t.reshape(-1, *[1] * (ndim - 1 - dim % ndim))
    return operands


def kind_of(call: Call, operands: Mapping[str, Any], outputs: tuple[str, ...] = ("y",)) -> Kind:
    """The kind of a call with these operands."""
    operation, x, settings, options, out = call.operation, call.x, call.settings, call.options, call.out
    tensors = [_tensor_kind("x", x, x.stride())]
    for name, t in operands.items():
        if not isinstance(t, torch.Tensor):
            continue
        if name in operation.call_operands:
            tensors.append(_tensor_kind(name, t, t.stride()))
        else:
            row_axis = settings.dim if name in operation.row_operands or name in ROW_OPTIONS else None
            tensors.append(_tensor_kind(name, t, _broadcast_strides(t, x.shape, row_axis)))
    if out is not None:
        tensors.append(_tensor_kind("out", out, out.stride()))
    wide = (settings.dtype or x.dtype) in WIDE
    numbers = frozenset(name for name, value in operands.items() if isinstance(value, int)) if operands else NO_NUMBERS
    causal, zero = (False, False) if options is None else (options.causal, options.zero)
    flags = Flags(numbers, causal, zero, wide, settings.part)
    return Kind(operation, outputs, settings, tuple(tensors), flags)


def _tensor_kind(name: str, t: torch.Tensor, strides: tuple[int, ...]) -> TensorKind:
    return TensorKind(name, t.shape, strides, t.dtype, aligned(t), t.device)


def _broadcast_strides(t: torch.Tensor, shape: torch.Size, row_axis: int | None) -> tuple[int, ...]:
    """The strides of a tensor for `shape`; the stride along row_axis is 0 if row_axis is given."""
    strides = t.stride() if t.shape == shape else t.expand(shape).stride()
    if row_axis is None or not shape:
        return strides
    axis = row_axis % len(shape)
    return (*strides[:axis], 0, *strides[axis + 1 :])


WIDE = (torch.float32, torch.float64)
NO_NUMBERS: frozenset[str] = frozenset()


def aligned(t: torch.Tensor) -> bool:
    """True where the first element of a tensor lies on 16 bytes."""
    return t.data_ptr() % 16 == 0


def prepare(kind: Kind, follows_divisor: bool = False) -> Prepared:
    """The function run(x, out, operands) for calls of a kind.

    Args:
        kind: The kind.
        follows_divisor: As in Request: every call follows the kernel that computes its operand `dy`.
    """
    operation, settings = kind.operation, kind.settings
    x, out = kind.tensors[0], kind.out
    axis = checked_dim(operation.name, settings.dim, len(x.shape))
    dtype, shape = settings.dtype or x.dtype, _shape_of_first(kind, axis)
    if out is not None:
        checked_out(operation.name, out, shape, dtype, x.device)
    if x.shape.numel() == 0:
        return _for_empty_input(kind, axis, shape, dtype)
    # An `out` of another shape is empty, and will be resized to a contiguous tensor.
    task = _task(kind, axis, out if out is not None and out.shape == shape else None)
    the_plan = plan_of(task, x.device, settings.choice)
    if the_plan.backend == "eager":
        eager_settings = settings._replace(dim=axis, dtype=dtype)
        return lambda x, out=None, _=NOTHING: eager.call(operation, x, eager_settings, out)
    launch = registry.load(the_plan.backend).prepare(Request(task, the_plan, follows_divisor))
    return _with_outputs(launch, kind, task, shape, getattr(torch, task.dtypes[kind.outputs[0]]))


def _with_outputs(
    launch: Callable[..., None], kind: Kind, task: Task, shape: tuple[int, ...], dtype: torch.dtype
) -> Prepared:
    """The function run(x, out, operands) that allocates the outputs that are not given, and launches the kernel."""
    x, outputs = kind.tensors[0], kind.outputs
    device, on_gpu, index = x.device, x.device.type == "cuda", x.device.index
    resize = kind.out is not None and kind.out.shape != shape
    template = _template(x, shape, dtype, _strides_of(kind, outputs[0]))
    more_templates = _more_templates(kind, task)
    first, has_more, results = outputs[0], len(outputs) > 1, itemgetter(*outputs)

    def run(x: torch.Tensor, out: torch.Tensor | None = None, operands: Mapping[str, Any] = NOTHING) -> Any:
        if out is None:
            out = torch.empty_like(x if template is None else template)
        elif resize:
            out.resize_(shape)
        if has_more:
            operands = {**operands, first: out}
            for name, like in more_templates:
                # Given outputs are among the operands: a gradient that overwrites the logits, states that are sent.
                if name not in operands:
                    operands[name] = torch.empty_like(x if like is None else like)
        if on_gpu and torch._C._cuda_getDevice() != index:
            with torch.cuda.device(device):
                launch(x, out, operands)
        else:
            launch(x, out, operands)
        return results(operands) if has_more else out

    return run


def _template(
    x: TensorKind, shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None
) -> torch.Tensor | None:
    """A tensor without memory for empty_like, which takes half the host time of empty; None where x itself is one.

    Args:
        x: The input.
        shape, dtype: Those of the output.
        strides: Its strides; None for a contiguous output.
    """
    strides = contiguous_strides(shape) if strides is None else strides
    if (shape, dtype, strides) == (x.shape, x.dtype, x.strides):
        return None
    template = torch.empty_strided(shape, strides, dtype=dtype, device=x.device)
    # empty_like reads no element, and a kept function must not hold memory of the size of an output.
    template.untyped_storage().resize_(0)
    return template


def _more_templates(kind: Kind, task: Task) -> list[tuple[str, torch.Tensor | None]]:
    """The name and the `_template` of every output besides the first."""
    x = kind.tensors[0]
    axis = kind.settings.dim % max(len(x.shape), 1)
    return [
        (
            output.name,
            _template(
                x,
                output_shape(output, x.shape, axis),
                getattr(torch, task.dtypes[output.name]),
                _strides_of(kind, output.name),
            ),
        )
        for output in kind.operation.written(kind.outputs)
        if output.name != kind.outputs[0]
    ]


def _strides_of(kind: Kind, output: str) -> tuple[int, ...] | None:
    """The strides of a new output; None if it is contiguous.

    A gradient has the layout of the logits, as PyTorch's own gradients have: nothing copies it on its way back through
    a transpose.
    """
    x, operation = kind.tensors[0], kind.operation
    if kind.settings.choice.batch_invariant or not operation.follows_input(operation.output(output)):
        return None
    return torch.empty_like(torch.empty_strided(x.shape, x.strides, device="meta")).stride()


def _task(kind: Kind, axis: int, out: TensorKind | None) -> Task:
    """The task of a kind whose result is `out`, or a new contiguous tensor if `out` is None."""
    operation, settings = kind.operation, kind.settings
    tensors = {t.name: _spec(t) for t in kind.tensors if t.name != "out"}
    shape, result = tuple(kind.tensors[0].shape), DTYPE_NAMES[settings.dtype or kind.tensors[0].dtype]
    if out is not None:
        strides = strides_of_rows(out.strides, axis, settings.keepdim) if operation.per_row and shape else out.strides
        dtype_of_out = operation.result.dtype_of(tensors["x"].dtype, result)
        tensors[operation.result.name] = TensorSpec(strides, dtype_of_out, out.aligned)
    for name in kind.outputs:
        of_new = None if name in tensors else _strides_of(kind, name)
        if of_new is not None:
            tensors[name] = TensorSpec(of_new, operation.output(name).dtype_of(tensors["x"].dtype, result))
    task = task_of(operation, kind.outputs, shape, axis, tensors, kind.flags, result)
    return one_row_as_many(task) if settings.choice.batch_invariant else task


def _spec(t: TensorKind) -> TensorSpec:
    return TensorSpec(t.strides, DTYPE_NAMES[t.dtype], t.aligned)


def plan_of(task: Task, device: torch.device, choice: Choice) -> Plan:
    """The plan for a task on a torch device."""
    return planner_for(from_torch(device.type, device.index or 0), choice).plan(task, choice)


def _for_empty_input(kind: Kind, axis: int, shape: tuple[int, ...], dtype: torch.dtype) -> Prepared:
    """The function for an input without elements."""
    operation, x = kind.operation, kind.tensors[0]
    settings = kind.settings._replace(dim=axis, dtype=dtype)
    if operation.backward:
        return lambda x, out=None, _=NOTHING: torch.empty(shape, dtype=dtype, device=x.device)
    wide = torch.promote_types(torch.promote_types(x.dtype, dtype), torch.float32)
    rows = output_shape(operation.output("lse"), x.shape, axis)

    def run(x: torch.Tensor, out: torch.Tensor | None = None, _: Any = NOTHING) -> Any:
        y = eager.call(operation, x, settings, out)
        more = [ops.of_empty_rows(name, rows, wide, x.device) for name in kind.outputs[1:]]
        return (y, *more) if more else y

    return run


def _shape_of_first(kind: Kind, axis: int) -> tuple[int, ...]:
    """Shape of the first output: of the main output, or of another that is asked for instead."""
    first = kind.operation.output(kind.outputs[0])
    keepdim = kind.settings.keepdim and first is kind.operation.result
    return output_shape(first, kind.tensors[0].shape, axis, keepdim)
