"""Preparation of calls on torch tensors: task, plan and kernel are found once for each kind of call.

The first call of a kind describes its tensors, makes the task, has it planned and has the backend prepare the request.
Later calls find the prepared function under a key of the tensors' shapes, strides, dtypes, devices and alignment and
of the settings, and run it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import torch

from ..core.arguments import checked_dim
from ..core.call import NOTHING, Call, Settings
from ..core.options import SCORE_OPTIONS, bits
from ..core.plan_log import Kind, note_plan
from ..core.task import BYTES, INTEGER_BYTES, Choice, Flags, Task, one_row_as_many, output_shape, task_of
from ..core.view import View, contiguous_strides, strides_of_rows
from ..kernels import registry
from ..kernels.request import Request, Rest
from ..planner.plan import Plan, PlanError, Planner
from . import eager, formulas
from .arguments import checked_out
from .device import from_torch, planner_for
from .fast_path import PREPARED_CALLS, keep, key_of

ROW_OPTIONS = frozenset(name for name, option in SCORE_OPTIONS.items() if option.kind == "row")
"""Names of the score options that may have one value per row."""

INTEGERS = tuple(INTEGER_BYTES)
"""Names of the integer dtypes that an operand may have."""

DTYPE_NAMES = {getattr(torch, name): name for name in BYTES}


def run(call: Call, outputs: tuple[str, ...] = ("y",)) -> Any:
    """Run a call by a kernel, or by PyTorch's operation where the plan says so; the call has been checked.

    Returns:
        The output "y"; a tuple where several outputs are asked for.
    """
    function, operands = prepared(call, outputs)
    return function(call.x, call.out, operands)


Prepared = Callable[..., Any]
"""The function (x, out=None, operands={}) that runs the calls of a kind.

The function makes the first output if `out` is None, and the others unless they are among the operands.
"""


def prepared(call: Call, outputs: tuple[str, ...]) -> tuple[Prepared, Mapping[str, Any]]:
    """The prepared function of a checked call, and the call's operands."""
    operands = operands_of(call)
    key = _key("kernel", call, operands, outputs)
    found: Prepared = PREPARED_CALLS.get(key) or keep(PREPARED_CALLS, key, prepare(call, operands, outputs))
    return found, operands


def _key(value: str, call: Call, operands: Mapping[str, Any], outputs: tuple[str, ...]) -> tuple[Any, ...]:
    """The key of a value that follows from the kind of a call.  Calls with other numbers have the same key."""
    options = call.options
    flags = None if options is None else (options.causal, options.zero)
    arguments = (value, call.operation, outputs, call.settings, flags, tuple(operands))
    tensors = [t if isinstance(t, torch.Tensor) else None for t in operands.values()]
    return key_of(arguments, call.x, *tensors, *(() if call.out is None else (call.out,)))


def backend_of(call: Call, outputs: tuple[str, ...]) -> str:
    """The backend that the plan of a checked call takes."""
    operands = operands_of(call)
    key = _key("backend", call, operands, outputs)
    found: str | None = PREPARED_CALLS.get(key)
    if found is not None:
        return found
    task = _task(call, operands, outputs, checked_dim(call.operation.name, call.settings.dim, call.x.dim()), None)
    return keep(PREPARED_CALLS, key, plan_of(task, call.x.device, call.settings.choice).backend)


def operands_of(call: Call) -> Mapping[str, Any]:
    """The operands besides the input, by the names that kernels have for them, in shapes that broadcast to the input.

    A number is given as its bits.  A negation that PyTorch has put off, as in `z.conj().imag`, is carried out.
    """
    options = call.options
    operands = broadcastable(call) if call.beside else {}
    if options is not None:
        if options.bias is not None:
            operands["bias"] = options.bias
        if options.mask is not None:
            operands["mask"] = options.mask
        if isinstance(options.scale, torch.Tensor):
            operands["scale"] = options.scale
        elif options.scale != 1:
            operands["scale"] = bits(options.scale)
        if options.softcap is not None:
            operands["softcap"] = bits(options.softcap)
    return {name: t.resolve_neg() if isinstance(t, torch.Tensor) else t for name, t in operands.items()}


def broadcastable(call: Call) -> dict[str, Any]:
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


def _broadcast_strides(t: torch.Tensor, shape: torch.Size, row_axis: int | None) -> tuple[int, ...]:
    """The strides of a tensor for `shape`; the stride along row_axis is 0 if row_axis is given."""
    strides = t.stride() if t.shape == shape else t.expand(shape).stride()
    if row_axis is None or not shape:
        return strides
    axis = row_axis % len(shape)
    return (*strides[:axis], 0, *strides[axis + 1 :])


def aligned(t: torch.Tensor) -> bool:
    """True where the first element of a tensor lies on 16 bytes."""
    return t.data_ptr() % 16 == 0


