"""The numbers of a plan in words, with their units: what `explain` and the report print."""

from __future__ import annotations

from ..core.device import Device, memory_of
from ..core.problem import Problem
from ..core.units import duration, size
from .measured import model_word, slug
from .price import Plan, bytes_from_l2


def plan_facts(plan: Plan, problem: Problem, device: Device) -> list[tuple[str, str]]:
    """Names and values of a plan's numbers, in reading order.

    Args:
        plan: The plan.
        problem: The problem that the plan was made for.
        device: The device that the plan was made for.
    """
    found = [
        ("layout of rows", _layout(problem)),
        ("programs", f"{plan.programs:,} in the largest launch"),
        ("block", _block(plan)),
        *_threads(plan),
        ("splits", f"{plan.splits} programs share a row" if plan.splits > 1 else "1: no two programs share a row"),
        ("launches", str(plan.launches)),
        ("input is read", _reads(plan)),
        (
            "bytes moved",
            f"{size(plan.bytes_moved)}; at least {size(problem.read_bytes + problem.write_bytes)}: "
            f"{size(problem.read_bytes)} read, {size(problem.write_bytes)} written",
        ),
        *(("memory", sentence) for sentence in filter(None, [lacks_memory(problem, device)])),
        ("floor", f"{duration(plan.floor_us)} at {device.bandwidth:.0f} GB/s"),
        (
            "estimate",
            f"{duration(plan.estimate_us)}, {_floors(plan.estimate_us, plan.floor_us)}; {_source(plan, device)}",
        ),
    ]
    if plan.reads > 1:
        from_l2 = bytes_from_l2(plan, problem, device)
        least = (plan.bytes_moved - from_l2) / (device.bandwidth * 1e3)
        found.append(
            (
                "floor with repeats",
                f"{duration(least)}: time for the bytes moved, except {size(int(from_l2))} that L2 serves",
            )
        )
    if device.kind == "cuda":
        found.append(("quality", f"{plan.quality:.0%} of that bandwidth, with the device full"))
    return found


MOST_REGISTERS = 255
"""Registers that a thread can have."""


def blocks_of(plan: Plan, device: Device) -> tuple[str, str, str]:
    """Rows x columns of a block, warps of a program and most registers of a thread; empty for kernels not ours."""
    if not plan.warps:
        return "", "", ""
    # The compiler gives registers in eights, and as many as let the resident programs fit.
    registers = device.registers // (32 * plan.warps * plan.resident) // 8 * 8
    return f"{plan.rows_per_program} x {plan.block}", str(plan.warps), str(min(MOST_REGISTERS, registers))


def lacks_memory(problem: Problem, device: Device) -> str | None:
    """A sentence for a call whose tensors do not fit the memory of the device; None where they do, or may."""
    needed, there = problem.read_bytes + problem.write_bytes, memory_of(device)
    if there is None or needed <= there:
        return None
    return f"too small: the tensors of this call have {size(needed)}, and the device has {size(there)}"


def _source(plan: Plan, device: Device) -> str:
    """Source of the estimate of a plan: measurements on this model of GPU, or on another one, or none."""
    if not plan.measured_on:
        return "not measured"
    same_model = model_word(slug(plan.measured_on)) == model_word(slug(device.name))
    return f"from times of {plan.cells}" + ("" if same_model else f" on {plan.measured_on}, scaled by bandwidth")


def _reads(plan: Plan) -> str:
    """How often the input is read."""
    if plan.reads > 1 and plan.again < 1:
        return f"once, and {plan.again:.0%} of it again"
    return {1: "once", 2: "twice"}.get(plan.reads, f"{plan.reads} times")


def _threads(plan: Plan) -> list[tuple[str, str]]:
    """How the threads of a program work, as far as the plan says."""
    found = []
    if plan.kernel:
        found.append(("kernel", f"{plan.kernel}.cuh, one of the kernels of {plan.strategy}"))
    if plan.warps:
        found.append(("warps", f"{plan.warps} per program"))
    if plan.lanes:
        found.append(("lanes", f"{plan.lanes} threads of a program share a row"))
    if plan.shared and not plan.stages:
        found.append(("shared memory", f"{plan.shared} chunks of 16 bytes per thread, besides the registers"))
    if plan.terms:
        found.append(("terms", "kept in registers: one exp per element instead of two"))
    if plan.stages:
        ring = ", in a ring in shared memory" if plan.shared else ""
        found.append(("stages", f"{plan.stages} tiles in flight per program{ring}"))
    if plan.vector > 1:
        found.append(("vector", f"{plan.vector} elements: rows are split into head, body and tail"))
    return found


def _layout(problem: Problem) -> str:
    if problem.contiguous:
        return "contiguous: the elements of a row are neighbours"
    return f"strided: {problem.interleaved} rows lie side by side, the elements of a row lie apart"


def _block(plan: Plan) -> str:
    rows = f"{plan.rows_per_program} rows x " if plan.rows_per_program > 1 else ""
    depth = f", {plan.depth} per lane" if plan.depth > 1 and plan.backend == "triton" else ""
    return f"{rows}{plan.block} columns at a time{depth}"


def _floors(estimate: float, floor: float) -> str:
    return f"{estimate / floor:.2f} times the floor" if floor else "no floor"
