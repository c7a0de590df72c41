"""The measurement of one sharded case: every peer is checked against float64, then timed in step by all processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..cases import Case
from ..entries import Measures
from ..inputs import lacks_memory, make_inputs
from ..kinds import KINDS
from ..measure import Begun, check_of_rows, measure_begun
from ..peers import Ours
from ..result import CaseResult, Result
from ..timing import Times
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
    begin = kind.begin if kind else partial(_begin, team, clock)
    for case in cases:
        lacking = lacks_memory(case, team.device)
        if team.largest(float(lacking is not None))[0]:
            skipped = lacking or "another process lacks memory"
            yield CaseResult(case, skipped=skipped, measures=measures, processes=team.size)
            continue
        # The same seed gives every process the same tensors, which no name here keeps for the next case.
        begun = partial(begin, case, team.device)
        yield measure_begun(case, begun(), measures, everybody, clock, repeat_ms, partial(agreed, team))
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


def _begin(team: Team, clock: GroupClock, case: Case, device: Any) -> Begun:
    """Make the tensors of a case of sharded rows, which is timed beside a copy of a shard."""
    inputs = make_inputs(case, device)
    shard = team.part(case, inputs[0])
    target, numbers = torch.empty_like(shard), torch.zeros(case.rows, device=device)

    def rates(result: Result, us: float, times: Mapping[str, Times]) -> dict[str, Any]:
        return {"host_us": clock.host_us.get(result.who), "copies": us / times["copy"].median_us}

    def facts(times: Mapping[str, Times]) -> dict[str, Any]:
        return {"copy_gbps": 2 * shard.nbytes / times["copy"].median_us / 1e3, "processes": team.size}

    yardsticks = {
        "copy": lambda: target.copy_(shard), "all_reduce": lambda: dist.all_reduce(numbers, group=team.group),
    }  # fmt: skip
    return Begun(check_of_rows(case, inputs, Ours(device.type)), yardsticks, rates=rates, facts=facts)
