"""A word for every time: where it stands against the floor and, when it is far, what the plan has to say."""

from __future__ import annotations

from ..core.device import Device
from ..core.problem import Problem
from ..planner.plan import Plan

FLOOR, CLOSE = 0.95, 0.85
"""Parts of a copy's bandwidth from which a time is called at the floor, or close."""

LAUNCHES = 3
"""A time below this many empty launches is the launch's, not the memory's."""

SHORT_CUT = 256
"""Columns below which the head and the tail of a cut row cost more than its body."""


def word(
    of_copy: float,
    time_us: float,
    overhead_us: float,
    plan: Plan | None = None,
    problem: Problem | None = None,
    device: Device | None = None,
) -> str:
    """Why a time is what it is, as far as it can be told.

    Args:
        of_copy: Bandwidth over that of a copy of the same size in the same run.
        time_us: The time, in microseconds.
        overhead_us: Time of a call without work on the same clock.
        plan, problem, device: Of our own results; nothing is known of others' plans.

    Example:
        >>> word(0.97, 100.0, 4.0), word(0.4, 9.0, 4.0), word(0.4, 100.0, 4.0)
        ('at the floor', 'launch-bound', '')
    """
    if of_copy >= FLOOR:
        return "at the floor"
    if of_copy >= CLOSE:
        return "close"
    if time_us < LAUNCHES * overhead_us:
        return "launch-bound" if device is None or device.kind == "cuda" else "call-bound"
    if plan is None or problem is None or device is None:
        return ""
    return ", ".join(_reasons(plan, problem, device)) or "unexplained by the plan"


def _reasons(plan: Plan, problem: Problem, device: Device) -> list[str]:
    if plan.backend == "eager":
        return ["the framework's own kernel"]
    found = []
    if plan.reads > 1:
        found.append("reads twice" if plan.reads == 2 else f"reads {plan.reads} times")
    if plan.launches > 1:
        found.append(f"{plan.launches} launches")
    # Rows that begin anywhere but are cut to boundaries (plan.vector) load 16 bytes like the others.
    if problem.contiguous and plan.vector == 1 and problem.aligned_bytes < 16:
        found.append(f"narrow loads ({problem.aligned_bytes} bytes)")
    if 0 < plan.programs < device.multiprocessors:
        found.append(f"{plan.programs} programs on {device.multiprocessors} multiprocessors")
    # A block is padded to a power of two: lanes that load nothing.
    if plan.vector > 1 and problem.cols < SHORT_CUT:
        found.append("short rows, cut at both ends")
    if plan.strategy == "column":
        found.append("one tile in flight a program")
    if plan.strategy == "row" and not problem.writes_elements:
        found.append("no writes to hide the reduction behind")
    if plan.strategy == "row" and plan.block >= 1.3 * problem.cols:
        found.append(f"{100 * (1 - problem.cols / plan.block):.0f}% of each block is padding")
    if plan.strategy == "row" and not plan.blocks.stages and plan.warps >= 32:
        found.append("one row fills a multiprocessor: no load overlaps its reduction")
    return found
