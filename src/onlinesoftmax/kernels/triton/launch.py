"""Launches: planned once for a shape, then run with the least the host can do.

Triton's own launch binds and specialises the arguments anew each time, some twenty microseconds.
The first run of a `Launch` goes that way and compiles; every later one calls what it returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl

from ...core.layout import power_of_two_divisor
from ..request import Request
from .operands import Place, Places, Pointers

TL_DTYPES = {"float16": tl.float16, "bfloat16": tl.bfloat16, "float32": tl.float32, "float64": tl.float64}
TORCH_DTYPES = {name: getattr(torch, name) for name in TL_DTYPES}


@dataclass(frozen=True)
class Launch:
    """One kernel launch, its tensors named and its other arguments bound.

    Attributes:
        kernel: The @triton.jit function.
        programs: Size of its one-dimensional grid.
        tensors: Names of its tensors, which come first, some of them gathered in Pointers.
        numbers: Its integers and tuples of them, which follow.
        constants: Its constexpr arguments, which come last.
        warps: Warps of a program.
    """

    kernel: Any
    programs: int
    tensors: tuple[str | Pointers, ...]
    numbers: tuple[Any, ...]
    constants: tuple[Any, ...]
    warps: int


@dataclass(frozen=True)
class TritonRequest(Request):
    """A request in the terms of these kernels."""

    @property
    def op_constants(self) -> tuple[Any, ...]:
        """OP, PER_ROW, REDUCES, ACC, EXACT and ZERO, in the order that every kernel takes them."""
        operation, acc = self.operation, TL_DTYPES[self.task.accumulator]
        return operation.name, not self.task.writes_elements, operation.reduces, acc, self.task.exact, self.task.zero

    @property
    def pointers(self) -> Pointers:
        """The names of what a kernel reads."""
        return Pointers(*(name if self.has(name) else None for name in Pointers._fields))

    @property
    def units(self) -> tuple[int, ...]:
        """What divides the row strides of x, those of y and the columns, then those of dy, bias, mask and logits."""
        layout = self.layout
        units = {name: side.unit for name, side in layout.sides.items()}
        rest = (units.get(name, 1) for name in ("dy", "bias", "mask", "logits"))
        return (layout.x.unit, units["y"], layout.cols_unit, *rest)

    @property
    def column_units(self) -> tuple[int, ...]:
        """The same where rows lie side by side: the third divides the number of those."""
        layout = self.layout
        adjacent = power_of_two_divisor(layout.adjacent)
        return (layout.column_unit("x"), layout.column_unit("y"), adjacent, 1, 1, 1, 1)

    def places(self, beside: bool = False) -> Places:
        """Where rows lie; with the fastest dimension apart where a program takes rows that lie side by side."""
        layout = self.layout
        units = self.column_units if beside else self.units
        unit = dict(zip(("x", "y", "cols", "dy", "bias", "mask", "logits"), units, strict=True))

        def place(name: str, strides: tuple[int, ...], col: int) -> Place:
            if not beside:
                return Place(in_units(strides, unit.get(name, 1)), col)
            return Place(in_units(strides[1:] or (0,), unit.get(name, 1)), col, strides[0])

        sizes = (layout.sizes[1:] or (1,)) if beside else layout.sizes
        return Places(
            sizes[:-1],
            diagonal=self.task.diagonal,
            **dict[str, Any]({name: place(name, *side) for name, side in layout.sides.items()}),
        )

    @property
    def cols_in_units(self) -> int:
        return self.layout.cols // self.layout.cols_unit


def in_units(strides: tuple[int, ...], unit: int) -> tuple[int, ...]:
    """Strides as multiples of the unit that divides them."""
    return tuple(stride // unit for stride in strides)


@dataclass
class Program:
    """The launches of a plan and the scratch memory they share.

    Attributes:
        launches: In stream order.
        scratch: Number of elements and dtype of each buffer, by its name.
    """

    launches: list[Launch]
    scratch: dict[str, tuple[int, str]] = field(default_factory=dict)

    def bind(self) -> Callable[[torch.Tensor, torch.Tensor, dict[str, Any]], None]:
        """The function run(x, y, more) on tensors of the shapes and the dtypes that it was planned for."""
        steps = [_Step(launch) for launch in self.launches]
        if len(steps) == 1 and not self.scratch:
            return steps[0].run
        scratch = {name: (size, TORCH_DTYPES[dtype]) for name, (size, dtype) in self.scratch.items()}

        def run(x: torch.Tensor, y: torch.Tensor, more: dict[str, Any]) -> None:
            rooms = {name: torch.empty(size, dtype=dtype, device=x.device) for name, (size, dtype) in scratch.items()}
            for step in steps:
                step.run(x, y, more | rooms)

        return run


class _Step:
    """One launch that remembers its compiled kernel."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.arguments = (*launch.numbers, *launch.constants)
        # x alone, written to y: what most calls are, and for them every microsecond counts.
        self.plain = launch.tensors == (Pointers("x"), "y")
        self.compiled: Callable[..., None] | None = None

    def run(self, x: torch.Tensor, y: torch.Tensor, more: dict[str, Any]) -> None:
        tensors = (Pointers(x), y) if self.plain else self._named({"x": x, "y": y, **more})
        if self.compiled is not None:
            self.compiled(*tensors, *self.arguments)
            return
        grid = (self.launch.programs, 1, 1)
        kernel = self.launch.kernel[grid](*tensors, *self.arguments, num_warps=self.launch.warps)
        # The interpreter compiles nothing and returns None.
        if isinstance(kernel, triton.compiler.CompiledKernel):
            self.compiled = kernel[grid]

    def _named(self, given: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(
            given[name]
            if isinstance(name, str)
            else Pointers(*[None if pointer is None else given[pointer] for pointer in name])
            for name in self.launch.tensors
        )
