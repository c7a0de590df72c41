"""The tasks and plans of JAX arrays: a call and `explain` take them from here.  This module does not import JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from types import MappingProxyType

from ..core.device import Device, known
from ..core.problem import Problem
from ..core.task import ANY, ITEMSIZE, Choice, Flags, Task, operand_views, task_of
from ..core.view import View, contiguous_view
from ..kernels.cuda import xla_handler
from ..ops import OPERATIONS
from ..planner.measured import table_for
from ..planner.plan import Planner
from ..planner.strategies import FOR_JAX, FORCED_CUDA, JAX_WITH_CUDA, Strategies
from .device import UNNAMED_GPU, local_gpus

INTERPRETED_FOR = known("h200")
"""The GPU that plans are made for where Pallas kernels are interpreted."""

LAUNCH_US = 14
"""Microseconds of the host for a launch of a CUDA kernel by XLA's handler, outside of a graph (H100, JAX 0.11.2)."""


def outputs_of(name: str, entropy: bool = False, gradient: bool = False) -> tuple[str, ...]:
    """Names of the outputs that a kernel writes for a primitive, in the order of the declaration.

    An operation with a result per row writes the state, m and l, too.  XLA makes a result in the dtype of the input of
    the state.

    Args:
        name: Name in OPERATIONS.
        entropy: True where the entropy is computed too.
        gradient: True where a forward kernel also writes the gradient of the losses.
    """
    operation = OPERATIONS[name]
    if operation.backward or not operation.per_row:
        return operation.always
    named = {"m", "l", *(("entropy",) if entropy else ())}
    if operation.result.dtype == "accumulator":
        named.add(operation.result.name)
    if gradient:
        named |= {output.name for output in operation.outputs if output.kind == "element"}
    return tuple(output.name for output in operation.outputs if output.name in named)


def array_view(shape: tuple[int, ...], dtype: str) -> View:
    """An array of the score options, which XLA lays out contiguously; its step along axes of size 1 is 0."""
    strides = zip(shape, contiguous_view(shape, dtype).strides, strict=True)
    return View(tuple(0 if size == 1 else step for size, step in strides), dtype)


def task_for(
    name: str, outputs: tuple[str, ...], shape: tuple[int, ...], dtype: str,
    options: Mapping[str, View] = MappingProxyType({}), numbers: frozenset[str] = frozenset(),
) -> Task:  # fmt: skip
    """The task of an operation along the last axis of arrays, which XLA lays out contiguously.

    Args:
        name: Name in OPERATIONS.
        outputs: Names of the outputs that are written.
        shape, dtype: Shape and dtype of the input.
        options: The arrays of the score options, by name, each with as many axes as the input.
        numbers: Names of the operands that are one number for the call.
    """
    operation, axis = OPERATIONS[name], len(shape) - 1
    # Any dtype serves for an x that no kernel takes: the plan is XLA's.
    dtype = dtype if dtype in ITEMSIZE else "float32"
    tensors = {"x": contiguous_view(shape, dtype), **operand_views(operation, shape, axis, dtype, "int32"), **options}
    return task_of(operation, outputs, shape, axis, tensors, Flags(numbers, wide=ITEMSIZE[dtype] > 2))


MOVED = "XLA would move the axis to the end of the array, which takes a copy; its own operations need none"
"""Why no kernel competes where an axis is reduced that is not the last.

XLA's two or three reads and one write take as long as 1.9 to 2.7 copies of x there, forward, and a kernel with its two
moved arrays as long as 2.8 to 4; with the gradient of a loss 2.0 to 2.7 and 3.0 to 4 (H100, JAX 0.11.2).
"""


def needs_move(shape: Sequence[int], axes: Sequence[int]) -> bool:
    """True where axes, counted from 0, are not the last ones, so that a kernel needs an array with other strides.

    Example:
        >>> needs_move((32, 512, 4096), (1,)), needs_move((32, 512, 1), (1,))
        (True, False)
    """
    reduced = [axis for axis in axes if shape[axis] != 1]
    others = [axis for axis, size in enumerate(shape) if size != 1 and axis not in axes]
    return bool(reduced and others) and max(others) > min(reduced)


def strategies_for(choice: Choice) -> Strategies:
    """The strategies that a call on JAX arrays may be planned with."""
    return JAX_WITH_CUDA if choice.backend is None else FORCED_CUDA if choice.backend == "cuda" else FOR_JAX


def planner_for(
    device: Device, choice: Choice, task: Task, dtype: str, every_backend: bool = False, no_cuda: str | None = None,
    moved: bool = False,
) -> Planner:  # fmt: skip
    """The planner for a task on a device.

    Args:
        device: The device of the arrays.
        choice: The parts of the plan that the caller forces.
        task: The task.
        dtype: Dtype of the input.
        every_backend: True to plan also with the kernels that cannot be used on this machine.
        no_cuda: The reason why the program calls no CUDA kernel unless it is forced; None where it may.
        moved: True where XLA would move the reduced axis to the end for a kernel (`needs_move`).
    """
    missing = []
    reason = None if every_backend else xla_handler.unavailable()
    if choice.backend is None:
        reason = no_cuda or reason or _why_not_cuda(device, task, every_backend)
    if reason:
        missing.append(("cuda", reason))
    if moved and choice == ANY:
        missing += [(backend, MOVED) for backend in ("cuda", "pallas")]
    if dtype not in ITEMSIZE:
        missing += [(backend, f"kernels take {', '.join(ITEMSIZE)}, not {dtype}") for backend in ("cuda", "pallas")]
    if device.kind == "cpu" and choice.backend == "pallas":
        # The interpreter runs only where it is forced, and needs some GPU's numbers to plan with.
        device = INTERPRETED_FOR
        missing.append(("pallas/cluster", "Mosaic is not interpreted"))
    elif not every_backend and find_spec("absl") is None:
        missing.append(("pallas/cluster", "JAX's Mosaic needs absl-py: pip install absl-py"))
    return Planner(device, tuple(missing), table_for(device), strategies_for(choice))


def _why_not_cuda(device: Device, task: Task, every_backend: bool) -> str | None:
    """The reason why no CUDA kernel is to be considered for a task unless it is forced; None where it is."""
    if device.kind == "cpu":
        return None
    if device.name == UNNAMED_GPU.name:
        return "JAX has no NVIDIA GPU, and the program names none"
    operation, problem = task.operation, Problem.of(task, False)
    if "mask" in task.tensors and not (operation.backward or operation.per_row):
        return "XLA would write the masked elements in another pass"
    scaled = "scale" in task.tensors or ("scale" in task.numbers and "bias" in task.tensors)
    if operation.backward and operation.scores and (scaled or "softcap" in task.numbers):
        return "XLA would compute the scores in another pass"
    # XLA calls the handler in a thread for each GPU, but it is written in Python, so the launches take turns.
    gpus = 1 if every_backend else max(1, local_gpus())
    if (problem.read_bytes + problem.write_bytes) / (device.bandwidth * 1e3) < LAUNCH_US * gpus:
        host = f"{LAUNCH_US} us of the host's time" + (f" for each of {gpus} GPUs in turn" if gpus > 1 else "")
        return f"outside of a CUDA graph, its launch takes {host}, longer than the kernel"
    return None
