"""One case, measured: everybody checked against float64, then timed beside a copy of the same size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import inf, isfinite
from typing import Any

from ..core.operations import OPERATIONS
from ..explanation import Explanation
from ..planner.plan import Plan, PlanError
from . import analysis, formulas
from .cases import Case
from .check import Reference, Verdict, poison
from .formulas import Function
from .inputs import Inputs, make_inputs
from .peers import Ours, Peer, first_line
from .planned import planned
from .timing import Against, Clock, Samples, Times, clock_for

LARGE = 1 << 20
"""Elements from which a CPU's time is the arithmetic's, and ours is held to a ratio."""

CPU_RATIO, CPU_ADDED_US = 1.03, 5.0
"""What our layer may add to torch on a CPU: from LARGE elements up, and below."""


@dataclass(frozen=True)
class Result:
    """What one of those compared did with one case.

    Attributes:
        who: Name of the peer, or "ours".
        status: "ok"; "wrong" or "failed", which fail the run; "refused" (cannot run the case).
        reason: Why, unless ok.
        error: Largest absolute error against float64.
        allowed: The error that the framework's own function makes on the same input.
        plan: Of ours.
        times, gbps, of_copy: Times; 10^9 bytes a second, of the fewest bytes; over those of the copy.
        against_torch: Time over torch's, and the difference.
        analysis: Where the time stands.
    """

    who: str
    status: str
    reason: str | None = None
    error: float | None = None
    allowed: float | None = None
    plan: Plan | None = None
    times: Times | None = None
    gbps: float | None = None
    of_copy: float | None = None
    against_torch: Against | None = None
    analysis: str = ""

    @property
    def failed(self) -> bool:
        """Whether the run must report failure."""
        return self.status in ("wrong", "failed")

    def as_dict(self) -> dict[str, Any]:
        """Every attribute, for JSON: an infinite error becomes null."""
        error = self.error if self.error is not None and isfinite(self.error) else None
        return {**asdict(self), "error": error}


@dataclass(frozen=True)
class CaseResult:
    """One case: the copy beside it and everybody's result; or why it was skipped."""

    case: Case
    skipped: str | None = None
    copy: Times | None = None
    copy_gbps: float | None = None
    results: list[Result] = field(default_factory=list)
    framework: str = "torch"

    @property
    def within_cpu_bound(self) -> bool | None:
        """Whether our layer adds to torch on a CPU no more than it may; None where that is not asked."""
        ours = next((r for r in self.results if r.who == "ours"), None)
        if self.case.fused or self.framework != "torch":
            # What torch is compared with is written out in other operations, or is no layer of ours over it.
            return None
        if ours is None or ours.against_torch is None or ours.plan is None or ours.plan.backend != "eager":
            return None
        if self.case.elements >= LARGE:
            return ours.against_torch.ratio <= CPU_RATIO
        return ours.against_torch.added_us <= CPU_ADDED_US

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            **self.case.as_dict(),
            "skipped": self.skipped,
            "copy": asdict(self.copy) if self.copy else None,
            "copy_gbps": self.copy_gbps,
            "within_cpu_bound": self.within_cpu_bound,
            "results": [result.as_dict() for result in self.results],
        }


def clock_of(everybody: Sequence[Peer], device: Any) -> Clock:
    """The clock of a torch device that hides what the slowest of these costs the host."""
    return clock_for(device, max(peer.flushes for peer in everybody))


def run(
    cases: Iterable[Case], everybody: Sequence[Peer], device: Any, repeat_ms: float, clock: Clock | None = None
) -> Iterator[CaseResult]:
    """Measure the cases, one at a time.

    Args:
        cases: What to measure.
        everybody: `Ours` and others, none of them absent.
        device: A torch device.
        repeat_ms: Budget of each measurement, in milliseconds.
        clock: `clock_of` them by default.
    """
    clock = clock or clock_of(everybody, device)
    overhead_us = clock.overhead_us()
    for case in cases:
        if lacking := _lacks_memory(case, device):
            yield CaseResult(case, skipped=lacking)
            continue
        try:
            yield _measure(case, everybody, device, repeat_ms, clock, overhead_us)
        except (RuntimeError, MemoryError) as error:
            if not _out_of_memory(error):
                raise
            yield CaseResult(case, skipped=f"out of memory: {first_line(error)}")
        if device.type == "cuda":
            import torch

            torch.cuda.empty_cache()