def prepare(
    call: Call, operands: Mapping[str, Any], outputs: tuple[str, ...] = ("y",), follows_divisor: bool = False
) -> Prepared:
    """The function run(x, out, operands) for calls like this one, whose tensors it does not keep.

    Args:
        call: The call.
        operands: Its operands (`operands_of`).
        outputs: Names of the outputs that are written.
        follows_divisor: As in Request: every call follows the kernel that computes its operand `dy`.
    """
    operation, x, settings, out = call.operation, call.x, call.settings, call.out
    axis = checked_dim(operation.name, settings.dim, x.dim())
    dtype, first = settings.dtype or x.dtype, operation.output(outputs[0])
    shape = output_shape(first, x.shape, axis, settings.keepdim and first is operation.result)
    if out is not None:
        checked_out(operation.name, out, shape, dtype, x.device)
    of_axis = settings._replace(dim=axis, dtype=dtype)
    if x.numel() == 0:
        return _for_empty_input(call, outputs, of_axis, shape)
    # An `out` of another shape is empty, and will be resized to a contiguous tensor.
    task = _task(call, operands, outputs, axis, out if out is not None and out.shape == shape else None)
    the_plan = plan_of(task, x.device, settings.choice)
    note_plan(Kind.of(operation.name, x), repr(the_plan), the_plan.reason)
    if the_plan.backend == "eager":
        return lambda x, out=None, _=NOTHING: eager.call(operation, x, of_axis, out)
    launch = registry.load(the_plan.backend).prepare(Request(task, the_plan, follows_divisor))
    return _with_outputs(launch, call, task, shape, axis)


def request_of(call: Call, outputs: tuple[str, ...], planner: Planner, follows_divisor: bool = False) -> Request:
    """The request that `prepare` makes for a call, with the plan for another device; tensors may be without data."""
    axis = checked_dim(call.operation.name, call.settings.dim, call.x.dim())
    task = _task(call, operands_of(call), outputs, axis, None)
    return Request(task, planner.plan(task, call.settings.choice), follows_divisor)


