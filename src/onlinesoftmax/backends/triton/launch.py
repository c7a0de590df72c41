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

from ...layout import Layout
from ...operation import OPERATIONS
from ...plan import Plan

TL_DTYPES = {"float16": tl.float16, "bfloat16": tl.bfloat16, "float32": tl.float32, "float64": tl.float64}
TORCH_DTYPES = {name: getattr(torch, name) for name in TL_DTYPES}


@dataclass(frozen=True)
class Launch:
    """One kernel launch, its tensors named and its other arguments bound.

    Attributes:
        kernel: The @triton.jit function.
        programs: Size of its one-dimensional grid.
        tensors: Names of its pointer arguments, which come first.
        numbers: Its integers and tuples of them, which follow.
        constants: Its constexpr arguments, which come last.
        warps: Warps of a program.
    """

    kernel: Any
    programs: int
    tensors: tuple[str, ...]
    numbers: tuple[Any, ...]
    constants: tuple[Any, ...]
    warps: int


@dataclass(frozen=True)
class Request:
    """What a strategy needs to write its launches: the plan, where rows lie, and the dtypes."""

    operation: str
    plan: Plan
    layout: Layout
    x_dtype: str
    y_dtype: str

    @property
    def accumulator(self) -> str:
        """Name of the dtype that states are kept in."""
        return "float64" if "float64" in (self.x_dtype, self.y_dtype) else "float32"

    @property
    def op_constants(self) -> tuple[Any, ...]:
        """OP, PER_ROW, ACC and EXACT, in the order that every kernel takes them."""
        exact = self.y_dtype in ("float32", "float64")
        return self.operation, OPERATIONS[self.operation].per_row, TL_DTYPES[self.accumulator], exact

    @property
    def row_numbers(self) -> tuple[Any, ...]:
        """sizes, x_strides, y_strides as `row_offset` takes them: no size for the slowest, strides in units."""
        x_unit, y_unit, _ = self.layout.units
        return self.layout.sizes[:-1], in_units(self.layout.x_strides, x_unit), in_units(self.layout.y_strides, y_unit)

    @property
    def cols_in_units(self) -> int:
        return self.layout.cols // self.layout.units[2]


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

    def bind(self) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """The function that runs this program on tensors (x, y) of the shape it was planned for."""
        steps = [_Step(launch) for launch in self.launches]
        if len(steps) == 1 and not self.scratch:
            return steps[0].run
        scratch = {name: (size, TORCH_DTYPES[dtype]) for name, (size, dtype) in self.scratch.items()}

        def run(x: torch.Tensor, y: torch.Tensor) -> None:
            tensors = {name: torch.empty(size, dtype=dtype, device=x.device) for name, (size, dtype) in scratch.items()}
            tensors["x"], tensors["y"] = x, y
            for step in steps:
                step.call(*[tensors[name] for name in step.launch.tensors])

        return run


class _Step:
    """One launch that remembers its compiled kernel."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.arguments = (*launch.numbers, *launch.constants)
        self.compiled: Callable[..., None] | None = None

    def run(self, x: torch.Tensor, y: torch.Tensor) -> None:
        if self.compiled is None:
            self.call(x, y)
        else:
            self.compiled(x, y, *self.arguments)

    def call(self, *tensors: torch.Tensor) -> None:
        if self.compiled is not None:
            self.compiled(*tensors, *self.arguments)
            return
        grid = (self.launch.programs, 1, 1)
        kernel = self.launch.kernel[grid](*tensors, *self.arguments, num_warps=self.launch.warps)
        # The interpreter compiles nothing and returns None.
        if isinstance(kernel, triton.compiler.CompiledKernel):
            self.compiled = kernel[grid]
