"""The measurement of one case: every library is checked against float64, then timed beside a copy of the same size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch

from ...explanation import Explanation, explain
from ...planner.plan import Plan, PlanError
from ...torch.device import from_torch
from . import analysis
from .cases import STATISTICS, Case, Inputs
from .check import Reference, Verdict, poison
from .entries import Measures
from .formulas import Function
from .inputs import lacks_memory, make_inputs, out_of_memory
from .peers import Ours, Peer, first_line, reasons_of
from .result import FORMS, CaseResult, Result
from .timing import Against, Call, Clock, Flush, Samples, Times, clock_for

C = TypeVar("C", bound=Case)


@dataclass
class Checked:
    """The results before any time, and the calls to time.

    Attributes:
        results: One result per library.
        calls: A call without arguments for each library whose result is right, by name.
        ours: Our plan and its task; None where ours has none.
    """

    results: list[Any] = field(default_factory=list)
    calls: dict[str, Callable[[], Any]] = field(default_factory=dict)
    ours: Explanation | None = None


def clock_of(everybody: Sequence[Peer], device: Any) -> Clock:
    """The clock of a torch device that hides the host time of the slowest of these libraries."""
    return clock_for(device, max(peer.flushes for peer in everybody))


def run(
    cases: Iterable[Case], everybody: Sequence[Peer], device: Any, repeat_ms: float, clock: Clock | None = None
) -> Iterator[CaseResult]:
    """Measure the cases, one at a time.

    Args:
        cases: The cases.
        everybody: `Ours` and other libraries, all of them present.
        device: A torch device.
        repeat_ms: Milliseconds for each measurement.
        clock: The clock; by default `clock_of` these libraries.
    """
    clock = clock or clock_of(everybody, device)
    overhead_us = clock.overhead_us()

    def measure(case: Case) -> CaseResult:
        return _measure(case, everybody, device, repeat_ms, clock, overhead_us)

    return each_case(cases, device, lambda case: lacks_memory(case, device), measure)


def each_case(
    cases: Iterable[C], device: Any, lacks: Callable[[C], str | None], measure: Callable[[C], CaseResult],
    measures: Measures = "device time",
) -> Iterator[CaseResult]:  # fmt: skip
    """The results of the cases, one at a time; a case for which memory does not suffice is skipped with the reason.

    Args:
        cases: The cases.
        device: A torch device.
        lacks: Function that returns the reason why a case does not fit in memory, or None.
        measure: Function that measures a case.
        measures: What the suite measures.
    """
    for case in cases:
        if reason := lacks(case):
            yield CaseResult(case, skipped=reason, measures=measures)
            continue
        try:
            yield measure(case)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            yield CaseResult(case, skipped=f"out of memory: {first_line(error)}", measures=measures)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measure(
    case: Case, everybody: Sequence[Peer], device: Any, repeat_ms: float, clock: Clock, overhead_us: float
) -> CaseResult:
    inputs = make_inputs(case, device)
    checked = check_all(case, inputs, everybody)
    ours = ours_of(everybody, device)
    # The copy is of one tensor, whatever else the case reads, by the framework of our functions.
    # The copy is timed behind the usual flush, which its own writes balance.
    flush = Flush(() if case.writes_elements else tuple(checked.calls))
    calls: dict[str, Call] = {**checked.calls, "copy": partial(ours.copy(inputs[0], case.calls), inputs[0])}
    if case.calls > 1:
        whos = [peer for peer in everybody if peer.name in checked.calls]
        calls |= {peer.name: partial(peer.repeated(case), *peer.arguments(case, inputs)) for peer in whos}
    samples = {
        who: [us / case.calls for us in of_all] for who, of_all in clock.measure(calls, repeat_ms, flush).items()
    }
    copy = Times.of(samples["copy"])
    copy_gbps = 2 * case.tensor_bytes / copy.median_us / 1e3
    why = (checked.ours.problem, checked.ours.device) if checked.ours else (None, None)
    peak = from_torch("cuda", device.index or 0).bandwidth if device.type == "cuda" else None

    def rates(result: Result, us: float) -> dict[str, Any]:
        gbps = case.bytes / us / 1e3
        return {
            "gbps": gbps, "of_copy": gbps / copy_gbps, "copies": us / copy.median_us,
            "utilisation": gbps / peak if peak else None,
            "analysis": analysis.word(gbps / copy_gbps, us, overhead_us, result.plan, *why),
        }  # fmt: skip

    state = None if clock.kind == "cpu" else "dirty" if case.writes_elements else "clean"
    results = with_times(checked.results, samples, rates)
    return CaseResult(case, None, copy, copy_gbps, results, ours.framework, state, overhead_us)


def with_times(
    results: Sequence[Result], samples: Samples, rates: Callable[[Result, float], dict[str, Any]] = lambda *_: {}
) -> list[Result]:
    """The results, each with the times of its call if there are any, also relative to PyTorch's.

    The function rates(result, median in microseconds) gives further fields of a result.
    """
    timed = []
    for result in results:
        if found := samples.get(result.who):
            times, others = Times.of(found), samples.get("torch") if result.who != "torch" else None
            against, more = Against.of(found, others) if others else None, rates(result, times.median_us)
            result = replace(result, times=times, against_torch=against, **more)
        timed.append(result)
    return timed


class Begun(NamedTuple):
    """A case that can be measured: its tensors are made.

    Attributes:
        check: Function that returns the result of a library without times, and its call.
        yardsticks: Calls that are timed beside the libraries, by the field of CaseResult for their times; the ratio to
            the first is recorded.
        clean, before: As for `Flush`; `clean` is True for all calls or none.
    """

    check: Callable[[Peer], tuple[Result, Call]]
    yardsticks: Mapping[str, Call] = MappingProxyType({})
    clean: bool = False
    before: Call | None = None


def beside_one_read(check: Callable[[Peer], tuple[Result, Call]], rows: Any) -> Begun:
    """A case whose calls are timed beside one read of the rows of a torch tensor: our logsumexp of them."""
    from onlinesoftmax import logsumexp

    return Begun(check, {"one_read": partial(logsumexp, rows, -1)}, clean=True)


def measure_begun(
    case: Case, begun: Begun, measures: Measures, everybody: Sequence[Peer], clock: Any, repeat_ms: float,
    agreed: Callable[[Any], Any] = lambda result: result,
) -> CaseResult:  # fmt: skip
    """Check all libraries, then time their calls and the yardsticks; `agreed` is that of `check_each`."""
    results, calls = check_each(case, everybody, begun.check, agreed)
    form, names = FORMS[measures], FORMS[measures].yardsticks
    calls |= {names[place]: call for place, call in begun.yardsticks.items()}
    flush = Flush(tuple(calls) if begun.clean else (), begun.before)
    samples = clock.measure(calls, repeat_ms, flush) if calls else {}
    times: dict[str, Any] = {place: Times.of(samples[names[place]]) for place in begun.yardsticks}
    first = next(iter(times.values()), None)

    def ratio(_: Result, us: float) -> dict[str, float]:
        return {form.fields[0]: us / first.median_us} if first else {}

    return CaseResult(case, results=with_times(results, samples, ratio), measures=measures, **times)


def check_each(
    case: Case, everybody: Sequence[Peer], check: Callable[[Peer], tuple[Result, Call]],
    agreed: Callable[[Any], Any] = lambda result: result, plan_of: Callable[[Peer], Plan | None] = lambda _: None,
) -> tuple[list[Result], dict[str, Call]]:  # fmt: skip
    """The results before any time, one per library, and the calls of those that are right, by name.

    Args:
        case: The case.
        everybody: The libraries.
        check: Function that returns the result of a library, and its call.
        agreed: Function that makes one result of those of several processes.
        plan_of: Function that returns the plan of a library that has raised an error.
    """
    results, calls = [], dict[str, Call]()
    for peer in everybody:
        if reason := peer.supports(case):
            results.append(Result(peer.name, "refused", reason))
            continue
        try:
            result, call = check(peer)
        except Exception as error:  # whatever another library raises is its refusal, not our crash
            result = refusal(peer, plan_of(peer), error)
        results.append(agreed(result))
        if results[-1].status == "ok":
            calls[peer.name] = call
    return results, calls


def judged(
    case: Case, peer: Peer, call: partial[Any], reason: str | None, error: float, allowed: float | None = None
) -> tuple[Result, Call]:  # fmt: skip
    """The result of a call of tensors without times, and the call; the reason says what is wrong with its result."""
    facts = peer.facts(case, call, call.args[0].device)
    status, note = "wrong" if reason else "ok", peer.note(case, *call.args)
    return Result(peer.name, status, reason, error, allowed, analysis=note, **facts), call


def check_all(
    case: Case, inputs: Inputs, everybody: Sequence[Peer], agreed: Callable[[Any], Any] = lambda result: result
) -> Checked:
    """Check every library before any time is taken; `agreed` makes one result of those of several processes."""
    checked, device = Checked(), inputs[0].device
    for_ours, for_others = _judges(case, inputs, ours_of(everybody, device))

    def plan_of(peer: Peer) -> Plan | None:
        return checked.ours.plan if isinstance(peer, Ours) and checked.ours else None

    def check(peer: Peer) -> tuple[Result, Call]:
        if isinstance(peer, Ours):
            checked.ours = planned(case, inputs, peer)
        found = [judge.of(peer, plan_of(peer)) for judge in (for_ours if peer.ours else for_others)]
        # The case itself comes last: its function is the one that is timed.
        result, call = next((each for each in found if each[0].failed), found[-1])
        return result if result.failed else replace(result, **peer.facts(case, call, device)), call

    checked.results, checked.calls = check_each(case, everybody, check, agreed, plan_of)
    return checked


def _judges(case: Case, inputs: Inputs, ours: Ours) -> tuple[list[Judge], list[Judge]]:
    """The judges of our results, and those of other libraries' results; the judges of the case itself come last."""
    for_ours, for_others = [], []
    # Others take saved outputs as PyTorch rounds them, and are judged by the exact result of these.
    theirs = Peer.takes(ours, case, inputs)
    same = all(a is b for a, b in zip(inputs, theirs, strict=True))
    for each in (*case.also_checked, case):
        reference = Reference(each, *inputs)
        for_ours.append(Judge(each, reference, inputs, ours.yardstick(each)))
        reference = reference if same else Reference(each, *theirs)
        for_others.append(Judge(each, reference, theirs, ours.own(each)))
    return for_ours, for_others


class Judge:
    """The exact result for these inputs, and the errors that are allowed: those of the framework's own function."""

    def __init__(self, case: Case, reference: Reference, inputs: Inputs, yardstick: Function) -> None:
        self._case, self._reference, self._inputs = case, reference, inputs
        self.allowed = reference.allowed(yardstick(*Peer("").arguments(case, inputs)))

    def verdict(self, found: Any, ours: bool) -> Verdict:
        """Judge the tensors that a function returned."""
        return self._reference.judge(found, self.allowed, ours)

    def of(self, peer: Peer, plan: Plan | None = None) -> tuple[Result, Callable[[], Any]]:
        """The result of a library without times, and its call without arguments."""
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