def run_in_two(call: Call, outputs: tuple[str, ...], x: torch.Tensor, rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The outputs of a call on rows whose last columns are the tensor `rest`; the output "y" overwrites both tensors.

    The input of the call has the whole shape, the strides of `x`, and no memory (`whole_of`).
    """
    operands, task, plan = _in_two(call, outputs, x.device)
    note_plan(Kind.of(call.operation.name, x), repr(plan), plan.reason)
    launch = registry.load(plan.backend).prepare(Request(task, plan, rest=Rest(x.shape[1], rest.stride(0))))
    found = {name: x.new_empty(len(x), dtype=getattr(torch, task.dtypes[name])) for name in task.row_outputs}
    found |= {"y": x} if "y" in outputs else {}
    with torch.cuda.device_of(x):
        launch(x, found[task.outputs[0]], {**operands, **found, "rest": rest})
    return tuple(found[name] for name in outputs)


def runs_in_two(call: Call, outputs: tuple[str, ...], device: torch.device) -> bool:
    """True where `run_in_two` has a kernel: one that holds whole rows on chip, and rows of whole chunks.

    The caller cuts rows between chunks.
    """
    try:
        task = _in_two(call, outputs, device)[1]
    except PlanError:
        return False
    return task.cols * call.x.itemsize % 16 == 0


def whole_of(x: torch.Tensor, cols: int) -> torch.Tensor:
    """A tensor without memory for rows of `cols` columns, which begin where those of x do."""
    return torch.empty_strided((len(x), cols), x.stride(), dtype=x.dtype, device="meta")


def _in_two(call: Call, outputs: tuple[str, ...], device: torch.device) -> tuple[Mapping[str, Any], Task, Plan]:
    """Operands, task and plan of a call on rows in two tensors."""
    operands = {**operands_of(call), **({"y": call.x} if "y" in outputs else {})}
    task = _task(call, operands, outputs, 1, None)
    return operands, task, plan_of(task, device, Choice("cuda", "cluster"))


def _with_outputs(
    launch: Callable[..., None], call: Call, task: Task, shape: tuple[int, ...], axis: int
) -> Prepared:  # fmt: skip
    """The function run(x, out, operands) that allocates the outputs that are not given, and launches the kernel."""
    device, on_gpu = call.x.device, call.x.is_cuda
    index, current_device = device.index, torch._C._cuda_getDevice if on_gpu else None
    resize = call.out is not None and call.out.shape != shape
    new = allocator(device)
    first, *others = task.outputs
    its_shape, strides, dtype = _memory(call, task, first, shape)
    of_others = [
        (name, _memory(call, task, name, output_shape(task.operation.output(name), call.x.shape, axis)))
        for name in others
    ]
    results = itemgetter(*task.outputs)

    def run(x: torch.Tensor, out: torch.Tensor | None = None, operands: Mapping[str, Any] = NOTHING) -> Any:
        if current_device is not None and current_device() != index:
            with torch.cuda.device(device):
                return run(x, out, operands)
        if out is None:
            out = new(its_shape, strides, dtype)
        elif resize and not aligned(out.resize_(shape)):
            # A view keeps its place in its storage, and the kernel was prepared for a tensor that begins on 16 bytes.
            found = run(x, None, operands)
            out.copy_(found[0] if of_others else found)
            return (out, *found[1:]) if of_others else out
        if not of_others:
            launch(x, out, operands)
            return out
        operands = {**operands, first: out}
        for name, memory in of_others:
            # Given outputs are among the operands: a gradient that overwrites the logits, states that are sent.
            if name not in operands:
                operands[name] = new(*memory)
        launch(x, out, operands)
        return results(operands)

    return run


def allocator(device: torch.device) -> Callable[..., torch.Tensor]:
    """The function (shape, strides, dtype) that makes a tensor without values on a device, which is the current GPU.

    The memory is not counted by modes that see PyTorch's operations (TorchDispatchMode).
    """
    # The allocation of compiled programs takes a fifth of the host time of torch.empty_like.
    of_gpu = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None) if device.type == "cuda" else None
    return of_gpu or (
        lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)
    )  # fmt: skip


def on_device(run: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """A function that makes a device the current one, whose default stream a launch takes."""
    if device.type != "cuda":
        return run
    index, current_device = device.index, torch._C._cuda_getDevice

    def on_device(*arguments: Any) -> Any:
        if current_device() == index:
            return run(*arguments)
        with torch.cuda.device(device):
            return run(*arguments)

    return on_device


def _memory(call: Call, task: Task, name: str, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Shape, strides and dtype of a new output of a call.

    Args:
        call, task: The call and its task.
        name: Name of the output.
        shape: Its shape.
    """
    strides = _strides_of(call, name) or contiguous_strides(shape)
    return tuple(shape), tuple(strides), getattr(torch, task.dtypes[name])


def _strides_of(call: Call, output: str) -> tuple[int, ...] | None:
    """The strides of a new output; None if it is contiguous.

    A gradient has the layout of the logits, as PyTorch's own gradients have: nothing copies it on its way back through
    a transpose.
    """
    x, operation = call.x, call.operation
    if call.settings.choice.batch_invariant or not operation.follows_input(operation.output(output)):
        return None
    return torch.empty_like(torch.empty_strided(x.shape, x.stride(), device="meta")).stride()


def _task(
    call: Call, operands: Mapping[str, Any], outputs: tuple[str, ...], axis: int, out: torch.Tensor | None
) -> Task:  # fmt: skip
    """The task of a call whose result is `out`, or a new contiguous tensor if `out` is None."""
    operation, x, settings = call.operation, call.x, call.settings
    shape, dtype, result = tuple(x.shape), DTYPE_NAMES[x.dtype], DTYPE_NAMES[settings.dtype or x.dtype]
    views = {"x": View(x.stride(), dtype, aligned(x))}
    for name, t in operands.items():
        if isinstance(t, torch.Tensor):
            row_axis = axis if name in operation.row_operands or name in ROW_OPTIONS else None
            strides = t.stride() if name in operation.call_operands else _broadcast_strides(t, x.shape, row_axis)
            views[name] = View(strides, DTYPE_NAMES[t.dtype], aligned(t))
    if out is not None:
        strides = out.stride()
        strides = strides_of_rows(strides, axis, settings.keepdim) if operation.per_row and shape else strides
        views[operation.result.name] = View(strides, operation.result.dtype_of(dtype, result), aligned(out))
    for name in outputs:
        of_new = None if name in views else _strides_of(call, name)
        if of_new is not None:
            views[name] = View(of_new, operation.output(name).dtype_of(dtype, result))
    numbers = frozenset(name for name, value in operands.items() if isinstance(value, int))
    flags = Flags(numbers, call.scores().causal, call.scores().zero, result in ("float32", "float64"), settings.part)
    task = task_of(operation, outputs, shape, axis, views, flags, result)
    return one_row_as_many(task) if settings.choice.batch_invariant else task


def plan_of(task: Task, device: torch.device, choice: Choice) -> Plan:
    """The plan for a task on a torch device."""
    return planner_for(from_torch(device.type, device.index or 0), choice).plan(task, choice)


def _for_empty_input(call: Call, outputs: tuple[str, ...], settings: Settings, shape: tuple[int, ...]) -> Prepared:
    """The function for an input without elements; the settings have the axis, and the dtype of the result."""
    operation, device, axis, dtype = call.operation, call.x.device, settings.dim, settings.dtype
    if operation.backward:
        return lambda x, out=None, _=NOTHING: torch.empty(shape, dtype=dtype, device=device)
    wide = torch.promote_types(torch.promote_types(call.x.dtype, dtype), torch.float32)

    def run(x: torch.Tensor, out: torch.Tensor | None = None, _: Any = NOTHING) -> Any:
        y = eager.call(operation, x, settings, out)
        more = [
            formulas.of_empty_rows(name, output_shape(operation.output(name), x.shape, axis), wide, device)
            for name in outputs[1:]
        ]
        return (y, *more) if more else y

    return run
