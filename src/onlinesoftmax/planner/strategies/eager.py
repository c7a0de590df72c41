"""Proposals of the framework's own operations."""

from __future__ import annotations

from ...core.device import Device
from ...core.problem import Problem
from ..proposal import Proposal, propose

LONGEST_IN_FLIGHT = 8192
"""Elements of a row that PyTorch's kernel for long rows keeps in flight, about."""


def pytorch(problem: Problem, device: Device) -> list[Proposal] | str:
    """PyTorch's own operations: on a GPU, one kernel for a forward operation on plain logits with one output."""
    operation = problem.declaration
    plain = not operation.backward and not operation.row_operands and not problem.fused
    if device.kind == "cuda" and not operation.runs_on("eager"):
        return f"PyTorch has no function {operation}; backend='eager' runs its formula in separate operations"
    if device.kind == "cuda" and not (plain and len(problem.written) == 1):
        return "PyTorch's own operations have no kernel for a gradient, a score option, a target, or several outputs"
    return framework(problem, device)


def framework(problem: Problem, device: Device) -> list[Proposal]:
    """The framework's own operations."""
    reason = "the framework's own operations run everywhere"
    if device.kind != "cuda":
        reason += f", and {device.name} has no kernels of ours"
    block = max(1, min(problem.cols, LONGEST_IN_FLIGHT))
    return [propose(problem, "eager", "row", reason, False, programs=problem.rows, block=block)]
