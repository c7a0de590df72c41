"""The measurement of one sharded case: every peer is checked against float64, then timed in step by all processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..cases import Case
from ..entries import Measures
from ..inputs import lacks_memory, make_inputs
from ..kinds import KINDS
from ..measure import check_all, measure_begun, with_times
from ..result import ALL_REDUCE, COPY_OF_SHARD, CaseResult, Result
from ..timing import Call, Times
from .peers import Member
from .team import GroupClock, Team


def run(
    cases: Iterable[Any], everybody: Sequence[Any], team: Team, repeat_ms: float, measures: Measures = "sharded time"
) -> Iterator[CaseResult]:
    """Measure the cases, one at a time, in all processes of the team.

    Args:
        cases: The cases, with the shapes of the whole inputs.
        everybody: Our functions and what they are compared with.
        team: The processes.
        repeat_ms: Milliseconds for each measurement.
        measures: The kind of measurement: of sharded rows, or in KINDS.
    """
    clock, kind = GroupClock(team), KINDS.get(measures)
    for case in cases:
        lacking = (kind.lacks if kind else lacks_memory)(case, team.device)
        if team.largest(float(lacking is not None))[0]:
            skipped = lacking or "another process lacks memory"
            yield CaseResult(case, skipped=skipped, measures=measures, processes=team.size)
            continue
        if kind:
            # The same seed gives every process the same tensors, which no name here keeps for the next case.
            yield measure_begun(
                case, kind.begin(case, team.device), measures, everybody, clock, repeat_ms, partial(agreed, team)
            )
        else:
            yield measure_rows(case, everybody, team, repeat_ms, clock)
        # The next case needs the memory.
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


def measure_rows(
    case: Case, everybody: Sequence[Member], team: Team, repeat_ms: float, clock: GroupClock
) -> CaseResult:  # fmt: skip
    """Measure a case of sharded rows in all processes of the team."""
    inputs = make_inputs(case, team.device)
    checked = check_all(case, inputs, everybody, partial(agreed, team))
    shard = team.part(case, inputs[0])
    target, numbers = torch.empty_like(shard), torch.zeros(case.rows, device=team.device)
    yardsticks: dict[str, Call] = {
        COPY_OF_SHARD: lambda: target.copy_(shard),
        ALL_REDUCE: lambda: dist.all_reduce(numbers, group=team.group),
    }
    samples, host = clock.measure_with_host({**checked.calls, **yardsticks}, repeat_ms)
    copy, all_reduce = (Times.of(samples[name]) for name in (COPY_OF_SHARD, ALL_REDUCE))
    results = with_times(
        checked.results, samples, lambda r, us: {"host_us": host.get(r.who), "copies": us / copy.median_us}
    )
    return CaseResult(
        case, None, copy, 2 * shard.nbytes / copy.median_us / 1e3, results, measures="sharded time",
        processes=team.size, all_reduce=all_reduce,
    )  # fmt: skip
