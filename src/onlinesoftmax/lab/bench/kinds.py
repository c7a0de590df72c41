"""The kinds of measurements that a record may hold: how their results are read, and their tables for readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import calls, cold, host, report
from .result import CaseResult, Result
from .suites import SUITES, Measures

Rows = list[tuple[str, ...]]


@dataclass(frozen=True)
class Table:
    """A table with the lines around it.

    Attributes:
        header: Names of the columns.
        rows: The cells.
        numbers: Names of the columns that are aligned to the right.
        above, below: Lines before and after the table.
    """

    header: tuple[str, ...]
    rows: Rows
    numbers: tuple[str, ...]
    above: list[str]
    below: list[str]


def measures(content: Mapping[str, Any]) -> Measures:
    """The kind of the measurements in a record; records from before there were several have no such key."""
    found: Measures = content.get("measures") or ("sharded time" if "processes" in content else "device time")
    if found not in _TABLES:
        raise ValueError(f"unknown kind of measurement {found!r}; there are: {', '.join(_TABLES)}")
    return found


def read_cases(content: Mapping[str, Any]) -> list[CaseResult]:
    """The results in a record.

    Raises:
        ValueError: a case cannot be measured; the message names its field.
    """
    kind = _result_type(measures(content))
    framework = content["options"].get("framework", "torch")
    found = []
    for i, case in enumerate(content["cases"]):
        try:
            found.append(kind.of(case, framework))
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            missing = isinstance(error, KeyError)
            raise ValueError(f"field cases[{i}]: {f'{error} is missing' if missing else error}") from None
    return found


def table_of(results: Sequence[CaseResult], content: Mapping[str, Any]) -> Table:
    """The table of the results of a record, with the lines around it."""
    return _TABLES[measures(content)](results, content)


def _result_type(kind: Measures) -> type[CaseResult]:
    if kind == "sharded time":
        # Its folder imports torch.
        from .sharded.result import ShardedCaseResult

        return ShardedCaseResult
    return CaseResult if kind == "device time" else calls.CallsCaseResult


def _device_time(results: Sequence[CaseResult], content: Mapping[str, Any]) -> Table:
    header, rows = report.table(results, content["absent"])
    # Old records name suites that are gone.
    suite = SUITES.get(content["options"].get("suite"))
    sentences = report.sentences(results, content) if suite and suite.sentences else []
    return Table(header, rows, report.NUMBERS, report.above(content), [*sentences, *report.below(results, content)])


def _sharded_time(results: Sequence[Any], content: Mapping[str, Any]) -> Table:
    from .sharded import result as sharded

    above = [*report.above(content), *sharded.above(content)]
    return Table(sharded.HEADER, sharded.table(results), sharded.NUMBERS, above, sharded.below(results))


def _calls(lines: Callable[[Sequence[Result], str], list[str]]) -> Callable[..., Table]:
    """The table of a suite of calls, with its own lines below."""

    def table(results: Sequence[CaseResult], content: Mapping[str, Any]) -> Table:
        header, rows, numbers = calls.table(results, content["absent"])
        each = [result for found in results for result in found.results]
        return Table(header, rows, numbers, report.above(content), lines(each, content["device"]["kind"]))

    return table


_TABLES: dict[Measures, Callable[..., Table]] = {
    "device time": _device_time,
    "host time": _calls(host.below),
    "first calls": _calls(cold.below),
    "sharded time": _sharded_time,
}
