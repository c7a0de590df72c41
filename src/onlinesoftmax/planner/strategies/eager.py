"""What the framework's own operations propose."""

from __future__ import annotations

from ...core.device import Device
from ...core.problem import Problem
from ..proposal import Blocks, Proposal, Traffic

LONGEST_IN_FLIGHT = 8192
"""Elements of a row that PyTorch's kernel for long rows keeps in flight, about."""


def pytorch(problem: Problem, device: Device) -> Proposal | str:
    """PyTorch's own operations: on a GPU they have one kernel for a forward operation on logits, and none else."""
    forward_alone = not problem.declaration.backward and not problem.extra.fused and len(problem.written) == 1
    if device.kind == "cuda" and not forward_alone:
        return "PyTorch's own operations have no kernel for this"
    return framework(problem, device)


def framework(problem: Problem, device: Device) -> Proposal:
    """The framework's own operations."""
    reason = "the framework's own operations run everywhere"
    if device.kind != "cuda":
        reason += f", and {device.name} has no kernels of ours"
    blocks = Blocks(problem.rows, max(1, min(problem.cols, LONGEST_IN_FLIGHT)))
    return Proposal("eager", "row", reason, blocks, traffic=Traffic(quality=0.45))
