"""Host time: microseconds of the CPU for one eager call, without the device's own time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import torch

from ...explanation import Explanation
from .cases import Case, Inputs
from .inputs import lacks_memory, make_inputs
from .measure import check_each, check_of_rows, clock_of, ours_of, planned
from .peers import Peer, first_line
from .result import BARE, BOTH, OUT, PLAIN, RECORDING, CaseResult, Result
from .timing import Clock, Times

Call = Callable[[], Any]
Calls = dict[str, Call]


def run_host(
    cases: Iterable[Case], everybody: Sequence[Peer], device: Any, repeat_ms: float, clock: Clock | None = None
) -> Iterator[CaseResult]:
    """Measure the host time of the cases.

    All calls of neighbouring cases with one shape are interleaved, so that drift of the machine affects them alike: the
    times of two operations can be compared, too.

    Args:
        cases: Forward cases without a gradient.
        everybody: `Ours` and other libraries, all of them present.
        device: A torch device.
        repeat_ms: Milliseconds for each kind of call of each library.
        clock: The clock; by default `clock_of` these libraries.
    """
    clock = clock or clock_of(everybody, device)
    for _, group in groupby(cases, key=lambda case: case.shape):
        yield from _together(list(group), everybody, device, repeat_ms, clock)


def _together(
    cases: Sequence[Case], everybody: Sequence[Peer], device: Any, repeat_ms: float, clock: Clock
) -> Iterator[CaseResult]:
    """The results of cases whose calls are interleaved."""
    prepared = []
    for case in cases:
        reason = lacks_memory(replace(case, with_gradient=True), device)
        prepared.append((case, reason, [] if reason else _prepared(case, everybody, device)))
    every = {
        f"{place} {i} {name}": call
        for place, (_, _, found) in enumerate(prepared)
        for i, (_, calls) in enumerate(found)
        for name, call in calls.items()
    }
    samples = clock.host_us(every, repeat_ms) if every else {}
    for place, (case, reason, found) in enumerate(prepared):
        timed = [
            replace(result, calls={name: Times.of(samples[f"{place} {i} {name}"]) for name in calls})
            for i, (result, calls) in enumerate(found)
        ]
        yield CaseResult(case, skipped=reason, results=timed, measures="host time")


def _prepared(case: Case, everybody: Sequence[Peer], device: Any) -> list[tuple[Result, Calls]]:
    """The result of each library before any time, with the calls to time if it is right."""
    inputs, with_gradient = make_inputs(case, device), replace(case, with_gradient=True)
    more = make_inputs(with_gradient, device)
    return [_prepared_by(peer, case, inputs, with_gradient, more) for peer in everybody]


def _prepared_by(
    peer: Peer, case: Case, inputs: Inputs, with_gradient: Case, more: Inputs
) -> tuple[Result, Calls]:  # fmt: skip
    if not peer.in_torch:
        reason = "takes arrays of JAX: the conversion of tensors would be measured"
        return Result(peer.name, "refused", reason), {}
    ours = ours_of([peer], inputs[0].device)
    (plain,), called = check_each(case, [peer], check_of_rows(case, inputs, ours))
    (gradient,), both = check_each(with_gradient, [peer], check_of_rows(with_gradient, more, ours))
    result = replace(plain if plain.status != "ok" or not gradient.failed else gradient, extra_bytes=None)
    if result.status != "ok":
        return result, {}
    calls: Calls = {PLAIN: called[peer.name]}
    reasons = [_add_out(calls, peer, case, inputs)]
    if gradient.status == "ok":
        calls[RECORDING] = partial(peer.prepare(case), *peer.arguments(with_gradient, more)[: len(inputs)])
        calls[BOTH] = both[peer.name]
    else:
        reasons.append(f"with gradient: {gradient.reason}")
    if plain.plan and plain.plan.backend != "eager":
        reasons.append(_add_bare_launch(calls, planned(case, inputs, ours), inputs[0]))
    return replace(result, reason="; ".join(filter(None, reasons)) or None), calls


def _add_out(calls: Calls, peer: Peer, case: Case, inputs: Inputs) -> str | None:
    """Add the call with `out=`; the reason where the library has such a call and it does not work."""
    function = peer.prepare_out(case)
    if function is None:
        return None
    expected = calls[PLAIN]()
    y = torch.full_like(expected, float("nan"))
    try:
        function(inputs[0], y)
    except Exception as error:  # whatever another library raises is its refusal, not our crash
        return f"out=: {first_line(error)}"
    if not torch.equal(y, expected):
        return "out=: another result than without"
    calls[OUT] = partial(function, inputs[0], y)
    return None


def _add_bare_launch(calls: Calls, ours: Explanation, x: Any) -> str | None:
    """Add the launch of our kernel, of rows in a tensor of two dimensions; the reason where it cannot be launched."""
    from ...kernels import registry
    from ...kernels.request import Request
    from .tune import operand_tensors

    request = Request(ours.task, ours.plan)
    try:
        x = x.reshape(request.task.rows, request.task.cols)
        first, more = operand_tensors(request, [x] * request.operation.inputs, torch.empty_like(x))
        launch = registry.load(ours.plan.backend).prepare(request)
        launch(x, first, more)
    except Exception as error:  # the call that a user makes was checked; its launch alone is an extra
        return f"bare launch: {first_line(error)}"
    calls[BARE] = partial(launch, x, first, more)
    return None
