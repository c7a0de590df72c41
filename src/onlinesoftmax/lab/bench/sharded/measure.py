"""The measurement of one sharded case: every peer is checked against float64, then timed in step by all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..cases import Case
from ..check import Inputs
from ..inputs import lacks_memory, make_inputs
from ..measure import Checked, check_all
from ..result import ALL_REDUCE, COPY_OF_SHARD, CaseResult, Result
from .peers import Member
from .team import GroupClock, Team

Call = Callable[[], Any]


def run(cases: Iterable[Case], everybody: Sequence[Member], team: Team, repeat_ms: float) -> Iterator[CaseResult]:
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
            yield CaseResult(
                case, skipped=lacking or "another process lacks memory", measures="sharded time", processes=team.size
            )
            continue
        inputs = make_inputs(case, team.device)
        checked = check_all(case, inputs, everybody, partial(agreed, team))
        yield _timed(case, checked, inputs, team, clock, repeat_ms)
        # The next case needs the memory.
        del inputs, checked
        if team.device.type == "cuda":
            torch.cuda.empty_cache()


def agreed(team: Team, result: Result) -> Result:
    """A result of one process counts for all, and a call that one process cannot make is timed by none."""
    numbers = float(result.status != "ok"), result.sent_row_bytes or 0.0, float(result.extra_bytes or 0)
    stopped, sent, extra = team.largest(*numbers)
    if not stopped:
        return replace(result, sent_row_bytes=sent, extra_bytes=None if result.extra_bytes is None else int(extra))
    if result.status != "ok":
        return result
    return replace(result, status="failed", reason="another process has a wrong result or an error")


def _timed(case: Case, checked: Checked, inputs: Inputs, team: Team, clock: GroupClock, repeat_ms: float) -> CaseResult:
    shard = team.part(case, inputs[0])
    target, numbers = torch.empty_like(shard), torch.zeros(case.rows, device=team.device)
    yardsticks: dict[str, Call] = {
        COPY_OF_SHARD: lambda: target.copy_(shard),
        ALL_REDUCE: lambda: dist.all_reduce(numbers, group=team.group),
    }
    timed = clock.measure({**checked.calls, **yardsticks}, repeat_ms)
    copy, all_reduce = timed[COPY_OF_SHARD].times, timed[ALL_REDUCE].times

    def with_times(result: Result) -> Result:
        if result.who not in checked.calls:
            return result
        times, host_us = timed[result.who]
        return replace(result, times=times, host_us=host_us, copies=times.median_us / copy.median_us)

    return CaseResult(
        case, None, copy, 2 * shard.nbytes / copy.median_us / 1e3, [with_times(each) for each in checked.results],
        measures="sharded time", processes=team.size, all_reduce=all_reduce,
    )  # fmt: skip
