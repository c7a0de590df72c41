"""Host time: microseconds of the CPU for one eager call, without the device's own time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

from ...explanation import Explanation
from .cases import Case
from .exact import Inputs
from .inputs import make_inputs
from .memory import lacks_memory
from .peers import Ours, Peer, first_line
from .result import CallsCaseResult, CallsResult, Result, as_calls
from .run import check_all, clock_of
from .timing import Clock, Times

PLAIN, OUT, RECORDING, BOTH, BARE = "plain", "out=", "recording", "forward+backward", "bare launch"
"""Names of the kinds of calls.

A plain call has a tensor without a gradient.  "out=" writes to a given tensor.  "recording" is the forward call on a
tensor that requires a gradient, which autograd records; "forward+backward" is that call and the gradient of its result.
"bare launch" is the launch of the compiled kernel alone: the least host time that our layers could reach.
"""

Call = Callable[[], Any]
Calls = dict[str, Call]


def run_host(
    cases: Iterable[Case], everybody: Sequence[Peer], device: Any, repeat_ms: float, clock: Clock | None = None
) -> Iterator[CallsCaseResult]:
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
) -> Iterator[CallsCaseResult]:
    """The results of cases whose calls are interleaved."""
    lacking = [lacks_memory(replace(case, with_gradient=True), device) for case in cases]
    prepared = [
        ([], {}) if reason else _prepared(case, everybody, device) for case, reason in zip(cases, lacking, strict=True)
    ]
    flat = {
        f"{place} {who} {name}": call
        for place, (_, calls) in enumerate(prepared)
        for who, named in calls.items()
        for name, call in named.items()
    }
    samples = clock.host_us(flat, repeat_ms) if flat else {}
    for place, (case, reason, (results, calls)) in enumerate(zip(cases, lacking, prepared, strict=True)):
        if reason:
            yield CallsCaseResult(case, skipped=reason)
            continue
        timed = {
            who: {name: Times.of(samples[f"{place} {who} {name}"]) for name in named} for who, named in calls.items()
        }  # fmt: skip
        yield CallsCaseResult(case, results=[replace(each, calls=timed.get(each.who, {})) for each in results])


def _prepared(case: Case, everybody: Sequence[Peer], device: Any) -> tuple[list[CallsResult], dict[str, Calls]]:
    """The results before any time, and the calls to time of each library whose results are right."""
    results: list[CallsResult] = []
    found: dict[str, Calls] = {}
    inputs, with_gradient = make_inputs(case, device), replace(case, with_gradient=True)
    more = make_inputs(with_gradient, device)
    for peer in everybody:
        if not peer.in_torch:
            reason = "takes arrays of JAX: the conversion of tensors would be measured"
            results.append(CallsResult(peer.name, "refused", reason))
            continue
        checked, both = check_all(case, inputs, [peer]), check_all(with_gradient, more, [peer])
        (plain,), (gradient,) = checked.results, both.results
        result = as_calls(plain if plain.status != "ok" or not gradient.failed else gradient)
        if result.status != "ok":
            results.append(result)
            continue
        calls: Calls = {PLAIN: checked.calls[peer.name]}
        reasons = [_add_out(calls, peer, case, inputs)]
        if gradient.status == "ok":
            calls[RECORDING] = partial(peer.prepare(case), *peer.arguments(with_gradient, more)[: len(inputs)])
            calls[BOTH] = both.calls[peer.name]
        else:
            reasons.append(f"with gradient: {gradient.reason}")
        if isinstance(peer, Ours) and checked.ours and checked.ours.plan.backend != "eager":
            reasons.append(_add_bare_launch(calls, checked.ours, inputs[0]))
        found[peer.name] = calls
        results.append(replace(result, reason="; ".join(filter(None, reasons)) or None))
    return results, found


def _add_out(calls: Calls, peer: Peer, case: Case, inputs: Inputs) -> str | None:
    """Add the call with `out=`; the reason where the library has such a call and it does not work."""
    import torch

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
    import torch

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


def below(results: Sequence[Result], device_kind: str) -> list[str]:
    """The lines below the table: the meaning of each column of times."""
    if device_kind == "cpu":
        first = "Host time: on a CPU a call is over when it returns, so each time holds the arithmetic."
    else:
        first = "Host time: until the call returns; the GPU's own time is not in it."
    there = {name for result in results if isinstance(result, CallsResult) for name in result.calls}
    lines = {
        OUT: "out=: the result goes to a tensor that is given.",
        RECORDING: "recording: the forward call on a tensor that requires a gradient.",
        BOTH: "forward+backward: that call and the gradient of its result.",
        BARE: "bare launch: our compiled kernel without the layers above it.",
    }
    return [first, *(line for name, line in lines.items() if name in there)]
