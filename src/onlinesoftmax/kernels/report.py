"""A compiled kernel as the compiler reports it: registers, spills, occupancy, listings."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.device import Device


class Listings(Mapping[str, str]):
    """Texts by name.

    Args:
        texts: Each text, or a function that makes it when it is first read: a disassembler is as slow as a compiler.
    """

    def __init__(self, texts: dict[str, str | Callable[[], str]]) -> None:
        self._texts = texts

    def __getitem__(self, name: str) -> str:
        text = self._texts[name]
        if not isinstance(text, str):
            self._texts[name] = text = text()
        return text

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel.

    Attributes:
        name: Name of the kernel.
        registers: 32-bit registers per thread.
        spills: Bytes of stack per thread: values that do not fit the registers go to slow local memory.
        shared_memory: Bytes of shared memory per block, static and dynamic.
        warps: Warps per block.
        occupancy: Resident threads over the most that a multiprocessor can hold, from 0 to 1.
        listings: Texts by name: "ttir" for a Triton kernel, "cuda" for a CUDA kernel; "ptx"; and "sass" where
            cuobjdump is found.
    """

    name: str
    registers: int
    spills: int
    shared_memory: int
    warps: int
    occupancy: float
    listings: Listings = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        """The numbers, without the listings, for JSON."""
        return {key: value for key, value in vars(self).items() if key != "listings"}


RESERVED = 1024
"""Bytes of shared memory that the system reserves in every block, besides those that the block asks for."""


def occupancy(device: Device, warps: int, registers: int, shared_memory: int) -> float:
    """Resident threads over the most that a multiprocessor can hold, as in the CUDA occupancy calculator.

    Args:
        device: The device.
        warps: Warps per block.
        registers: Registers per thread; a warp gets them in units of 256.
        shared_memory: Bytes that a block asks for.
    """
    per_warp = -(-registers * 32 // 256) * 256
    blocks = min(
        device.threads // (32 * warps),
        device.registers // (per_warp * warps),
        # The most that one block may ask for does not include the reserved bytes.
        (device.shared_memory + RESERVED) // (shared_memory + RESERVED),
        32,
    )
    return blocks * warps * 32 / device.threads


NO_CUOBJDUMP = (
    "listing machine code needs cuobjdump and nvdisasm: triton contains them (pip install 'onlinesoftmax[triton]'), "
    "or put those of a CUDA toolkit on PATH"
)


def find_cuobjdump() -> str | None:
    """Path of cuobjdump, in Triton or on PATH; None where cuobjdump or nvdisasm, which it calls, is missing."""
    spec = importlib.util.find_spec("triton")
    roots = (spec.submodule_search_locations or []) if spec else []
    folders = [str(Path(root, "backends", "nvidia", "bin")) for root in roots]
    path = os.pathsep.join([*folders, os.environ.get("PATH", os.defpath)])
    return shutil.which("cuobjdump", path=path) if shutil.which("nvdisasm", path=path) else None


def cuobjdump(option: str, cubin: bytes) -> str:
    """The output of cuobjdump for machine code: its disassembly with "-sass", its resources with "-res-usage".

    Raises:
        RuntimeError: there is no cuobjdump, or it cannot read this machine code.
    """
    tool = find_cuobjdump()
    if tool is None:
        raise RuntimeError(NO_CUOBJDUMP)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([tool, option, str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{tool} {option}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
