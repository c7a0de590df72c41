"""Descriptions of machines for the planner: a table of known devices, and a generic device by compute capability.

This module queries no hardware and imports no framework.  torch/device.py and jax/device.py describe the device that a
framework sees.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True)
class Device:
    """Description of a machine, which need not be present.

    Attributes:
        name: Name as the driver reports it, or as the table has it.
        kind: "cuda" or "cpu".
        compute_capability: (major, minor); (0, 0) for a CPU.
        multiprocessors: Number of streaming multiprocessors; number of cores for a CPU.
        shared_memory: Shared memory of a multiprocessor that one block can use, in bytes.
        registers: Number of 32-bit registers of a multiprocessor.
        threads: Largest number of resident threads on a multiprocessor.
        l2: Size of the L2 cache in bytes.
        bandwidth: Device-memory bandwidth in GB/s (10^9 bytes per second). Measured devices have the bandwidth
            of a large copy, which counts bytes read and bytes written. The others have 0.9 of the datasheet's
            bandwidth, because a copy reaches about this part.
        source: Origin of the numbers.
    """

    name: str
    kind: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int
    registers: int
    threads: int
    l2: int
    bandwidth: float
    source: str

    @property
    def arch(self) -> str:
        """Name of the machine code, such as `sm_90`."""
        return "sm_{}{}".format(*self.compute_capability)

    def cluster_places(self, blocks: int, resident: int = 1) -> int:
        """About how many clusters, groups of `blocks` blocks, run at once with `resident` blocks on a multiprocessor.

        A cluster lies in one part of the GPU, and the parts differ in size, so some multiprocessors are left over.  An
        H100 and an H200 of 132 multiprocessors ran 30 clusters of 4.  This gives 29, as others may run fewer.
        """
        usable = 1 if blocks <= 2 else 0.9
        return max(int(usable * self.multiprocessors * resident) // blocks, 1)


_KIB, _MIB = 1 << 10, 1 << 20
_GUIDE = "CUDA Programming Guide, technical specifications per compute capability"

MULTIPROCESSORS: dict[tuple[int, int], tuple[int, int, int]] = {
    (7, 5): (64 * _KIB, 65536, 1024),
    (8, 0): (163 * _KIB, 65536, 2048),
    (8, 6): (99 * _KIB, 65536, 1536),
    (8, 7): (163 * _KIB, 65536, 1536),
    (8, 9): (99 * _KIB, 65536, 1536),
    (9, 0): (227 * _KIB, 65536, 2048),
    (10, 0): (227 * _KIB, 65536, 2048),
    (10, 3): (227 * _KIB, 65536, 2048),
    (11, 0): (227 * _KIB, 65536, 1536),
    (12, 0): (99 * _KIB, 65536, 1536),
    (12, 1): (99 * _KIB, 65536, 1536),
}
"""(shared memory, registers, threads) of a multiprocessor, as in Device, by compute capability.

Source: CUDA Programming Guide 13, section 5.1, "Compute Capabilities", tables 30 and 31,
https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/compute-capabilities.html
"""

SMALLEST = (48 * _KIB, 65536, 1024)
"""Multiprocessor of a compute capability that is not in the table.

Every GPU that CUDA supports gives a block 48 KiB of shared memory without an opt-in, and no GPU in the table has
fewer registers or threads.
"""

UNKNOWN_BANDWIDTH = 1000.0
"""Bandwidth in GB/s of a GPU whose bandwidth cannot be found out."""

CACHE_LINE = 128
"""Bytes of a cache line of NVIDIA GPUs."""

UNKNOWN_L2 = 4 * _MIB
"""L2 cache in bytes of a GPU whose cache cannot be found out: the cache of a T4, the smallest of a data-centre GPU."""


def _gpu(
    name: str, capability: tuple[int, int], multiprocessors: int, l2: int, bandwidth: float, source: str
) -> Device:
    return Device(name, "cuda", capability, multiprocessors, *MULTIPROCESSORS[capability], l2, bandwidth, source)


KNOWN: dict[str, Device] = {
    "h200": _gpu(
        "NVIDIA H200", (9, 0), 132, 60 * _MIB, 4270.0,
        "driver, and a device-to-device copy of 2 GB measured on an H200 (datasheet: 4800 GB/s)",
    ),
    "h100": _gpu(
        "NVIDIA H100 SXM5", (9, 0), 132, 50 * _MIB, 0.9 * 3350,
        f"NVIDIA H100 datasheet (3350 GB/s) and architecture whitepaper; {_GUIDE}",
    ),
    "a100": _gpu(
        "NVIDIA A100 SXM4 80GB", (8, 0), 108, 40 * _MIB, 0.9 * 2039,
        f"NVIDIA A100 datasheet (2039 GB/s) and architecture whitepaper; {_GUIDE}",
    ),
    "l4": _gpu(
        "NVIDIA L4", (8, 9), 58, 48 * _MIB, 0.9 * 300,
        f"NVIDIA L4 datasheet (300 GB/s); Ada architecture whitepaper; {_GUIDE}",
    ),
    "rtx4090": _gpu(
        "NVIDIA GeForce RTX 4090", (8, 9), 128, 72 * _MIB, 0.9 * 1008,
        f"Ada architecture whitepaper (1008 GB/s); {_GUIDE}",
    ),
    "b200": _gpu(
        "NVIDIA B200", (10, 0), 148, 126 * _MIB, 0.9 * 8000,
        f"NVIDIA DGX B200 datasheet (8000 GB/s per GPU); {_GUIDE}",
    ),
    "cpu": Device(
        "CPU", "cpu", (0, 0), os.cpu_count() or 1, 0, 0, 1, 32 * _MIB, 20.0,
        "cores from the operating system; bandwidth and cache of a few cores of a common server",
    ),
}  # fmt: skip


MEMORY: dict[str, int] = {"h200": 141, "h100": 80, "a100": 80, "l4": 24, "rtx4090": 24, "b200": 180}
"""Device memory in GiB, by the names of KNOWN.