def _measure(
    case: Case, everybody: Sequence[Peer], device: Any, repeat_ms: float, clock: Clock, overhead_us: float
) -> CaseResult:
    inputs = make_inputs(case, device)
    results, functions, found = _check(case, inputs, everybody)
    calls: dict[str, Callable[[], Any]] = {name: partial(function, *inputs) for name, function in functions.items()}
    # Of one tensor, whatever else the case reads; as the framework of ours does it.
    ours = _ours_of(everybody, inputs)
    samples = clock.measure({**calls, "copy": ours.copy(inputs[0])}, repeat_ms)
    copy = Times.of(samples["copy"])
    copy_gbps = 2 * case.tensor_bytes / copy.median_us / 1e3
    why = (found.problem, found.device) if found else (None, None)

    def timed(result: Result) -> Result:
        if result.who not in samples:
            return result
        times = Times.of(samples[result.who])
        gbps = case.bytes / times.median_us / 1e3
        return replace(
            result, times=times, gbps=gbps, of_copy=gbps / copy_gbps, against_torch=_against_torch(result.who, samples),
            analysis=analysis.word(gbps / copy_gbps, times.median_us, overhead_us, result.plan, *why),
        )  # fmt: skip

    return CaseResult(case, None, copy, copy_gbps, [timed(result) for result in results], ours.framework)


def _check(
    case: Case, inputs: Inputs, everybody: Sequence[Peer]
) -> tuple[list[Result], dict[str, Function], Explanation | None]:
    """Everybody's result before any time, the functions of those who are right, and our plan."""
    reference, device = Reference(case, *inputs), inputs[0].device
    for_ours, for_others = _allowed(case, inputs, reference, _ours_of(everybody, inputs))
    results: list[Result] = []
    functions: dict[str, Function] = {}
    found = None
    for peer in everybody:
        if reason := peer.supports(case):
            results.append(Result(peer.name, "refused", reason))
            continue
        plan = None
        allowed = for_ours if isinstance(peer, Ours) else for_others
        try:
            if isinstance(peer, Ours):
                found = planned(case, inputs, peer)
                plan = found.plan
            function = peer.prepare(case)
            poison(case, device)
            verdict = reference.judge(function(*inputs), allowed, isinstance(peer, Ours))
        except Exception as error:  # whatever another library raises is its refusal, not our crash
            results.append(_refusal(peer, plan, error))
            continue
        results.append(_checked(peer, plan, verdict, allowed))
        if verdict.wrong is None:
            functions[peer.name] = function
    return results, functions, found


def _ours_of(everybody: Sequence[Peer], inputs: Inputs) -> Ours:
    return next((peer for peer in everybody if isinstance(peer, Ours)), Ours(inputs[0].device.type))


def _allowed(case: Case, inputs: Inputs, reference: Reference, ours: Ours) -> tuple[float, float]:
    """The framework's own error, for ours and for others.

    Written out, scores are rounded to 16 bits on their way to the softmax: an error that would hide any of ours.
    """

    def error(function: Function) -> float:
        found = reference.judge(function(*inputs), inf, ours=False).error
        return found if isfinite(found) else 0.0

    theirs = error(ours.yardstick(case))
    return error(formulas.written_out(case, wide=True)) if case.fused else theirs, theirs


def _checked(peer: Peer, plan: Plan | None, verdict: Verdict, allowed: float) -> Result:
    status = "ok" if verdict.wrong is None else "wrong"
    return Result(peer.name, status, verdict.wrong, verdict.error, allowed, plan)


def _refusal(peer: Peer, plan: Plan | None, error: Exception) -> Result:
    if isinstance(error, PlanError):
        # The first line repeats the case; the reasons follow.
        reasons = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
        return Result(peer.name, "refused", "; ".join(reasons))
    if _out_of_memory(error):
        if isinstance(peer, Ours):
            raise error
        return Result(peer.name, "refused", "out of memory")
    return Result(peer.name, "failed" if isinstance(peer, Ours) else "refused", first_line(error), plan=plan)


def _against_torch(who: str, samples: Samples) -> Against | None:
    if who == "torch" or "torch" not in samples:
        return None
    return Against.of(samples[who], samples["torch"])


def _lacks_memory(case: Case, device: Any) -> str | None:
    """Why not even to try: inputs, copy, two outputs and float64 pieces are needed at once."""
    # Written out in float32, three tensors more of twice the bytes.
    needed = (OPERATIONS[case.operation].inputs + 3 + 6 * bool(case.fused)) * case.tensor_bytes
    needed += case.elements * ("mask" in case.fused) + 6 * 8 * min(case.elements, 1 << 24)
    free = _free_bytes(device)
    if free is None or needed <= free:
        return None
    return f"needs {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"


def _free_bytes(device: Any) -> int | None:
    if device.type == "cuda":
        import torch

        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + cached)
    try:
        # Linux would not refuse the allocation; it would kill the process later.
        with open("/proc/meminfo") as lines:  # noqa: PTH123  a file of the kernel, not a path to work with
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def _out_of_memory(error: BaseException) -> bool:
    import torch

    text = str(error).lower()
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in text
