"""The plans of torch tensors: a call and `explain` take them from here.  This module does not import torch."""

from __future__ import annotations

from ..core.device import Device
from ..core.task import Choice
from ..kernels import registry
from ..planner.measured import table_for
from ..planner.plan import Planner
from ..planner.strategies import FORCED_EAGER, TABLE


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