Source: the datasheets of each GPU, as named above; of the B200, the 1440 GB of the eight in a DGX B200. Drivers report
1 to 4 % less, so a call that needs more than this cannot fit.
"""


def memory_of(device: Device) -> int | None:
    """Return the bytes of a GPU's memory, or None if they are not known; a size in its name counts first.

    Example:
        >>> memory_of(KNOWN["l4"]), memory_of(generic("NVIDIA A100-SXM4-40GB", (8, 0), 108)), memory_of(KNOWN["cpu"])
        (25769803776, 42949672960, None)
    """
    named = re.search(r"(\d+) ?GB", device.name)
    model = model_of(device.name)
    gib = int(named[1]) if named else next((MEMORY.get(key) for key, each in KNOWN.items() if each is model), None)
    return None if gib is None else gib << 30


MATRIX: dict[str, tuple[float, float]] = {
    "h200": (989.0, 67.0), "h100": (989.0, 67.0), "a100": (312.0, 19.5), "l4": (121.0, 30.3), "rtx4090": (165.2, 82.6),
    "b200": (2250.0, 75.0),
}  # fmt: skip
"""Tera-operations per second of matrix products, by the names of KNOWN: of 16-bit dtypes, and of float32.

Source: the datasheets: dense products of 16 bits with float32 sums, and float32 without tensor cores.
"""

MATRIX_PART = 0.72
"""Part of that rate that large products reach one after another, at the power limit of the GPU.

Three products of a head reached 689 to 728 of 989 tera-operations per second in bfloat16 on an H100.
"""


def matrix_rate(device: Device, itemsize: int) -> float | None:
    """Return the operations per second of large products, or None if they are not known.

    Args:
        device: The device.
        itemsize: Bytes of an element of the operands.

    Example:
        >>> f"{matrix_rate(KNOWN['h200'], 2):.2e}", matrix_rate(KNOWN["cpu"], 4)
        ('7.12e+14', None)
    """
    model = model_of(device.name)
    rates = next((MATRIX.get(key) for key, each in KNOWN.items() if each is model), None)
    if rates is None or itemsize > 4:
        return None
    return MATRIX_PART * rates[itemsize == 4] * 1e12


def known(name: str) -> Device:
    """Return a device of the table by its name, or by a driver's name; case, spaces, "-" and "_" do not matter.

    Raises:
        ValueError: no device has this name; the message lists the table, and says how to plan for others.

    Example:
        >>> known("RTX 4090").arch, known("NVIDIA GeForce RTX 4090").arch
        ('sm_89', 'sm_89')
    """
    key = name.lower().replace(" ", "").replace("-", "").replace("_", "")
    found = KNOWN.get(key) or model_of(name)
    if found is None:
        near = " or ".join(get_close_matches(key, KNOWN, 2, 0.6))
        raise ValueError(
            f"unknown device {name!r}; known devices: {', '.join(KNOWN)}; for another GPU, name the one that is most "
            f"like it{f' (by its name: {near})' if near else ''}, or leave the device out on a machine that has it, "
            "where `onlinesoftmax tune` measures its plans"
        )
    return found


def model_of(name: str) -> Device | None:
    """Return the device of the table that has the model name in a driver's name, or None.

    Example:
        >>> model_of("NVIDIA H100 80GB HBM3") is KNOWN["h100"], model_of("NVIDIA H20")
        (True, None)
    """
    words = name.lower().replace("-", " ").replace("rtx ", "rtx").split()
    return next((device for key, device in KNOWN.items() if key in words), None)


def generic(name: str, compute_capability: tuple[int, int], multiprocessors: int) -> Device:
    """Return a conservative description of a GPU by its compute capability.

    L2 cache and bandwidth are those of the model, if the name has one; otherwise they are small numbers that
    most GPUs exceed.

    Args:
        name: Name as the driver reports it.
        compute_capability: (major, minor).
        multiprocessors: Number of streaming multiprocessors.

    Example:
        >>> generic("NVIDIA H20", (9, 0), 78).shared_memory
        232448
    """
    each = MULTIPROCESSORS.get(compute_capability)
    source = f"multiprocessor: {_GUIDE}" if each else "multiprocessor: the least of any GPU that CUDA supports"
    model = model_of(name)
    if model is None:
        source += "; L2 cache and bandwidth: assumed, because the model is unknown"
    else:
        source += f"; L2 cache and bandwidth: {model.source}"
    return Device(
        name, "cuda", compute_capability, multiprocessors, *(each or SMALLEST),
        model.l2 if model else UNKNOWN_L2, model.bandwidth if model else UNKNOWN_BANDWIDTH, source,
    )  # fmt: skip
