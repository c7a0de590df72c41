"""The measurement of one sharded case: every peer is checked against float64, then timed in step by all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ....planner.plan import PlanError
from ..cases import Case
from ..check import Reference
from ..exact import Inputs
from ..inputs import make_inputs
from ..memory import extra_bytes, lacks_memory, out_of_memory
from ..peers import Ours, first_line, reasons_of
from ..result import ALL_REDUCE, COPY_OF_SHARD, ShardedCaseResult, ShardedResult, made
from ..run import Checked, Judge
from .clock import GroupClock
from .collectives import collectives_of, row_bytes
from .peers import Member
from .team import Team

Call = Callable[[], Any]


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
    yardstick = Ours(team.device.type).yardstick
    judges = [Judge(each, Reference(each, *inputs), inputs, yardstick(each)) for each in (*case.also_checked, case)]
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


def _checked(case: Case, peer: Member, judges: Sequence[Judge], device: Any) -> tuple[ShardedResult, Call]:
    """The result of a peer on this process without times, and its call."""
    try:
        found = [judge.of(peer) for judge in judges]
        # The case itself comes last: its function is the one that is timed.
        judged, call = next((each for each in found if each[0].failed), found[-1])
        result = made(ShardedResult, vars(judged))
        if result.failed:
            return result, call
        exchanged = collectives_of(call)
        extra = extra_bytes(lambda: peer.parts(call()), device)
    except Exception as error:  # whatever another library raises is its refusal, not our crash
        return _refusal(peer, error), lambda: None
    formula = row_bytes(case, exchanged.by_peer_memory) if peer.ours and not peer.has_whole_rows else None
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


def _timed(
    case: Case, checked: Checked, inputs: Inputs, team: Team, clock: GroupClock, repeat_ms: float
) -> ShardedCaseResult:
    shard = team.part(case, inputs[0])
    target, numbers = torch.empty_like(shard), torch.zeros(case.rows, device=team.device)
    yardsticks: dict[str, Call] = {
        COPY_OF_SHARD: lambda: target.copy_(shard),
        ALL_REDUCE: lambda: dist.all_reduce(numbers, group=team.group),
    }
    timed = clock.measure({**checked.calls, **yardsticks}, repeat_ms)
    copy, all_reduce = timed[COPY_OF_SHARD].times, timed[ALL_REDUCE].times

    def with_times(result: ShardedResult) -> ShardedResult:
        if result.who not in checked.calls:
            return result
        times, host_us = timed[result.who]
        return replace(result, times=times, host_us=host_us, copies=times.median_us / copy.median_us)

    return ShardedCaseResult(
        case, None, copy, 2 * shard.nbytes / copy.median_us / 1e3, [with_times(each) for each in checked.results],
        processes=team.size, all_reduce=all_reduce,
    )  # fmt: skip
