"""Compile the kernels of a plan for a GPU that need not be present, and read registers, spills and listings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ...core.device import Device
from ..report import Kernel, Listings, cuobjdump, occupancy
from .launch import Launch, Program

SHORT = {
    "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "bool": "i1",
    "int64": "i64", "int32": "i32", "int16": "i16", "int8": "i8", "uint8": "u8",
}  # fmt: skip
"""Triton's names of dtypes."""


def compile_program(program: Program, dtypes: Mapping[str, str], device: Device) -> list[Kernel]:
    """The kernels of a program for a device, in launch order.

    Args:
        program: Launches whose tensors have the names of Pointers or of the program's scratch memory.
        dtypes: Dtype of each of the tensors, operands and outputs.
        device: The device, present or not.

    Raises:
        RuntimeError: Triton's interpreter is on, and it compiles nothing.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError(
            "TRITON_INTERPRET=1 is set: the interpreter compiles nothing; unset it to see the machine code"
        )
    types = {name: f"*{SHORT[dtype]}" for name, (_, dtype) in program.scratch.items()}
    types |= {name: f"*{SHORT[dtype]}" for name, dtype in dtypes.items()}
    return [_compile(launch, types, device) for launch in program.launches]


def _compile(launch: Launch, types: dict[str, str], device: Device) -> Kernel:
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    hints: dict[tuple[int, ...], Any] = {}
    plain = set(launch.kernel.do_not_specialize)
    arguments = [*(_types(name, types) for name in launch.tensors), *launch.numbers]
    for i, name in enumerate(launch.kernel.arg_names):
        if i >= len(arguments):
            signature[name] = "constexpr"
            constants[(i,)] = launch.constants[i - len(arguments)]
        else:
            signature[name] = _specialise(arguments[i], (i,), name in plain, constants, hints)
    major, minor = device.compute_capability
    compiled = triton.compile(
        ASTSource(launch.kernel, signature, constants, hints),
        target=GPUTarget("cuda", 10 * major + minor, 32),
        options={"num_warps": launch.warps},
    )
    cubin, shared = compiled.asm["cubin"], int(compiled.metadata.shared)
    usage = dict(re.findall(r"(\w+):(\d+)", cuobjdump("-res-usage", cubin)))
    registers = int(usage["REG"])
    return Kernel(
        name=launch.kernel.__name__,
        registers=registers,
        spills=int(usage["STACK"]),
        shared_memory=shared,
        warps=launch.warps,
        occupancy=occupancy(device, launch.warps, registers, shared),
        listings=Listings(
            {
                "ttir": compiled.asm["ttir"],
                "ptx": compiled.asm["ptx"],
                "sass": partial(cuobjdump, "-sass", cubin),
            }
        ),
    )


def _types(names: Any, types: dict[str, str]) -> Any:
    """The types of the tensors of a tuple; a number is 64 bits."""
    if names is None:
        return None
    found = [None if name is None else types.get(name, "i64") for name in names]
    return type(names)(*found) if hasattr(names, "_fields") else tuple(found)


def _specialise(value: Any, at: tuple[int, ...], plain: bool, constants: dict[Any, Any], hints: dict[Any, Any]) -> Any:
    """The type that Triton gives an argument at launch; adds to `constants` and `hints` as the launch would."""
    if isinstance(value, tuple):
        # Triton specialises the numbers of a tuple, even where do_not_specialize names the argument.
        items = [_specialise(item, (*at, i), False, constants, hints) for i, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if value is None:
        constants[at] = None
        return "constexpr"
    if isinstance(value, str):
        if value.startswith("*"):
            hints[at] = [["tt.divisibility", 16]]
        return value
    if value == 1 and not plain:
        constants[at] = 1
        return "constexpr"
    if value % 16 == 0 and not plain:
        hints[at] = [["tt.divisibility", 16]]
    return "i32" if -(2**31) <= value < 2**31 else "i64"
