"""The measurement of one case: every library is checked against float64, then timed beside its yardsticks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ...explanation import Explanation, explain
from ...planner.plan import Plan, PlanError
from ...torch.device import from_torch
from . import analysis
from .cases import STATISTICS, Case, Inputs
from .check import Reference, Verdict, poison
from .entries import Measures
from .formulas import Function
from .inputs import lacks_memory, make_inputs, out_of_memory, rounded
from .peers import Ours, Peer, first_line, reasons_of
from .result import CaseResult, Result
from .timing import Against, Call, Clock, CpuClock, CudaClock, Flush, Times

Check = Callable[[Peer], tuple[Result, Call | None]]
"""From a library to its result without times, and the call to time if the result is right."""


class Begun(NamedTuple):
    """A case that can be measured: its tensors are made.

    Attributes:
        check: The check of a library.
        yardsticks: Calls that are timed beside the libraries, by the field of CaseResult for their times.
        clean: True if the calls write no elements: no dirty lines are left in the L2 cache before them.
        before: As for `Flush`.
        rates: Function (result, median in microseconds, times of the yardsticks) -> further fields of the result.
        facts: Function (times of the yardsticks) -> further fields of CaseResult.
    """

    check: Check
    yardsticks: Mapping[str, Call] = MappingProxyType({})
    clean: bool = False
    before: Call | None = None
    rates: Callable[[Result, float, Mapping[str, Times]], dict[str, Any]] = lambda *_: {}
    facts: Callable[[Mapping[str, Times]], dict[str, Any]] = lambda _: {}


Begin = Callable[[Any, Any], Begun]
"""From a case and a torch device to what is checked and timed; it makes the tensors of the case."""


def clock_of(everybody: Sequence[Peer], device: Any) -> Clock:
    """The clock of a torch device, with so many flushes of the L2 cache that the host time of no library shows."""
    return CudaClock(device, max(peer.flushes for peer in everybody)) if device.type == "cuda" else CpuClock()


def run(
    cases: Iterable[Case], everybody: Sequence[Peer], device: Any, repeat_ms: float, clock: Clock | None = None
) -> Iterator[CaseResult]:
    """Measure device times of the cases, one at a time.

    Args:
        cases: The cases.
        everybody: `Ours` and other libraries, all of them present.
        device: A torch device.
        repeat_ms: Milliseconds for each measurement.
        clock: The clock; by default `clock_of` these libraries.
    """
    clock = clock or clock_of(everybody, device)
    begin = partial(_begin, ours_of(everybody, device), clock.kind, clock.overhead_us())
    return each_case(cases, "device time", begin, everybody, device, repeat_ms, clock)


def each_case(
    cases: Iterable[Any], measures: Measures, begin: Begin, everybody: Sequence[Peer], device: Any, repeat_ms: float,
    clock: Clock,
) -> Iterator[CaseResult]:  # fmt: skip
    """The results of the cases, one at a time; a case for which memory does not suffice is skipped with the reason.

    Args:
        cases: The cases.
        measures: The kind of measurement.
        begin: Function that makes the tensors of a case.
        everybody, device, repeat_ms, clock: As for `run`.
    """
    for case in cases:
        skipped = lacks_memory(case, device)
        try:
            # No name keeps the tensors for the next case.
            found = skipped or measure_begun(case, begin(case, device), measures, everybody, clock, repeat_ms)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            found = f"out of memory: {first_line(error)}"
        yield CaseResult(case, skipped=found, measures=measures) if isinstance(found, str) else found
        if device.type == "cuda":
            torch.cuda.empty_cache()


def measure_begun(
    case: Case, begun: Begun, measures: Measures, everybody: Sequence[Peer], clock: Any, repeat_ms: float,
    agreed: Callable[[Any], Any] = lambda result: result,
) -> CaseResult:  # fmt: skip
    """Check all libraries, then time their calls and the yardsticks; `agreed` is that of `check_each`."""
    results, calls = check_each(case, everybody, begun.check, agreed)
    calls |= begun.yardsticks
    # A copy always follows the usual flush: it leaves as many dirty lines as it finds, and so do calls like it.
    flush = Flush([name for name in calls if name != "copy"] if begun.clean else (), begun.before)
    samples = clock.measure(calls, repeat_ms, flush) if calls else {}
    samples = {name: [us / case.calls for us in of_all] for name, of_all in samples.items()}
    times = {name: Times.of(samples[name]) for name in begun.yardsticks}
    for i, result in enumerate(results):
        if found := samples.get(result.who):
            own, others = Times.of(found), samples.get("torch") if result.who != "torch" else None
            against = Against.of(found, others) if others else None
            more = begun.rates(result, own.median_us, times)
            results[i] = replace(result, times=own, against_torch=against, **more)
    facts: dict[str, Any] = {**times, **begun.facts(times)}
    return CaseResult(case, results=results, measures=measures, **facts)


def over(yardstick: str, field: str) -> Callable[[Result, float, Mapping[str, Times]], dict[str, Any]]:
    """`Begun.rates`: the ratio to a yardstick as a field of the result."""
    return lambda _, us, times: {field: us / times[yardstick].median_us}


def check_each(
    case: Case, everybody: Sequence[Peer], check: Check, agreed: Callable[[Any], Any] = lambda result: result
) -> tuple[list[Result], dict[str, Call]]:
    """The results before any time, one per library, and the calls of those that are right, by name.

    Args:
        case: The case.
        everybody: The libraries.
        check: The check of a library.
        agreed: Function that makes one result of those of several processes.
    """
    results, calls = [], dict[str, Call]()
    for peer in everybody:
        if reason := peer.supports(case):
            results.append(Result(peer.name, "refused", reason))
            continue
        try:
            result, call = check(peer)
        except Exception as error:  # whatever another library raises is its refusal, not our crash
            result, call = refusal(peer, None, error), None
        results.append(agreed(result))
        if call is not None and results[-1].status == "ok":
            calls[peer.name] = call
    return results, calls


def judged(
    case: Case, peer: Peer, call: partial[Any], reason: str | None, error: float, allowed: float | None = None
) -> tuple[Result, Call]:  # fmt: skip
    """The result of a library before it is timed, and the call to time; the reason says what is wrong, if anything."""
    facts = peer.facts(case, call, call.args[0].device)
    status, note = "wrong" if reason else "ok", peer.note(case, *call.args)
    return Result(peer.name, status, reason, error, allowed, analysis=note, **facts), call


def beside_one_read(check: Check, rows: Any) -> Begun:
    """A case whose calls are timed beside one read of the rows of a torch tensor: our logsumexp of them."""
    from onlinesoftmax import logsumexp

    one_read = partial(logsumexp, rows, -1)
    return Begun(check, {"one_read": one_read}, clean=True, rates=over("one_read", "of_read"))


def _begin(ours: Ours, clock_kind: str, overhead_us: float, case: Case, device: Any) -> Begun:
    """Make the tensors of a case of rows, which is timed beside a copy of one tensor, whatever else it reads."""
    inputs = make_inputs(case, device)
    machine, state = from_torch(device.type, device.index or 0), "dirty" if case.writes_elements else "clean"

    def rates(result: Result, us: float, times: Mapping[str, Times]) -> dict[str, Any]:
        gbps, copies = case.bytes / us / 1e3, us / times["copy"].median_us
        of_copy = gbps / facts(times)["copy_gbps"]
        problem = planned(case, inputs, ours).problem if result.plan else None
        return {
            "gbps": gbps, "of_copy": of_copy, "copies": copies,
            "utilisation": gbps / machine.bandwidth if machine.kind == "cuda" else None,
            "analysis": analysis.word(of_copy, us, overhead_us, result.plan, problem, machine),
        }  # fmt: skip

    def facts(times: Mapping[str, Times]) -> dict[str, Any]:
        return {
            "framework": ours.framework, "flush": None if clock_kind == "cpu" else state, "overhead_us": overhead_us,
            "copy_gbps": 2 * case.tensor_bytes / times["copy"].median_us / 1e3,
        }  # fmt: skip

    # The copy is made by the framework of our functions.
    copy = partial(ours.copy(inputs[0], case.calls), inputs[0])
    return Begun(
        check_of_rows(case, inputs, ours), {"copy": copy}, clean=not case.writes_elements, rates=rates, facts=facts
    )


def check_of_rows(case: Case, inputs: Inputs, ours: Ours) -> Check:
    """The check of a case of rows against float64; the errors that are allowed are those of the framework of `ours`."""
    # Ours keeps per-row outputs in the accumulator's dtype.  Others take saved outputs as PyTorch rounds them, so their
    # exact result is computed from the rounded ones.
    theirs, for_ours, for_others = rounded(case, inputs), list[Judge](), list[Judge]()
    same = all(a is b for a, b in zip(inputs, theirs, strict=True))
    # The case itself comes last: its function is the one that is timed.
    for each in (*case.also_checked, case):
        reference = Reference(each, *inputs)
        for_ours.append(Judge(each, reference, inputs, ours.yardstick(each)))
        reference = reference if same else Reference(each, *theirs)
        for_others.append(Judge(each, reference, theirs, ours.own(each)))

    def check(peer: Peer) -> tuple[Result, Call | None]:
        plan = planned(case, inputs, peer).plan if isinstance(peer, Ours) else None
        try:
            found = [judge.of(peer, plan) for judge in (for_ours if peer.ours else for_others)]
        except Exception as error:  # as in `check_each`, with the plan
            return refusal(peer, plan, error), None
        result, call = next((each for each in found if each[0].failed), found[-1])
        if result.failed:
            return result, None
        result = replace(result, **peer.facts(case, call, inputs[0].device))
        return result, partial(peer.repeated(case), *peer.arguments(case, inputs)) if case.calls > 1 else call

    return check


class Judge:
    """The exact result for these inputs, and the errors that are allowed: those of the framework's own function."""

    def __init__(self, case: Case, reference: Reference, inputs: Inputs, yardstick: Function) -> None:
        self._case, self._reference, self._inputs = case, reference, inputs
        self.allowed = reference.allowed(yardstick(*Peer("").arguments(case, inputs)))

    def verdict(self, found: Any, ours: bool) -> Verdict:
        """Judge the tensors that a function returned."""
        return self._reference.judge(found, self.allowed, ours)

    def of(self, peer: Peer, plan: Plan | None = None) -> tuple[Result, Call]:
        """The result of a library before it is timed, and the function without arguments to time."""
        call = partial(peer.prepare(self._case), *peer.arguments(self._case, self._inputs))
        poison(peer.returns(self._case), self._inputs[0].device)
        verdict = self.verdict(peer.whole(self._case, call()), peer.ours)
        status = "ok" if verdict.wrong is None else "wrong"
        return Result(peer.name, status, verdict.wrong, verdict.error, self.allowed[0], plan), call


