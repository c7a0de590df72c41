"""Description of the device that torch sees, and the planner for its tensors; without an import of torch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any

from ..core.device import KNOWN, UNKNOWN_BANDWIDTH, Device, model_of
from ..core.task import Choice
from ..kernels import registry
from ..planner.measured import table_for
from ..planner.plan import Planner
from ..planner.strategies import FORCED_EAGER, TABLE

BUS_TOLERANCE = 0.05
"""Largest relative difference between the bandwidth that the bus gives and that of the table for the same memory.

The table's bandwidth of an H200 is that of a measured copy, 0.89 of the datasheet's 4800 GB/s instead of 0.9, and the
clock of its memory gives 2 % more than the datasheet.
"""


@cache
def from_torch(kind: str, index: int = 0) -> Device:
    """Return the device behind a torch device of this kind ("cuda", "cpu", ...) and index.

    A kind that our kernels do not run on, such as "mps", is described as a CPU: the backend `eager` runs there.
    """
    if kind != "cuda":
        return KNOWN["cpu"]
    import torch

    # torch's type stubs lack some of these attributes.
    properties: Any = torch.cuda.get_device_properties(index)
    of_bus = _bus_bandwidth(properties)
    device = Device(
        name=properties.name,
        kind="cuda",
        compute_capability=(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        shared_memory=properties.shared_memory_per_block_optin,
        registers=properties.regs_per_multiprocessor,
        threads=properties.max_threads_per_multi_processor,
        l2=properties.L2_cache_size,
        bandwidth=of_bus or UNKNOWN_BANDWIDTH,
        source="driver",
    )
    model = model_of(properties.name)
    # A card for PCIe or for a laptop has the name of the model, but other memory.
    if model is None or (of_bus and abs(of_bus / model.bandwidth - 1) > BUS_TOLERANCE):
        return device
    return replace(device, bandwidth=model.bandwidth, source=f"driver; bandwidth: {model.source}")


def here() -> Device:
    """Return the first GPU of this machine if torch sees one, otherwise its CPU."""
    if find_spec("torch") is None:
        return KNOWN["cpu"]
    import torch

    return from_torch("cuda" if torch.cuda.is_available() else "cpu")


def _bus_bandwidth(properties: Any) -> float:
    """Return 0.9 of the bandwidth that clock and bus width give, in GB/s; 0 if torch lacks them."""
    clock_khz = getattr(properties, "memory_clock_rate", 0)
    bus_bits = getattr(properties, "memory_bus_width", 0)
    return 0.9 * 2 * clock_khz * 1e3 * bus_bits / 8 / 1e9


def planner_for(device: Device, choice: Choice, every_backend: bool = False) -> Planner:
    """The planner for tensors on a device.

    Args:
        device: The device of the tensors.
        choice: The parts of the plan that the caller forces.
        every_backend: True for a device that this machine need not have.  The planner then takes all backends,
            installed here or not, and never plans for an interpreter.
    """
    strategies = FORCED_EAGER if choice.backend == "eager" else TABLE
    if every_backend:
        return Planner(device, (), table_for(device), strategies)
    if device.kind == "cpu" and choice.backend == "triton" and registry.unavailable("triton") is None:
        triton = registry.load("triton")
        # The interpreter needs some GPU's numbers to plan with.
        device = triton.PLANNED_FOR if triton.interpreted() else device
    return Planner(device, registry.missing(), table_for(device), strategies)
