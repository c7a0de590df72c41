"""From CUDA C++ to machine code: NVRTC through cuda.core, and a cache on disk.

A kernel is compiled once for a bucket, an architecture and a version of NVRTC, whatever the process.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import re
from contextlib import suppress
from functools import cache
from typing import Any

from ...core.cache import cache_folder, write_whole
from ...core.device import Device
from ..report import Kernel, cuobjdump, find_cuobjdump, occupancy
from ..request import Request
from .source import kernel_name, shared_memory
from .source import source as source_of

STANDARD = "c++17"

compiled = 0
"""Kernels that this process has compiled, rather than found: a test counts."""


def cubin(source: str, arch: str) -> bytes:
    """The machine code of a source for an architecture such as "sm_90", from the cache if it is there."""
    path = cache_folder() / f"{key(source, arch)}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        code, _, _ = build(source, arch)
        # Without a place to write, nothing is kept.
        with suppress(OSError):
            write_whole(path, code)
        return code


def build(source: str, arch: str) -> tuple[bytes, str, Any]:
    """(machine code, what the compiler says of registers and spills, the program): compiled now, no GPU needed.

    Raises:
        RuntimeError: it does not compile; NVRTC's messages name file and line.
    """
    from cuda.core import Program, ProgramOptions

    global compiled
    compiled += 1
    log = io.StringIO()
    # NVRTC's own cache would return without a word on registers.
    program = Program(source, "c++", ProgramOptions(arch=arch, std=STANDARD, ptxas_options=["-v"], no_cache=True))
    try:
        code = bytes(program.compile("cubin", logs=log).code)
    except Exception as error:  # cuda.core's own kinds are not public
        raise RuntimeError(str(error)) from error
    return code, log.getvalue(), program


def _ptx(program: Any) -> bytes:
    """The PTX that NVRTC made the machine code of a program from.

    Asked for it, cuda.core asks the driver whether it could load that, and fails where there is none.
    """
    from cuda.bindings import nvrtc

    status, size = nvrtc.nvrtcGetPTXSize(program.handle)
    code = bytes(size)
    if status or nvrtc.nvrtcGetPTX(program.handle, code)[0]:
        raise RuntimeError("NVRTC gives no PTX of what it compiled")
    # It ends with a zero.
    return code[:-1]


def compile_kernel(request: Request, device: Device) -> Kernel:
    """The kernel of a request, compiled for a device that need not be here."""
    text, warps = source_of(request), request.plan.warps
    code, log, program = build(text, device.arch)
    used = usage(log)
    shared = used["shared_memory"] + shared_memory(request)
    listings = {"cuda": text, "ptx": _ptx(program).decode()}
    # Not needed for the numbers, which NVRTC tells.
    if find_cuobjdump():
        listings["sass"] = cuobjdump("-sass", code)
    return Kernel(
        name=kernel_name(request),
        registers=used["registers"],
        spills=used["stack"],
        shared_memory=shared,
        warps=warps,
        occupancy=occupancy(device, warps, used["registers"], shared),
        listings=listings,
    )


def key(source: str, arch: str) -> str:
    """Name of a kernel in the cache: everything that its machine code depends on."""
    parts = "\0".join((source, arch, STANDARD, nvrtc_version()))
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


@cache
def nvrtc_version() -> str:
    """The version of NVRTC: of the package that brings it, as loading it takes a tenth of a second."""
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13", "nvidia-cuda-nvrtc-cu12"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    from cuda.bindings import nvrtc

    return ".".join(str(number) for number in nvrtc.nvrtcVersion()[1:])


def usage(log: str) -> dict[str, int]:
    """Registers and bytes of spills of a kernel, as ptxas reports them."""
    registers = re.search(r"Used (\d+) registers", log)
    stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    shared = re.search(r"(\d+) bytes smem", log)
    if registers is None or stack is None:
        raise ValueError(f"no resource usage in what the compiler said: {log}")
    return {
        "registers": int(registers[1]),
        "stack": int(stack[1]),
        "spills": int(stack[2]) + int(stack[3]),
        "shared_memory": int(shared[1]) if shared else 0,
    }
