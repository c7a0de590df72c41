"""The measurement of one sharded case: every peer is checked against float64, then timed in step by all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ....planner.plan import PlanError
from ..cases import Case
from ..check import Reference, poison
from ..exact import Inputs
from ..inputs import make_inputs
from ..memory import extra_bytes, lacks_memory, out_of_memory
from ..peers import Ours, Peer, first_line, reasons_of
from .clock import GroupClock
from .collectives import collectives_of
from .peers import Member
from .result import ShardedCaseResult, ShardedResult, row_bytes
from .team import Team

COPY, ALL_REDUCE = "copy of a shard", "all-reduce of rows"
"""Names of the two yardsticks among the timed calls."""

Call = Callable[[], Any]


@dataclass
class Checked:
    """The results before any time, and the calls to time, by name."""

    results: list[ShardedResult] = field(default_factory=list)
    calls: dict[str, Call] = field(default_factory=dict)


def run(
    cases: Iterable[Case], everybody: Sequence[Member], team: Team, repeat_ms: float
) -> Iterator[ShardedCaseResult]:
    """Measure the cases, one at a time, in all processes of the team.

    Args:
        cases: The cases, with the shapes of the whole inputs.
        everybody: `OursSharded` and what it is compared with.
        team: The processes.
        repeat_ms: Milliseconds for each measurement.
    """
    clock = GroupClock(team)
    for case in cases:
        lacking = lacks_memory(case, team.device)
        if team.largest(float(lacking is not None))[0]:
            yield ShardedCaseResult(case, skipped=lacking or "another process lacks memory", processes=team.size)
            continue
        inputs = make_inputs(case, team.device)
        checked = _check(case, inputs, everybody, team)
        yield _timed(case, checked, inputs, team, clock, repeat_ms)
        # The next case needs the memory.
        del inputs, checked
        if team.device.type == "cuda":
            torch.cuda.empty_cache()


def _check(case: Case, inputs: Inputs, everybody: Sequence[Member], team: Team) -> Checked:
    checked = Checked()
    judges = [_Judge(each, inputs, team) for each in (*case.also_checked, case)]
    for peer in everybody:
        if reason := peer.supports(case):
            checked.results.append(ShardedResult(peer.name, "refused", reason))
            continue
        result, call = _checked(case, peer, judges, team.device)
        # A result of one process counts for all, and a call that one process cannot make is timed by none.
        numbers = float(result.status != "ok"), result.sent_row_bytes or 0.0, float(result.extra_bytes or 0)
        stopped, sent, extra = team.largest(*numbers)
        if stopped:
            if result.status == "ok":
                result = replace(result, status="failed", reason="another process has a wrong result or an error")
            checked.results.append(result)
            continue
        memory = None if result.extra_bytes is None else int(extra)
        checked.results.append(replace(result, sent_row_bytes=sent, extra_bytes=memory))
        checked.calls[peer.name] = call
    return checked


def _checked(case: Case, peer: Member, judges: Sequence[_Judge], device: Any) -> tuple[ShardedResult, Call]:
    """The result of a peer on this process without times, and its call."""
    try:
        found = [judge.of(peer) for judge in judges]
        # The case itself comes last: its function is the one that is timed.
        result, call = next((each for each in found if each[0].failed), found[-1])
        if result.failed:
            return result, call
        exchanged = collectives_of(call)
        extra = extra_bytes(lambda: _parts(case, peer, call()), device)
    except Exception as error:  # whatever another library raises is its refusal, not our crash
        return _refusal(peer, error), lambda: None
    formula = row_bytes(case, exchanged.by_peer_memory) if peer.ours and not peer.whole else None
    uncounted = f"not counted: {', '.join(exchanged.unknown)}" if exchanged.unknown else ""
    return replace(
        result, extra_bytes=extra, collectives=exchanged.number, sent_row_bytes=exchanged.sent_bytes / case.rows,
        formula_row_bytes=formula, analysis=uncounted,
    ), call  # fmt: skip


def _refusal(peer: Member, error: Exception) -> ShardedResult:
    if isinstance(error, PlanError):
        return ShardedResult(peer.name, "refused", reasons_of(error))
    status = "failed" if peer.ours and not out_of_memory(error) else "refused"
    return ShardedResult(peer.name, status, first_line(error))


def _parts(case: Case, peer: Member, found: Any) -> tuple[Any, ...]:
    """The results of this process as plain tensors."""
    return tuple(peer.part(case, y) for y in (found if isinstance(found, tuple) else (found,)))


class _Judge:
    """The exact result of the whole rows, and the error that is allowed: that of PyTorch's own function on them."""

    def __init__(self, case: Case, inputs: Inputs, team: Team) -> None:
        self._case, self._inputs, self._team = case, inputs, team
        self._reference = Reference(case, *inputs)
        yardstick = Ours(team.device.type).yardstick(case)
        self._allowed = self._reference.allowed(yardstick(*Peer("").arguments(case, inputs)))

    def of(self, peer: Member) -> tuple[ShardedResult, Call]:
        """The result of a peer without times, and its call without arguments."""
        case, team = self._case, self._team
        call = partial(peer.prepare(case), *peer.arguments(case, self._inputs))
        poison(case if peer.whole else team.local(case), team.device)
        found = _parts(case, peer, call())
        if not peer.whole:
            found = tuple(
                team.joined(case, y) if returned.kind == "element" else y
                for returned, y in zip(case.returned, found, strict=True)
            )
        verdict = self._reference.judge(found, self._allowed, peer.ours)
        status = "ok" if verdict.wrong is None else "wrong"
        return ShardedResult(peer.name, status, verdict.wrong, verdict.error, self._allowed[0]), call


def _timed(
    case: Case, checked: Checked, inputs: Inputs, team: Team, clock: GroupClock, repeat_ms: float
) -> ShardedCaseResult:
    shard = team.part(case, inputs[0])
    target, numbers = torch.empty_like(shard), torch.zeros(case.rows, device=team.device)
    yardsticks: dict[str, Call] = {
        COPY: lambda: target.copy_(shard),
        ALL_REDUCE: lambda: dist.all_reduce(numbers, group=team.group),
    }
    timed = clock.measure({**checked.calls, **yardsticks}, repeat_ms)
    copy, all_reduce = timed[COPY].times, timed[ALL_REDUCE].times

    def with_times(result: ShardedResult) -> ShardedResult:
        if result.who not in checked.calls:
            return result
        times, host_us = timed[result.who]
        return replace(result, times=times, host_us=host_us, copies=times.median_us / copy.median_us)

    return ShardedCaseResult(
        case, None, copy, 2 * shard.nbytes / copy.median_us / 1e3, [with_times(each) for each in checked.results],
        processes=team.size, all_reduce=all_reduce,
    )  # fmt: skip
