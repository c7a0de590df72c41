"""Compile a plan's kernels for a GPU that need not be here, and read what the compiler made of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ...device import Device
from .launch import Launch, Program
from .operands import Pointers

SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "bool": "i1"}


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel.

    Attributes:
        name: Name of the kernel.
        registers: 32-bit registers of a thread.
        spills: Bytes of a thread's stack: what did not fit its registers goes to slow local memory.
        shared_memory: Bytes of shared memory of a block.
        warps: Warps of a block.
        occupancy: Part of the device's resident threads that these blocks can be, 0 to 1.
        listings: Text by name: "ttir", "ptx", and "sass".
    """

    name: str
    registers: int
    spills: int
    shared_memory: int
    warps: int
    occupancy: float
    listings: dict[str, str] = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        """The numbers, without the listings, for JSON."""
        return {key: value for key, value in asdict(self).items() if key != "listings"}


def compile_program(program: Program, dtypes: dict[str, str], device: Device) -> list[Kernel]:
    """The kernels of a program for a device, in launch order, each once.

    Args:
        program: Launches, their tensors named as in Pointers.
        dtypes: Dtype of each of those tensors, and of "y", the output.
        device: The device, present or not.

    Raises:
        RuntimeError: Triton's interpreter is on, which compiles nothing.
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
    usage, sass = _read_cubin(compiled.asm["cubin"])
    registers, spills = int(usage["REG"]), int(usage["STACK"])
    shared = int(compiled.metadata.shared)
    return Kernel(
        name=launch.kernel.__name__,
        registers=registers,
        spills=spills,
        shared_memory=shared,
        warps=launch.warps,
        occupancy=_occupancy(device, launch.warps, registers, shared),
        listings={"ttir": compiled.asm["ttir"], "ptx": compiled.asm["ptx"], "sass": sass},
    )


def _types(name: Any, types: dict[str, str]) -> Any:
    """The type of a tensor, or of each of the Pointers; the numbers among those are 64 bits."""
    if isinstance(name, Pointers):
        return Pointers(*(None if pointer is None else types.get(pointer, "i64") for pointer in name))
    return types[name]


def _specialise(value: Any, at: tuple[int, ...], plain: bool, constants: dict[Any, Any], hints: dict[Any, Any]) -> Any:
    """The type Triton gives an argument at launch, with what it makes a constant or knows the divisor of."""
    if isinstance(value, tuple):
        # Triton specialises the numbers of a tuple whatever do_not_specialize says.
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


def _read_cubin(cubin: bytes) -> tuple[dict[str, str], str]:
    """Resource usage by name and the disassembly, by the cuobjdump that Triton brings."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)

        def cuobjdump(option: str) -> str:
            command = [str(tools / "cuobjdump"), option, str(path)]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        # nvdisasm, which -sass calls, is looked up beside cuobjdump.
        return dict(re.findall(r"(\w+):(\d+)", cuobjdump("-res-usage"))), cuobjdump("-sass")


def _occupancy(device: Device, warps: int, registers: int, shared: int) -> float:
    """Resident threads over the most there can be.

    Registers are given to warps in lots of 256, and a block takes 1 KB of shared memory for itself
    (CUDA occupancy calculator).
    """
    per_warp = -(-registers * 32 // 256) * 256
    blocks = min(
        device.threads // (32 * warps),
        device.registers // (per_warp * warps),
        device.shared_memory // (shared + 1024),
        32,
    )
    return blocks * warps * 32 / device.threads
