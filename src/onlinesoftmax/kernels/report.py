"""What a compiler made of a kernel: registers, spills, occupancy, listings."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..core.device import Device


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel.

    Attributes:
        name: Name of the kernel.
        registers: 32-bit registers of a thread.
        spills: Bytes of a thread's stack: what did not fit its registers goes to slow local memory.
        shared_memory: Bytes of shared memory of a block, static and dynamic.
        warps: Warps of a block.
        occupancy: Part of the device's resident threads that these blocks can be, 0 to 1.
        listings: Text by name: "ttir" of Triton's kernels, "cuda" of CUDA's; "ptx"; and "sass" where
            there is cuobjdump.
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


RESERVED = 1024
"""Bytes of shared memory that a block takes for itself, beside all that it may ask for."""


def occupancy(device: Device, warps: int, registers: int, shared_memory: int) -> float:
    """Resident threads over the most there can be, as in the CUDA occupancy calculator.

    Args:
        warps: Warps of a block.
        registers: Registers of a thread; a warp is given them in lots of 256.
        shared_memory: Bytes that a block asks for.
    """
    per_warp = -(-registers * 32 // 256) * 256
    blocks = min(
        device.threads // (32 * warps),
        device.registers // (per_warp * warps),
        # What a single block may ask for leaves out what it takes for itself.
        (device.shared_memory + RESERVED) // (shared_memory + RESERVED),
        32,
    )
    return blocks * warps * 32 / device.threads


NO_CUOBJDUMP = (
    "machine code is listed by cuobjdump and nvdisasm: triton brings them (pip install 'onlinesoftmax[triton]'), "
    "or put those of a CUDA toolkit on PATH"
)


def find_cuobjdump() -> str | None:
    """Path of cuobjdump, the one that Triton brings or one on PATH; None without it or nvdisasm, which it calls."""
    spec = importlib.util.find_spec("triton")
    roots = (spec.submodule_search_locations or []) if spec else []
    folders = [str(Path(root, "backends", "nvidia", "bin")) for root in roots]
    path = os.pathsep.join([*folders, os.environ.get("PATH", os.defpath)])
    return shutil.which("cuobjdump", path=path) if shutil.which("nvdisasm", path=path) else None


def cuobjdump(option: str, cubin: bytes) -> str:
    """What cuobjdump says of machine code: "-sass" is the disassembly, "-res-usage" what it needs.

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
