"""Compilation of CUDA C++ to machine code by NVRTC, through cuda.core, with a cache on disk.

A kernel is compiled once for each source, architecture and version of NVRTC; all processes share the result.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from ...core.cache import load_entry, store_entry
from ...core.device import Device
from ..registry import LOADING
from ..report import Kernel, Listings, cuobjdump, find_cuobjdump, occupancy
from ..request import Request
from .source import kernel_name, shared_memory
from .source import source as source_of

STANDARD = "c++17"

compiled = 0
"""Number of kernels that this process has compiled, without those loaded from the cache. Tests read it."""


def cubin(source: str, arch: str) -> bytes:
    """Return the machine code of a source for an architecture such as "sm_90".

    The code comes from the cache folder if a valid entry is there; otherwise it is compiled and stored there.

    Raises:
        RuntimeError: the source does not compile.
    """
    name = f"{key(source, arch)}.cubin"
    code = load_entry(name)
    if code is None:
        code, _, _ = build(source, arch)
        store_entry(name, code)
    return code


def build(source: str, arch: str) -> tuple[bytes, str, Any]:
    """Compile a source; no GPU is needed.

    Returns:
        (machine code, the compiler's log with registers and spills, the program).

    Raises:
        RuntimeError: the source does not compile; NVRTC's messages name file and line.
    """
    global compiled
    compiled += 1
    log = io.StringIO()
    with LOADING:
        # The first program loads NVRTC.
        from cuda.core import Program, ProgramOptions

        # With a hit in NVRTC's own cache, the log would lack registers and spills.
        program = Program(source, "c++", ProgramOptions(arch=arch, std=STANDARD, ptxas_options=["-v"], no_cache=True))
    try:
        code = bytes(program.compile("cubin", logs=log).code)
    except Exception as error:  # cuda.core's exception types are not public
        raise RuntimeError(str(error)) from error
    return code, log.getvalue(), program


def _ptx(program: Any) -> bytes:
    """The PTX of a compiled program.

    cuda.core's own function asks the driver whether it could load the PTX, and fails without a driver.
    """
    from cuda.bindings import nvrtc

    status, size = nvrtc.nvrtcGetPTXSize(program.handle)
    code = bytes(size)
    if status or nvrtc.nvrtcGetPTX(program.handle, code)[0]:
        raise RuntimeError("NVRTC returned no PTX of the compiled program")
    # The text ends with a zero byte.
    return code[:-1]


def compile_kernel(request: Request, device: Device) -> Kernel:
    """The kernel of a request, compiled for a device that this machine need not have."""
    text, warps = source_of(request), request.plan.warps
    code, log, program = build(text, device.arch)
    used = usage(log)
    shared = used["shared_memory"] + shared_memory(request)
    listings: dict[str, str | Callable[[], str]] = {"cuda": text, "ptx": _ptx(program).decode()}
    # The numbers come from NVRTC, so the disassembler may be missing.
    if find_cuobjdump():
        listings["sass"] = partial(cuobjdump, "-sass", code)
    return Kernel(
        name=kernel_name(request),
        registers=used["registers"],
        spills=used["stack"],
        shared_memory=shared,
        warps=warps,
        occupancy=occupancy(device, warps, used["registers"], shared),
        listings=Listings(listings),
    )


def key(source: str, arch: str) -> str:
    """Return the name of a kernel in the cache: a digest of everything that the machine code depends on."""
    parts = "\0".join((source, arch, STANDARD, nvrtc_version()))
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


@cache
def nvrtc_version() -> str:
    """Return the version of NVRTC.

    The version of the installed package answers first, because loading the library takes 0.1 s.
    """
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13", "nvidia-cuda-nvrtc-cu12"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    with LOADING:
        from cuda.bindings import nvrtc

        return ".".join(str(number) for number in nvrtc.nvrtcVersion()[1:])


def usage(log: str) -> dict[str, int]:
    """Return the resources of a kernel that ptxas reports: registers, and bytes of stack, spills and shared memory."""
    registers = re.search(r"Used (\d+) registers", log)
    stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    shared = re.search(r"(\d+) bytes smem", log)
    if registers is None or stack is None:
        raise ValueError(f"the compiler's log reports no resource usage: {log}")
    return {
        "registers": int(registers[1]),
        "stack": int(stack[1]),
        "spills": int(stack[2]) + int(stack[3]),
        "shared_memory": int(shared[1]) if shared else 0,
    }
