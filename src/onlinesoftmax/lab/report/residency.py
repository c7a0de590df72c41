"""The residency of a row: the levels of memory that hold its elements while a plan computes it."""

from __future__ import annotations

from typing import NamedTuple

from ...core.device import Device
from ...core.problem import Problem
from ...planner.price import Plan, bytes_from_l2, bytes_read_again
from ...planner.strategies.cuda_grid import slice_tiles

LEVELS = ("registers", "shared memory", "cluster", "L2 cache", "device memory")
"""Levels of memory, the fastest first."""


class Residency(NamedTuple):
    """The levels of memory that hold a row while it is computed.

    Attributes:
        shares: Part of the row in each level of LEVELS, from 0 to 1: the registers and the shared memory hold it, L2
            serves the second read, and device memory serves what the levels above do not hold.
        words: The role of each level of LEVELS, in a few words.
    """

    shares: tuple[float, ...]
    words: tuple[str, ...]


def residency_of(plan: Plan, problem: Problem, device: Device) -> Residency:
    """The residency of a row under a plan.

    Args:
        plan: The plan.
        problem: The problem that it was made for.
        device: The device that it was made for.

    Example:
        >>> from onlinesoftmax.explanation import explain
        >>> found = explain((4096, 1024), device="h200")
        >>> residency_of(found.plan, found.problem, found.device).words[0]
        'all of the row, from its one read on'
    """
    registers, shared = _held(plan, problem)
    again = bytes_read_again(plan, problem)
    from_l2 = bytes_from_l2(plan, problem, device) / again if again else 0.0
    streamed = max(0.0, 1.0 - registers - shared)
    words = (
        _registers(plan, registers, streamed),
        _shared_memory(plan, shared),
        f"passes on the states of {plan.splits} blocks" if plan.strategy == "cluster" and plan.splits > 1 else "",
        _l2(plan, from_l2),
        _device_memory(plan, problem, streamed),
    )
    shares = (registers, shared, 0.0, streamed * from_l2, streamed * (1.0 - from_l2))
    return Residency(shares, words)


def _held(plan: Plan, problem: Problem) -> tuple[float, float]:
    """Parts of a row that the registers and the shared memory hold until its result is written."""
    if plan.backend == "eager" or plan.strategy in ("looped", "split"):
        return 0.0, 0.0
    if plan.strategy == "grid":
        per_tile = plan.lanes * problem.vector
        chunks = max(1, problem.cols // problem.vector)
        tiles = slice_tiles(chunks, plan.splits, plan.lanes)
        held = min(plan.block // per_tile, tiles)
        return held / tiles, min(plan.shared, tiles - held) / tiles
    if plan.strategy == "cluster" and plan.backend == "pallas":
        return 0.0, 1.0
    # A strided row whose columns do not fit one tile is streamed.
    return (1.0, 0.0) if plan.strategy != "column" or plan.block >= problem.cols else (0.0, 0.0)


def _registers(plan: Plan, held: float, streamed: float) -> str:
    if plan.backend == "eager":
        return "as the framework's own kernels decide"
    if held == 1.0:
        return "all of the row, from its one read on"
    if held:
        return f"{held:.0%} of the row" + ("; the rest is streamed" if streamed else "")
    return f"one tile of {plan.block} columns at a time" if streamed else "the part that is computed at the moment"


def _shared_memory(plan: Plan, held: float) -> str:
    if held:
        return f"{held:.0%} of the row" if held < 1.0 else "all of the row, from its one read on"
    if plan.stages:
        return f"the next rows: {plan.stages} {'tiles ' if plan.strategy == 'grid' else ''}are in flight"
    several = plan.warps > 1 and plan.lanes > 32
    return f"passes on the states of {plan.warps} warps" if several else ""


def _l2(plan: Plan, from_l2: float) -> str:
    words = f"serves about {from_l2:.0%} of the second read" if plan.reads > 1 else ""
    if plan.strategy == "grid" and plan.splits > 1:
        states = f"passes on the states of {plan.splits} blocks"
        return f"{states}; {words}" if words else states
    return words


def _device_memory(plan: Plan, problem: Problem, streamed: float) -> str:
    if plan.reads == 1:
        read = "read once"
    else:
        read = "read twice" if streamed == 1.0 else f"read once, {streamed:.0%} of it twice"
    if plan.strategy == "split" and plan.launches > 1:
        read += f"; states pass through memory in {plan.launches} launches"
    return read + ("; result written once" if problem.writes_elements else "; one result per row")
