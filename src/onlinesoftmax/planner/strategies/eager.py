"""What the framework's own operations propose."""

from __future__ import annotations

from ...core.device import Device
from ...core.problem import Problem
from ..proposal import Candidate


def eager_row(problem: Problem, device: Device) -> Candidate | str:
    """The framework's own operations."""
    reason = "the framework's own operations run everywhere"
    if device.kind != "cuda":
        reason += f", and {device.name} has no kernels of ours"
    # PyTorch's kernel for long rows keeps no more than some 8192 elements of a row in flight.
    return Candidate("eager", "row", reason, programs=problem.rows, block=max(1, min(problem.cols, 8192)), quality=0.45)
