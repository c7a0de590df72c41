"""A short analysis of every time: how close it is to the floor, and the reasons in the plan where it is far.

`word` is the analysis of one result in the table; `sentence` is that of a case below the table.
"""

from __future__ import annotations

from ...core.device import Device
from ...core.problem import Problem
from ...planner.plan import Plan
from .result import CaseResult

FLOOR, CLOSE = 0.95, 0.85
"""Fractions of a copy's bandwidth from which a time is called at the floor, or close."""

LAUNCHES = 3
"""A time below this many empty launches shows the cost of a launch, not of memory."""

SHORT_CUT = 256
"""Row length below which the head and the tail of an unaligned row cost more than its body."""


def word(
    of_copy: float,
    time_us: float,
    overhead_us: float,
    plan: Plan | None = None,
    problem: Problem | None = None,
    device: Device | None = None,
) -> str:
    """The reason for a time, as far as it is known.

    Args:
        of_copy: Bandwidth over the bandwidth of a copy of the same size in the same run.
        time_us: The time, in microseconds.
        overhead_us: Microseconds of a call without work on the same clock.
        plan, problem, device: Our plan, with what it was made for; None for other libraries.

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
    # Unaligned rows that are split into head, body and tail (plan.vector) load 16 bytes as aligned rows do.  So do the
    # kernels that a strategy has beside its first one.
    if problem.contiguous and plan.vector == 1 and not plan.kernel and problem.aligned_bytes < 16:
        found.append(f"narrow loads ({problem.aligned_bytes} bytes)")
    if 0 < plan.programs < device.multiprocessors:
        found.append(f"{plan.programs} programs on {device.multiprocessors} multiprocessors")
    if plan.vector > 1 and problem.cols < SHORT_CUT:
        found.append("short unaligned rows: head and tail cost more than the body")
    if plan.strategy == "column":
        found.append("each program has one tile in flight")
    if plan.strategy == "row" and not problem.writes_elements:
        found.append("no writes that hide the reduction")
    # A block is padded to a power of two; the lanes beyond the row load nothing.
    if plan.strategy == "row" and plan.block >= 1.3 * problem.cols:
        found.append(f"{100 * (1 - problem.cols / plan.block):.0f}% of each block is padding")
    if plan.strategy == "row" and not plan.stages and plan.warps >= 32:
        found.append("one row fills a multiprocessor: no load overlaps its reduction")
    return found


def sentence(found: CaseResult) -> str:
    """The analysis of a case: our speed, the share of the launch in our time, and the fastest other library.

    Example:
        >>> from .cases import Case
        >>> from .result import Result
        >>> from .timing import Times
        >>> times = {"ours": Times(8.0, 8.0, 8.0, 9), "torch": Times(20.0, 20.0, 20.0, 9)}
        >>> results = [Result(who, "ok", times=us, gbps=524.3, of_copy=0.9) for who, us in times.items()]
        >>> sentence(CaseResult(Case("softmax", (1024, 1024), 1, "bfloat16"), results=results, overhead_us=4.0))
        '1024x1024 bfloat16: 524 GB/s, 90% of a copy of the same size.  A call without work takes 4.0 of the 8.0 us, \
so the launch bounds the time.  torch takes 2.50 times as long.'
    """
    name = f"{found.case} {found.case.dtype}"
    if found.skipped:
        return f"{name}: skipped, {found.skipped}."
    ours = found.result("ours")
    if ours is None or ours.us is None or ours.gbps is None or ours.of_copy is None:
        return f"{name}: ours has no time" + (f", {ours.reason}." if ours and ours.reason else ".")
    gbps = f"{ours.gbps:.{0 if ours.gbps >= 100 else 1}f} GB/s"
    speed = f"{name}: {gbps}, {100 * ours.of_copy:.0f}% of a copy of the same size"
    if ours.utilisation is not None:
        speed += f" and {100 * ours.utilisation:.0f}% of a large copy's bandwidth"
    us, overhead_us, said = ours.us, found.overhead_us, [f"{speed}."]
    if overhead_us is not None:
        share = f"A call without work takes {overhead_us:.1f} of the {us:.1f} us"
        if us < LAUNCHES * overhead_us:
            said.append(f"{share}, so the launch bounds the time.")
        else:
            bound = "memory bounds the time" if ours.of_copy >= CLOSE else ours.analysis
            said.append(f"{share}; {bound}." if bound else f"{share}.")
    others = [(each.us, each.who) for each in found.results if each is not ours and each.us is not None]
    if others:
        said.append(f"{min(others)[1]} takes {min(others)[0] / us:.2f} times as long.")
    return "  ".join(said)