def ours_of(everybody: Sequence[Peer], device: Any) -> Ours:
    """Our library among the peers, or one without a forced plan."""
    return next((peer for peer in everybody if isinstance(peer, Ours)), Ours(device.type))


def refusal(peer: Peer, plan: Plan | None, error: Exception) -> Result:
    """The result of a library that raised an error; raises the error where our library has no memory."""
    if isinstance(error, PlanError):
        return Result(peer.name, "refused", reasons_of(error))
    if out_of_memory(error):
        if isinstance(peer, Ours):
            raise error
        return Result(peer.name, "refused", "out of memory")
    return Result(peer.name, "failed" if peer.ours else "refused", first_line(error), plan=plan)


def planned(case: Case, inputs: Inputs, ours: Ours) -> Explanation:
    """The plan that our library will run; with a gradient, the plan of the launch that writes the gradient.

    Raises:
        PlanError: what was forced cannot run, or only in JAX's interpreter, whose times mean nothing.
    """
    if ours.framework == "jax" and ours.device_type == "cpu" and ours.backend == "pallas":
        raise PlanError("Pallas kernels need an NVIDIA GPU; on a CPU, an interpreter runs them")
    declaration, names = case.declaration, case.option_tensors
    options = dict(zip(names, inputs[len(inputs) - len(names) :], strict=True))
    one_kernel = case.with_gradient and case.reduces_rows
    writer = case.gradient if case.with_gradient and not one_kernel else case
    statistics = STATISTICS[case.operation] if ours.framework == "torch" and writer is case else ()
    asked: dict[str, Any] = {"operation": writer.operation, "backend": ours.backend, "strategy": ours.strategy}
    asked |= case.option_values | options
    if one_kernel:
        # One kernel writes the losses and their gradient; in JAX also the states.
        kept = declaration.kept_outputs if ours.framework == "jax" else ()
        asked["outputs"] = tuple(dict.fromkeys((*declaration.always, "y", *kept)))
    elif statistics:
        asked["outputs"] = tuple(dict.fromkeys((*declaration.kept_outputs, "lse", *statistics)))
    if ours.framework == "torch":
        found = explain(inputs[0], case.dim, **asked)
        # PyTorch's operations write nothing beside the result.
        plain = declaration.has_target and found.plan.backend == "eager"
        return (
            explain(inputs[0], case.dim, **asked | {"operation": case.operation, "outputs": None}) if plain else found
        )
    # JAX makes arrays of these tensors, so only their shapes count.
    asked |= {name: tuple(t.shape) for name, t in options.items()}
    device = "cpu" if ours.device_type == "cpu" else None
    return explain(case.shape, case.dim, dtype=case.dtype, device=device, framework="jax", **asked)
