"""From CUDA C++ to machine code: NVRTC through cuda.core, and a cache on disk.

A kernel is compiled once for a bucket, an architecture and a version of NVRTC, whatever the process.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import os
import re
import tempfile
from functools import cache
from pathlib import Path

STANDARD = "c++17"

compiled = 0
"""Kernels that this process has compiled, rather than found: a test counts."""


def cubin(source: str, arch: str) -> bytes:
    """The machine code of a source for an architecture such as "sm_90", from the cache if it is there."""
    path = cache_folder() / f"{key(source, arch)}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        code, _ = build(source, arch, "cubin")
        _write(path, code)
        return code


def build(source: str, arch: str, kind: str) -> tuple[bytes, str]:
    """(code, what the compiler says of registers and spills): compiled now, as "cubin" or "ptx".

    Raises:
        RuntimeError: it does not compile; NVRTC's messages name file and line.
    """
    from cuda.core import Program, ProgramOptions

    global compiled
    compiled += 1
    log = io.StringIO()
    options = ProgramOptions(arch=arch, std=STANDARD, ptxas_options=["-v"] if kind == "cubin" else None)
    program = Program(source, "c++", options)
    code = program.compile(kind, logs=log).code
    return bytes(code), log.getvalue()


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


@cache
def cache_folder() -> Path:
    """Where machine code is kept: $ONLINESOFTMAX_CACHE, or the user's cache folder."""
    if folder := os.environ.get("ONLINESOFTMAX_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onlinesoftmax"


def _write(path: Path, code: bytes) -> None:
    """Keep code in the cache; whoever reads finds all of it or nothing.  Without a place to write, nothing is kept."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)
    except OSError:
        return


def usage(log: str) -> dict[str, int]:
    """Registers and bytes of spills of a kernel, as ptxas reports them."""
    registers = re.search(r"Used (\d+) registers", log)
    stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    shared = re.search(r"(\d+) bytes smem", log)
    assert registers is not None and stack is not None, log
    return {
        "registers": int(registers[1]),
        "stack": int(stack[1]),
        "spills": int(stack[2]) + int(stack[3]),
        "shared_memory": int(shared[1]) if shared else 0,
    }
