"""The CUDA kernels on JAX arrays: the custom call of XLA that runs them.

The kernels are those of PyTorch, planned from the same table.  The custom call holds the machine code, so that a
compiled program needs neither the compiler nor the cache.  XLA calls the handler of kernels/cuda/xla_handler.py, which
launches the kernel.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from ..core.arrays import Array
from ..core.device import Device
from ..core.options import PLAIN
from ..core.task import Task
from ..core.view import View, row_view
from ..kernels.cuda import arguments, compile, source, xla_handler
from ..kernels.cuda.arguments import OwnLaunch
from ..kernels.cuda.params import FIELD, FIELD_OF_POINTER
from ..kernels.pallas.state import quotient
from ..kernels.request import Request
from ..ops import OPERATIONS
from ..planner.plan import Plan
from .eager import MASKED, masked, scores
from .signature import Signature, Values

TARGET = "onlinesoftmax_cuda_kernel"
"""Name of the custom call."""


def run(call: Signature, operands: Mapping[str, Array], task: Task, plan: Plan, device: Device) -> Values:
    """The results of a call by the kernel of a plan.

    Args:
        call, operands: The call.
        task: Its task.
        plan: Its plan, for the backend "cuda".
        device: The GPU that the plan is made for.
    """
    request, dtype = Request(task, plan), operands["x"].dtype
    own, given = of_scores(call), operands_of(call, operands)
    x = given["x"]
    if "lse" in task.tensors:
        # dy * exp(x - lse) by the state of the row, which has less of a rounding error.
        given["lse"], l, dy = given.pop("m"), given.pop("l"), given["dy"]
        t, low = quotient(dy, l)
        t += jnp.where(jnp.isfinite(low), low, 0)
        given["dy"] = jnp.where((l == 0) & (dy == 0), 0, t)
    if {"target", "dy"} <= given.keys() and "dlse" not in task.operation.row_operands:
        # A row whose gradient is 0 counts for nothing, also if it holds NaN; nothing reads its loss.
        given["target"] = jnp.where(given["dy"] == 0, -1, given["target"])
    shapes = {
        output.name: jax.ShapeDtypeStruct(x.shape if output.kind == "element" else x.shape[:-1], dtype)
        for output in task.written
        for dtype in (jnp.dtype(task.dtypes[output.name]),)
    }
    names = (*given, *shapes, *arguments.mail_words(request))
    results = _called(_launch(request, own, names, device), given, shapes)
    if own is not call:
        results["y"] = results["y"].astype(dtype)
    if call.name in MASKED:
        # In a row with NaN, the kernel writes NaN also where the mask is False.
        results["y"] = masked(results["y"], operands, MASKED[call.name])
    return results


def of_scores(call: Signature) -> Signature:
    """The call whose kernel runs: of scores, for a gradient that JAX multiplies by their slope.

    The kernel with the score options would multiply by the slope too.
    """
    operation, options = OPERATIONS[call.name], call.options
    has_slope = options.softcap is not None or not isinstance(options.scale, float)
    has_slope |= options.bias is not None and options.scale != 1
    return call._replace(options=PLAIN) if operation.backward and operation.scores and has_slope else call


def operands_of(call: Signature, operands: Mapping[str, Array]) -> Values:
    """The operands of `of_scores(call)`."""
    if of_scores(call) is call:
        return dict(operands)
    rest = {name: t for name, t in operands.items() if name not in call.options.arrays}
    return {**rest, "x": scores(call.options, operands["x"], operands)}


def run_own(
    launch: OwnLaunch, operands: Mapping[str, Array], results: Mapping[str, Any], device: Device
) -> Values:  # fmt: skip
    """The results of a kernel that an operation brings.

    Args:
        launch: The launch.
        operands: Contiguous arrays by the names of the launch's pointers.
        results: Shapes and dtypes by name.
        device: The GPU that the launch is made for.
    """
    names = (*operands, *results, *launch.pointers[-1:] * (launch.words > 0))
    fields = tuple(launch.pointers.index(name) for name in names)
    mail = (8 * launch.words,) if launch.words else ()
    code = compile.cubin(launch.text, device.arch)
    return _called(
        xla_handler.Launch(launch.name, fields, mail, launch.configuration, launch.values, code, launch.empty & 0xFF),
        operands, results,
    )  # fmt: skip


def _called(launch: xla_handler.Launch, operands: Mapping[str, Array], results: Mapping[str, Any]) -> Values:
    """The results of a launch, whose fields are those of the operands, the results and the mailboxes."""
    # The mailboxes are a result, and so memory of this call alone.  XLA has no 64-bit types by default.
    size = launch.mail_bytes // 4
    boxes = [jax.ShapeDtypeStruct((size,), jnp.int32)] if size else []
    register()
    kernel = jax.ffi.ffi_call(TARGET, [*results.values(), *boxes])
    return dict(zip(results, kernel(*operands.values(), launch=launch.text()), strict=False))


def _launch(request: Request, call: Signature, names: tuple[str, ...], device: Device) -> xla_handler.Launch:
    """The launch of a request, with the kernel compiled for a GPU and the tensors in the order of their names."""
    values = bytearray(arguments.values(request))
    for name, number in numbers_of(call, request.task.operation.scores).items():
        struct.pack_into("=d", values, 8 * FIELD[name], number)
    return xla_handler.Launch(
        source.kernel_name(request), tuple(FIELD_OF_POINTER[name] for name in names),
        tuple(8 * words for words in arguments.mail_words(request).values()),
        arguments.configuration(request), bytes(values), compile.cubin(source.source(request), device.arch),
    )  # fmt: skip


def numbers_of(call: Signature, makes_scores: bool) -> dict[str, float]:
    """The numbers of a call that its kernel reads, by name.

    A gradient that makes no scores has no options, but a factor, which the kernel takes for a scale.
    """
    options, found = call.options, dict(call.numbers)
    scale = options.scale if makes_scores else call.factor
    if isinstance(scale, float) and scale != 1:
        found["scale"] = scale
    if options.softcap is not None:
        found["softcap"] = options.softcap
    return found


def takes(call: Signature, operands: Mapping[str, Any]) -> bool:
    """False for a gradient of losses whose rows are sharded, which has a gradient of lse that no kernel takes."""
    operation = OPERATIONS[call.name]
    state = ("m", "l") if "lse" in operation.row_operands else ()
    return operands.keys() <= {"x", *operation.element_operands, *operation.row_operands, *call.options.arrays, *state}


def row_operands(call: Signature, operands: Mapping[str, Any]) -> dict[str, View]:
    """The operands per row of a call, which has them in dtypes of its own."""
    shape, names = operands["x"].shape, OPERATIONS[call.name].row_operands
    given = {"lse": operands["m"], **operands} if "lse" in names else operands
    return {name: row_view(shape, len(shape) - 1, given[name].dtype.name) for name in names if name in given}


@cache
def register() -> None:
    """Tell XLA about the handler."""
    register_handler(xla_handler.HANDLER, "CUDA")


def register_handler(handler: xla_handler.Handler, platform: str) -> None:
    """Tell XLA about the handler of a platform, once."""
    stages = {stage: jax.ffi.pycapsule(address) for stage, address in handler.stages.items()}
    jax.ffi.register_ffi_target(TARGET, stages, platform=platform)
