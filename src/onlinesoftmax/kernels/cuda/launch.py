"""Launches: everything that a shape tells is laid out once; a call fills in its pointers and its stream.

A kernel has one parameter, the struct Params of operands.cuh: eight bytes a field, in the order of `_values`.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ...planner.strategies.cuda import slice_chunks
from ..request import Request
from . import compile, driver
from .source import BESIDE, kernel_name, shared_memory, source, vector

POINTERS = ("x", "y", *BESIDE, "scale", "mail")
"""Fields that a call fills in, by the names of what they are filled with."""

Run = Callable[[torch.Tensor, torch.Tensor, dict[str, Any]], None]


class _Call:
    """The arguments of one launch, in memory that the driver reads; for one thread at a time.

    Attributes:
        fields: Params.
        config: The launch, its stream included.
        arguments: Of cuLaunchKernelEx, in the types that ctypes takes as they are.
    """

    def __init__(self, values: bytes, config: tuple[Any, ...], kernel: int) -> None:
        self.fields = (ctypes.c_uint64 * (len(values) // 8)).from_buffer_copy(values)
        self.config = driver.launch_config(*config)
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self.fields))
        addresses = (ctypes.addressof(self.config), kernel, ctypes.addressof(self._parameters), None)
        self.arguments = tuple(ctypes.c_void_p(address) for address in addresses)


def bind(request: Request) -> Run:
    """The function run(x, y, more) on tensors of the shapes and the dtypes that it was planned for, of one device."""
    plan, values = request.plan, _values(request)
    dynamic = shared_memory(request)
    cluster = plan.splits if plan.strategy == "cluster" else 1
    team = plan.splits if plan.strategy == "grid" else 1
    config = (plan.programs // team, team, 32 * plan.warps, dynamic, cluster, plan.strategy == "grid")
    beside = tuple((POINTERS.index(name), name) for name in POINTERS[2:] if _is_given(request, name))
    numbers = [("scale", len(POINTERS))] if "scale" in request.task.numbers else []
    numbers += [("softcap", len(POINTERS) + 1)] if request.has("softcap") else []
    mail_words = _mail_words(request)
    more_than_pointers = bool(beside or numbers or mail_words)
    launch, stream_of = driver.library().cuLaunchKernelEx, torch._C._cuda_getCurrentRawStream
    spare: list[_Call] = []

    def new_call(index: int) -> _Call:
        return _Call(values, config, _loaded(source(request), kernel_name(request), index, dynamic, cluster))

    def fill_in(fields: Any, more: dict[str, Any], index: int, stream: int) -> None:
        for field, name in beside:
            fields[field] = more[name].data_ptr()
        for name, field in numbers:
            fields[field] = more[name] & _MASK
        if mail_words:
            fields[len(POINTERS) - 1] = _mail(mail_words, index, stream).data_ptr()

    def run(x: torch.Tensor, y: torch.Tensor, more: dict[str, Any]) -> None:
        index = x.get_device()
        try:
            # Taking from a list is one step for any thread, so no two fill in the same call.
            call = spare.pop()
        except IndexError:
            call = new_call(index)
        fields = call.fields
        fields[0], fields[1] = x.data_ptr(), y.data_ptr()
        call.config.stream = stream = stream_of(index)
        if more_than_pointers:
            fill_in(fields, more, index, stream)
        status = launch(*call.arguments)
        if status:
            status = _again(status, call, index)
        spare.append(call)
        driver.check(status, f"launching {plan.backend}/{plan.strategy}")

    return run


def _again(status: int, call: _Call, index: int) -> int:
    """The status of the same launch with the device's context current, if that was all that it lacked."""
    if status != driver.INVALID_CONTEXT:
        return status
    driver.make_current(index)
    again: int = driver.library().cuLaunchKernelEx(*call.arguments)
    return again


_MASK = (1 << 64) - 1


def _is_given(request: Request, name: str) -> bool:
    return name in request.dtypes


def _values(request: Request) -> bytes:
    """Params, with zeros where a call fills in."""
    layout = request.layout
    dims = len(layout.sizes)
    sides = layout.sides
    places: list[int] = []
    for name in ("x", "y", *BESIDE, "query"):
        strides, col = sides.get(name, ((0,) * dims, 0))
        places += [*strides, col]
    chunks = slice_chunks(layout.cols // vector(request), request.plan.splits)
    numbers = [layout.rows, layout.cols, request.task.diagonal or 0, chunks, request.plan.threads.shared]
    empty = len(POINTERS) + 2
    return struct.pack(
        f"={empty}Q{len(numbers) + dims + len(places)}q", *(0,) * empty, *numbers, *layout.sizes, *places
    )


@cache
def _loaded(text: str, name: str, index: int, dynamic: int, cluster: int) -> int:
    """A kernel, compiled or found, and loaded on a device."""
    major, minor = torch.cuda.get_device_capability(index)
    kernel = driver.load_kernel(compile.cubin(text, f"sm_{major}{minor}"), name)
    if dynamic:
        driver.set_attribute(kernel, driver.MAX_DYNAMIC_SHARED_SIZE_BYTES, dynamic, index)
    if cluster > driver.PORTABLE_CLUSTER:
        driver.set_attribute(kernel, driver.NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, index)
    return kernel


def _mail_words(request: Request) -> int:
    """Words of the mailboxes of all teams: two slots for every block from every block, of one to three words."""
    plan = request.plan
    if plan.strategy != "grid" or plan.splits == 1 or not request.operation.reduces:
        return 0
    return (
        plan.programs
        // plan.splits
        * 2
        * plan.splits**2
        * (3 if request.task.accumulator == "float64" else 2 if request.task.exact else 1)
    )


def _mail(words: int, index: int, stream: int) -> torch.Tensor:
    """Empty mailboxes: kernels leave them so, and on one stream only one kernel has them at a time."""
    if torch.cuda.is_current_stream_capturing():
        # A graph may be replayed beside anything, so it has its own.
        return torch.full((words,), -1, dtype=torch.int64, device=index)
    return _mail_of_stream(words, index, stream)


@cache
def _mail_of_stream(words: int, index: int, stream: int) -> torch.Tensor:
    return torch.full((words,), -1, dtype=torch.int64, device=index)
