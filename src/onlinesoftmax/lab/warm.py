"""The kernels of public calls, compiled for a GPU that need not be present: `onlinesoftmax warm`.

A call without data makes the same requests as a call on the GPU (torch/prepare.py), so that the sources are the same,
and with them the names in the cache folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..core.call import Call, Settings
from ..core.declaration import Operation
from ..core.device import Device
from ..core.plan_log import Kind
from ..core.problem import Problem
from ..core.task import output_shape
from ..kernels import registry
from ..kernels.request import Request
from ..ops import OPERATIONS
from ..ops.cross_entropy.arguments import class_dim
from ..planner.measured import table_for
from ..planner.plan import Planner
from ..torch.gradients import gradient_call, with_states
from ..torch.loss_arguments import Loss
from ..torch.loss_kernels import by_cuda, loss_call, scalar_in_one_launch
from ..torch.prepare import DTYPE_NAMES, request_of
from ..torch.recording import outputs_to_keep, saved_names, split_tensors
from ..torch.small_kernels import reductions

SAMPLE = "sample"


class Asked(NamedTuple):
    """One kind of call.

    Attributes:
        function: Name of a forward operation, or SAMPLE.
        shape: Shape of a contiguous input.
        dtype: Name of its dtype.
        dim: The softmax dimension; a loss has its classes where PyTorch has them.
        gradient: True for the kernels of the gradient too.
        reduction: Reduction of a loss.
    """

    function: str
    shape: tuple[int, ...]
    dtype: str
    dim: int = -1
    gradient: bool = False
    reduction: str = "mean"

    def named(self, device: Device, what: str) -> str:
        """Name of a kernel of this call that belongs to no plan."""
        return f"{Kind(self.function, self.shape, self.dtype, device.name)}: {what}"


class Program(NamedTuple):
    """A kernel to compile.

    Attributes:
        name: What it computes, and by which plan.
        source: Its CUDA C++ text; empty for the kernels of another backend.
        request: The request; None for a kernel that belongs to no plan.
    """

    name: str
    source: str
    request: Request | None = None


def programs(asked: Asked, device: Device) -> list[Program]:
    """The kernels of a call.

    Raises:
        PlanError: no plan can run it.
        ValueError, IndexError: the shape does not fit the function.
    """
    if asked.function == SAMPLE:
        return _of_sample(asked, device)
    x = torch.empty(asked.shape, dtype=getattr(torch, asked.dtype), device="meta")
    planner, operation = _planner(device), OPERATIONS[asked.function]
    if operation.call_outputs:
        return list(_of_loss(x, asked, planner))
    dim = asked.dim % x.dim() if -x.dim() <= asked.dim < x.dim() else asked.dim
    beside, results = {}, operation.always
    if operation.has_target:
        beside = {"target": _row(operation, x, dim, torch.int64)}
        results = tuple(output.name for output in operation.outputs if output.name in (*results, "lse", "entropy"))
    call = Call(operation, x, Settings(dim), None, None, beside)
    return [_planned(asked, request) for request in _of_rows(call, results, asked.gradient, planner)]


def _planner(device: Device) -> Planner:
    """The planner for a device that has the backends that are installed here."""
    compilers = ("cuda", "cuda.core"), ("triton", "triton")
    lacking = [(name, reason) for name, module in compilers if (reason := registry.module_missing(module, name))]
    return Planner(device, tuple(lacking), table_for(device))


def _row(operation: Operation, x: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    shape = output_shape(next(each for each in operation.outputs if each.kind == "row"), tuple(x.shape), dim)
    return torch.empty(shape, dtype=dtype, device="meta")


def _of_rows(call: Call, results: tuple[str, ...], gradient: bool, planner: Planner) -> Iterator[Request]:
    """The requests of a call and of its gradients: in the main result alone, and in all of the results."""
    operation, x, dim = call.operation, call.x, call.settings.dim
    made = outputs_to_keep(call, results) if gradient else results
    yield request_of(call, made, planner)
    if not gradient:
        return
    outputs = {}
    for output in operation.written(made):
        dtype = getattr(torch, output.dtype_of(DTYPE_NAMES[x.dtype], DTYPE_NAMES[x.dtype]))
        outputs[output.name] = torch.empty(output_shape(output, tuple(x.shape), dim), dtype=dtype, device="meta")
    tensors = split_tensors(call)[1]
    every = {**tensors, **outputs}
    saved = {name: every[name] for name in saved_names(call, tensors, made, False)}
    main, *others = results
    operands = [operand.name for operand in OPERATIONS[operation.gradient_name].operands]
    dys = {"dy": torch.empty_like(outputs[main])}
    every_dy = dys | {f"d{name}": torch.empty_like(outputs[name]) for name in others if f"d{name}" in operands}
    for given in [dys, every_dy] if len(every_dy) > 1 else [dys]:
        # A gradient that is missing among the saved ones follows from the result.
        known = with_states(call, saved, given, lambda call, missing: tuple(every[name] for name in missing))
        yield request_of(gradient_call(call, known, given, x.dtype), ("y",), planner)


def _of_loss(x: torch.Tensor, asked: Asked, planner: Planner) -> Iterator[Program]:
    """The kernels of a loss: its own, and those before and after it."""
    from ..kernels.cuda import multiply, reduction

    operation, dim = OPERATIONS[asked.function], class_dim(x)
    target = _row(operation, x, dim, torch.int64)
    loss = Loss(Settings(dim, x.dtype), reduction=asked.reduction)
    call = loss_call(x, target, None, loss)
    if asked.reduction == "none" or (asked.gradient and x.dtype == torch.float16):
        rows = call if asked.reduction == "none" else call.with_settings(dtype=loss.wide(x))
        yield from (_planned(asked, each) for each in _of_rows(rows, ("loss",), asked.gradient, planner))
        return
    written = ("y",) if asked.gradient else ()

    def backend_of(call: Call, outputs: tuple[str, ...]) -> str:
        return request_of(call, outputs, planner).plan.backend

    if scalar := scalar_in_one_launch(call, loss, asked.gradient, backend_of):
        yield _planned(asked, request_of(by_cuda(call), (scalar, *written), planner))
    else:
        if asked.gradient:
            call = call.with_operands(dy=torch.empty((), dtype=loss.wide(x), device="meta"))
        follows = asked.gradient and asked.reduction == "mean"
        yield _planned(asked, request_of(call, ("loss", *written), planner, follows))
        for name, each in zip(("total", "divisor"), reductions(x, target, None, loss, asked.gradient), strict=True):
            if each is not None:
                yield Program(asked.named(planner.device, name), reduction.source(each))
    if asked.gradient:
        yield Program(
            asked.named(planner.device, "gradient times one number"),
            multiply.source(asked.dtype, asked.dtype, asked.dtype),
        )


def _of_sample(asked: Asked, device: Device) -> list[Program]:
    """The kernels of `sample`: without a filter, and with filters."""
    from ..sampling.kernels import source, unfiltered
    from ..sampling.kernels.which_kernel import refusal

    x = torch.empty(asked.shape, dtype=getattr(torch, asked.dtype), device="meta")
    rows, cols = x.numel() // x.shape[-1], x.shape[-1]
    if reason := refusal(asked.dtype, rows, device):
        raise ValueError(f"sample: {reason}")
    given = rows, cols, asked.dtype, cols * x.element_size() % 16 == 0
    texts = {"without a filter": unfiltered.KERNEL.source(unfiltered.shape_of(*given, False, device))}
    few = source.SHORT.most
    for what, listed in {"with filters": None, "with one top_k": few, f"with one top_k above {few}": few + 1}.items():
        shape = source.shape_of(*given, device, listed)
        if shape is not None and (text := source.KERNEL.source(shape)) not in texts.values():
            texts[what] = text
    return [Program(asked.named(device, what), text) for what, text in texts.items()]


def _planned(asked: Asked, request: Request) -> Program:
    from ..kernels.cuda.source import source

    plan, kind = request.plan, Kind(request.operation.name, asked.shape, asked.dtype, request.plan.device)
    # Calls that read other tensors take other kernels, as a gradient in one result and in several.
    given = ", ".join(Problem.of(request.task).given)
    name = f"{kind}: {plan.backend}/{plan.strategy}{given and f' with {given}'}"
    return Program(name, source(request) if plan.backend == "cuda" else "", request)


def compile_program(program: Program, device: Device) -> str:
    """Compile a kernel into its cache, and return what was done: "compiled", "was there", or the reason for nothing.

    Raises:
        RuntimeError: the compiler is missing, or refuses the kernel.
        OSError: the cache folder cannot be written.
    """
    request = program.request
    if program.source:
        from ..core.cache import load_entry
        from ..kernels.cuda import compile

        if reason := registry.module_missing("cuda.core", "cuda"):
            raise RuntimeError(reason)
        before = compile.compiled
        compile.cubin(program.source, device.arch)
        if compile.compiled == before:
            return "was there"
        if load_entry(f"{compile.key(program.source, device.arch)}.cubin") is None:
            raise OSError("the cache folder keeps no kernel: `onlinesoftmax cache` shows it")
        return "compiled"
    if request is None or request.plan.backend == "eager":
        return "PyTorch's operations run"
    registry.load(request.plan.backend).compile_request(request, device)
    return "compiled, in Triton's own cache"
