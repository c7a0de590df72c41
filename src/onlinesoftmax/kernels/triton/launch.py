"""Launches: prepared once for a request, then run with little host time.

Triton's own launch binds and specialises the arguments each time, which takes about twenty microseconds.  Only the
first run of a `Launch` does that, and compiles; every later run calls the compiled kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl

from ...core.accumulators import Accumulator, Argmax, PlainSum, ScaledSum
from ...core.view import View, power_of_two_divisor
from ..registry import LOADING
from ..request import Request
from .formulas import OpConstants
from .operands import READ_FIELDS, TENSORS, Place, Places, Pointers, Units

TL_DTYPES = {"float16": tl.float16, "bfloat16": tl.bfloat16, "float32": tl.float32, "float64": tl.float64}
TORCH_DTYPES = {name: getattr(torch, name) for name in (*TL_DTYPES, "int32", "int64")}
KINDS: dict[type[Accumulator], tuple[str, ...]] = {
    ScaledSum: ("scaled",), PlainSum: ("plain",), Argmax: ("key", "index"),
}  # fmt: skip
"""The parts of each accumulator in a state, for state.py."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch: tensors by name, and every other argument.

    Attributes:
        kernel: The @triton.jit function.
        programs: Size of its one-dimensional grid.
        tensors: Names of its tensors, which come first: Pointers, tuples of names, or None where a kernel takes none.
        numbers: Its integers and tuples of integers, which follow.
        constants: Its constexpr arguments, which come last.
        warps: Warps of a program.
    """

    kernel: Any
    programs: int
    tensors: tuple[tuple[str | None, ...] | None, ...]
    numbers: tuple[Any, ...]
    constants: tuple[Any, ...]
    warps: int


@dataclass(frozen=True)
class TritonRequest(Request):
    """A request in the terms of these kernels."""

    @cached_property
    def op_constants(self) -> OpConstants:
        """OP of every kernel."""
        operation, task = self.operation, self.task
        kinds = [(one.name, KINDS[one.kind]) for one in task.sums]
        parts = [(name if len(of_one) == 1 else f"{name}_{kind}", kind) for name, of_one in kinds for kind in of_one]
        return OpConstants(
            operation.name,
            operation.scores,
            operation.has_target,
            operation.backward or (task.writes_elements and "dy" in task.tensors),
            task.writes_elements,
            task.row_outputs,
            tuple(TENSORS.index(name) for name in task.row_outputs),
            tuple(name for name, _ in parts),
            tuple(kind for _, kind in parts),
            Argmax in (one.kind for one in task.sums),
            # A gradient needs m only to find the rows whose gradient it must set to zero because of a mask.
            operation.scores or (task.zero and "mask" in operation.options),
            TL_DTYPES[task.accumulator],
            task.exact_sums,
            task.zero,
            READ_FIELDS,
        )

    @cached_property
    def pointers(self) -> Any:
        """Names of the tensors and numbers that a kernel reads or writes."""
        return Pointers(*(name if self.has(name) else None for name in Pointers._fields))

    @cached_property
    def units(self) -> Any:
        """The `Units` of all tensors."""
        units = {name: view.unit for name, view in self.task.tensors.items() if name in TENSORS}
        return Units(**units, cols=self.task.cols_unit)

    @cached_property
    def column_units(self) -> Any:
        """The `Units` where rows lie side by side: those of the input and of the outputs.

        A unit then divides all strides of a tensor except the first row stride, which must be 1.
        """
        views = {name: self.task.tensors[name] for name in ("x", *self.task.outputs)}
        return Units(**{
            name: power_of_two_divisor(view.col, *view.outer[1:]) if view.outer[0] == 1 else 1
            for name, view in views.items()
        })  # fmt: skip

    @cached_property
    def adjacent_unit(self) -> int:
        """The power of two that divides the number of rows side by side."""
        return power_of_two_divisor(self.task.adjacent)

    def places(self, adjacent: bool = False) -> Any:
        """The `Places` of all tensors; `adjacent` is True where a program owns rows that lie side by side."""
        task, units = self.task, self.column_units if adjacent else self.units

        def place(name: str, view: View) -> Place:
            unit = getattr(units, name, 1)
            outer, first = (view.outer[1:] or (0,), view.outer[0]) if adjacent else (view.outer, 0)
            return Place(tuple(stride // unit for stride in outer), view.col, first)

        sizes = (task.sizes[1:] or (1,)) if adjacent else task.sizes
        views = {name: view for name, view in task.tensors.items() if view.outer}
        views |= {"query": task.query} if task.query else {}
        places = {name: place(name, view) for name, view in views.items()}
        return Places(**places, sizes=sizes[:-1], diagonal=task.diagonal)

    @property
    def cols_in_units(self) -> int:
        """The row length as a multiple of its unit."""
        return self.task.cols // self.task.cols_unit


@dataclass
class Program:
    """The launches of a plan and their scratch memory.

    Attributes:
        launches: In stream order.
        scratch: Number of elements and dtype of each buffer, by its name.
    """

    launches: list[Launch]
    scratch: dict[str, tuple[int, str]] = field(default_factory=dict)

    def bind(self, first: str) -> Callable[[torch.Tensor, torch.Tensor, dict[str, Any]], None]:
        """The function run(x, y, more) for tensors of the planned shapes and dtypes.

        y is the output named `first`; `more` has every other operand and output by name.
        """
        steps = [_Step(launch, first) for launch in self.launches]
        if len(steps) == 1 and not self.scratch:
            return steps[0].run
        scratch = {name: (size, TORCH_DTYPES[dtype]) for name, (size, dtype) in self.scratch.items()}

        def run(x: torch.Tensor, y: torch.Tensor, more: dict[str, Any]) -> None:
            rooms = {name: torch.empty(size, dtype=dtype, device=x.device) for name, (size, dtype) in scratch.items()}
            for step in steps:
                step.run(x, y, more | rooms)

        return run


class _Step:
    """One launch, and its compiled kernel after the first run."""

    def __init__(self, launch: Launch, first: str) -> None:
        self.launch, self.first = launch, first
        self.arguments = (*launch.numbers, *launch.constants)
        # Most calls read x and write y only, and for them every microsecond counts.
        self.plain = launch.tensors == (Pointers("x", "y"),)
        self.compiled: Callable[..., None] | None = None

    def run(self, x: torch.Tensor, y: torch.Tensor, more: dict[str, Any]) -> None:
        tensors = (Pointers(x, y),) if self.plain else self._named({**more, "x": x, self.first: y})
        if self.compiled is not None:
            self.compiled(*tensors, *self.arguments)
            return
        grid = (self.launch.programs, 1, 1)
        # Triton's compiler and its interpreter have state that all threads share.
        with LOADING:
            kernel = self.launch.kernel[grid](*tensors, *self.arguments, num_warps=self.launch.warps)
        # The interpreter compiles nothing and returns None.
        if isinstance(kernel, triton.compiler.CompiledKernel):
            self.compiled = kernel[grid]

    def _named(self, given: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(_tensors(names, given) for names in self.launch.tensors)


def _tensors(names: Any, given: dict[str, Any]) -> Any:
    """The tensors of these names, in a tuple of the same type."""
    if names is None:
        return None
    tensors = [None if name is None else given[name] for name in names]
    return type(names)(*tensors) if hasattr(names, "_fields") else tuple(tensors)
