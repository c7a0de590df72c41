"""The results of the suites `host` and `cold`: times of several kinds of calls of each library, and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from ...core.units import duration
from .result import WORDS, CaseResult, Result, made
from .timing import Times

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class CallsResult(Result):
    """The times of one library's calls for one case.

    `reason` may also say why one kind of call has no time while `status` is "ok".

    Attributes:
        calls: Times of each kind of call, by its name, in the order in which the table shows them.
        state: State of the caches on disk before the process began; empty where it makes no difference.
    """

    calls: Mapping[str, Times] = field(default_factory=dict)
    state: str = ""

    @classmethod
    def of(cls, recorded: Mapping[str, Any]) -> Self:
        """The result of a dictionary as `as_dict` makes it."""
        calls = {name: made(Times, times) for name, times in recorded["calls"].items()}
        return replace(super().of(recorded), calls=calls)


@dataclass(frozen=True)
class CallsCaseResult(CaseResult):
    """The results of one case, whose calls are timed by the host; there is no copy beside them."""

    result_type: ClassVar = CallsResult


def table(
    results: Sequence[CaseResult], absent: Mapping[str, str]
) -> tuple[tuple[str, ...], list[tuple[str, ...]], tuple[str, ...]]:
    """The header, the rows and the names of the columns of numbers: one row per result and absent library."""
    every = [result for found in results for result in found.results if isinstance(result, CallsResult)]
    names = tuple(dict.fromkeys(name for result in every for name in result.calls))
    rows: list[tuple[str, ...]] = []
    for found in results:
        start = (found.case.operation, str(found.case), found.case.dtype)
        if found.skipped:
            rows.append((*start, "-", "", *[""] * len(names), f"skipped: {found.skipped}"))
        rows += [(*start, *_cells(result, names)) for result in found.results if isinstance(result, CallsResult)]
    rows += [("-", "-", "-", name, "", *[""] * len(names), f"absent: {reason}") for name, reason in absent.items()]
    header = ("operation", "shape", "dtype", "who", "caches", *names, "notes")
    # A column that is empty in every row is left out.
    kept = [i for i, name in enumerate(header) if name in ("who", "notes") or any(row[i] for row in rows)]
    return tuple(header[i] for i in kept), [tuple(row[i] for i in kept) for row in rows], names


def _cells(result: CallsResult, names: Sequence[str]) -> tuple[str, ...]:
    who = f"{result.who} {result.plan.backend}/{result.plan.strategy}" if result.plan else result.who
    times = (duration(result.calls[name].median_us) if name in result.calls else "" for name in names)
    note = "; ".join(filter(None, (result.reason, result.analysis)))
    word = "" if result.status == "ok" else f"{WORDS[result.status]}: "
    return who, result.state, *times, word + note


def as_calls(result: Result, **changes: Any) -> CallsResult:
    """A result of a check as the result of a suite of calls.

    >>> as_calls(Result("torch", "refused", "no such dtype")).status
    'refused'
    """
    kept = {name: getattr(result, name) for name in ("who", "status", "reason", "error", "allowed", "plan")}
    return CallsResult(**{**kept, **changes})
