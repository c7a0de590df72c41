"""What the planner must know of a machine: the only place that asks the hardware."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, replace
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Device:
    """A machine, present or not.

    Attributes:
        name: Name as the driver gives it, or of the table.
        kind: "cuda" or "cpu".
        compute_capability: (major, minor); (0, 0) for a CPU.
        multiprocessors: Streaming multiprocessors; cores for a CPU.
        shared_memory: Shared memory of one multiprocessor that one block can use, bytes.
        registers: 32-bit registers of one multiprocessor.
        threads: Most threads resident on one multiprocessor.
        l2: L2 cache, bytes.
        bandwidth: Device-memory bandwidth, GB/s (10^9 bytes): of a large copy, bytes read plus
            bytes written, where measured; else 0.9 of the datasheet's, the part that a copy reaches.
        source: Where the numbers come from.
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
        """Name of the machine code, as in `sm_90`."""
        return "sm_{}{}".format(*self.compute_capability)


_KIB, _MIB = 1 << 10, 1 << 20
_GUIDE = "CUDA C++ Programming Guide, technical specifications per compute capability"

KNOWN: dict[str, Device] = {
    "h200": Device(
        "NVIDIA H200", "cuda", (9, 0), 132, 227 * _KIB, 65536, 2048, 60 * _MIB, 4270.0,
        "driver, and a device-to-device copy of 2 GB measured on an H200 (datasheet: 4800 GB/s)",
    ),
    "h100": Device(
        "NVIDIA H100 SXM5", "cuda", (9, 0), 132, 227 * _KIB, 65536, 2048, 50 * _MIB, 0.9 * 3350,
        f"NVIDIA H100 datasheet (3350 GB/s) and architecture whitepaper; {_GUIDE}",
    ),
    "a100": Device(
        "NVIDIA A100 SXM4 80GB", "cuda", (8, 0), 108, 163 * _KIB, 65536, 2048, 40 * _MIB, 0.9 * 2039,
        f"NVIDIA A100 datasheet (2039 GB/s) and architecture whitepaper; {_GUIDE}",
    ),
    "l4": Device(
        "NVIDIA L4", "cuda", (8, 9), 58, 99 * _KIB, 65536, 1536, 48 * _MIB, 0.9 * 300,
        f"NVIDIA L4 datasheet (300 GB/s); Ada architecture whitepaper; {_GUIDE}",
    ),
    "rtx4090": Device(
        "NVIDIA GeForce RTX 4090", "cuda", (8, 9), 128, 99 * _KIB, 65536, 1536, 72 * _MIB, 0.9 * 1008,
        f"Ada architecture whitepaper (1008 GB/s); {_GUIDE}",
    ),
    "b200": Device(
        "NVIDIA B200", "cuda", (10, 0), 148, 227 * _KIB, 65536, 2048, 126 * _MIB, 0.9 * 8000,
        f"NVIDIA DGX B200 datasheet (8000 GB/s a GPU); {_GUIDE}",
    ),
    "cpu": Device(
        "CPU", "cpu", (0, 0), os.cpu_count() or 1, 0, 0, 1, 32 * _MIB, 20.0,
        "cores from the operating system; bandwidth and cache are those of a common server's few cores",
    ),
}  # fmt: skip


def known(name: str) -> Device:
    """The device of the table by name: case, spaces, "-" and "_" do not matter.

    Raises:
        ValueError: no such device; the message lists the table.

    Example:
        >>> known("RTX 4090").arch
        'sm_89'
    """
    key = name.lower().replace(" ", "").replace("-", "").replace("_", "")
    if key not in KNOWN:
        raise ValueError(f"unknown device {name!r}; known devices: {', '.join(KNOWN)}")
    return KNOWN[key]


@cache
def from_torch(kind: str, index: int = 0) -> Device:
    """The device behind a torch device of this kind ("cuda", "cpu", …) and index.

    Kinds without kernels of ours (a Mac's GPU, say) are described as the CPU is: `eager` runs there.
    """
    if kind != "cuda":
        return KNOWN["cpu"]
    import torch

    # Torch's type stubs lack some of the attributes that it has.
    properties: Any = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    model = _same_model(properties.name)
    measured = Device(
        name=properties.name,
        kind="cuda",
        compute_capability=capability,
        multiprocessors=properties.multi_processor_count,
        shared_memory=properties.shared_memory_per_block_optin,
        registers=properties.regs_per_multiprocessor,
        threads=properties.max_threads_per_multi_processor,
        l2=properties.L2_cache_size,
        bandwidth=_bus_bandwidth(properties),
        source="driver",
    )
    if model is None:
        return measured
    return replace(measured, bandwidth=model.bandwidth, source=f"driver; bandwidth: {model.source}")


@cache
def from_jax() -> Device:
    """The first GPU that JAX has; an H200 where it has none, as when a program is lowered for one elsewhere."""
    import jax

    try:
        gpu = jax.devices("cuda")[0]
    except RuntimeError:
        return KNOWN["h200"]
    # JAX does not tell what a multiprocessor holds: the model does, or the like of an H200.
    model = _same_model(gpu.device_kind) or KNOWN["h200"]
    major, minor = (int(part) for part in str(gpu.compute_capability).split("."))
    return replace(
        model, name=gpu.device_kind, compute_capability=(major, minor), multiprocessors=gpu.core_count, source="driver",
    )  # fmt: skip


def _same_model(name: str) -> Device | None:
    words = name.lower().replace("rtx ", "rtx").split()
    return next((device for key, device in KNOWN.items() if key in words), None)


def _bus_bandwidth(properties: Any) -> float:
    """0.9 of what clock and bus width give; 1000 GB/s where this torch does not tell them."""
    clock_khz = getattr(properties, "memory_clock_rate", 0)
    bus_bits = getattr(properties, "memory_bus_width", 0)
    return 0.9 * 2 * clock_khz * 1e3 * bus_bits / 8 / 1e9 or 1000.0


def here() -> Device:
    """The first GPU of this machine if torch sees one, or its CPU."""
    if importlib.util.find_spec("torch") is None:
        return KNOWN["cpu"]
    import torch

    return from_torch("cuda" if torch.cuda.is_available() else "cpu")
