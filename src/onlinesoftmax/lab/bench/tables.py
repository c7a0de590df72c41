"""The kinds of measurements that a record may hold: how their results are read, and their tables for readers."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

from ...core.units import duration
from . import cold_suite, host_times
from .analysis import sentence
from .result import (
    CPU_ADDED_US,
    CPU_RATIO,
    LARGE,
    WORDS,
    CallsCaseResult,
    CaseResult,
    Result,
    ShardedCaseResult,
    ShardedResult,
)
from .suites import SUITES, Measures
from .timing import Times

BUSY = 0.3
"""Load per processor above which other work on the machine shows in the times."""

MEMORY = "extra MB"
"""Column of the memory that a call takes beyond its input and its result."""

USED = "of GPU"
"""Column of the utilisation: the bandwidth over that of a large copy on this GPU."""

DEVICE_TIME = ("time us", "GB/s", "of copy", USED, "vs torch", MEMORY)
"""Columns of numbers of device times.

The memory is left out where no gradient ran on a GPU, the utilisation on a CPU and in older records.
"""

SHARDED_TIME = ("time us", "host us", "copies", MEMORY, "collectives", "bytes/row", "error")
"""Columns of numbers of sharded times."""

Figures = Callable[[Any, Any], Sequence[str]]
"""From a case and a result of one library to the cells of a kind's own columns."""


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
    rows: list[tuple[str, ...]]
    numbers: tuple[str, ...]
    above: list[str]
    below: list[str]

    def without(self, left_out: Collection[str]) -> Table:
        """The table without these columns."""
        kept = [i for i, name in enumerate(self.header) if name not in left_out]
        header, *rows = (tuple(row[i] for i in kept) for row in (self.header, *self.rows))
        return Table(header, rows, self.numbers, self.above, self.below)


class Kind(NamedTuple):
    """A kind of measurement: the type of its results, and the function that makes their table."""

    results: type[CaseResult]
    table: Callable[[Sequence[Any], Mapping[str, Any]], Table]


def measures(content: Mapping[str, Any]) -> Measures:
    """The kind of the measurements in a record; records from before there were several have no such key."""
    found: Measures = content.get("measures") or ("sharded time" if "processes" in content else "device time")
    if found not in KINDS:
        raise ValueError(f"unknown kind of measurement {found!r}; there are: {', '.join(KINDS)}")
    return found


def read_cases(content: Mapping[str, Any]) -> list[CaseResult]:
    """The results in a record.

    Raises:
        ValueError: a case cannot be measured; the message names its field.
    """
    kind, framework = KINDS[measures(content)].results, content["options"].get("framework", "torch")
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
    return KINDS[measures(content)].table(results, content)


def _table(
    results: Sequence[CaseResult], content: Mapping[str, Any], names: Sequence[str], figures: Figures, notes: str
) -> Table:
    """One row per result, skipped case, yardstick and absent library.

    Args:
        results: The results of the cases.
        content: The record.
        names: Names of the columns that `figures` fills.
        figures: The cells of these columns.
        notes: Name of the last column.
    """
    rows: list[tuple[str, ...]] = []
    for found in results:
        start, blank = (found.case.operation, str(found.case), found.case.dtype), [""] * len(names)
        if found.skipped:
            rows.append((*start, "-", *blank, f"skipped: {found.skipped}"))
        rows += [(*start, _who(each), *figures(found, each), _note(each)) for each in found.results]
        rows += [(*start, name, _us(times), *blank) for name, times in found.yardsticks.items()]
    absent = content["absent"].items()
    rows += [("-", "-", "-", name, *[""] * len(names), f"absent: {reason}") for name, reason in absent]
    return Table(("operation", "shape", "dtype", "who", *names, notes), rows, tuple(names), above(content), [])


def _who(result: Result) -> str:
    return f"{result.who} {result.plan.backend}/{result.plan.strategy}" if result.plan else result.who


def _note(result: Result) -> str:
    word = "" if result.status == "ok" else f"{WORDS[result.status]}: "
    return word + "; ".join(filter(None, (result.reason, result.analysis)))


def _device_time(results: Sequence[CaseResult], content: Mapping[str, Any]) -> Table:
    each = [(found.case, result) for found in results for result in found.results]
    left_out = set() if len({found.case.operation for found in results}) > 1 else {"operation"}
    if not any(case.with_gradient and result.extra_bytes is not None for case, result in each):
        left_out.add(MEMORY)
    if not any(result.utilisation is not None for _, result in each):
        left_out.add(USED)
    table = _table(results, content, DEVICE_TIME, _figures, "analysis").without(left_out)
    # Old records name suites that are gone.
    suite = SUITES.get(content["options"].get("suite"))
    table.below.extend(sentences(results, content) if suite and suite.sentences else [])
    table.below.extend(below(results, content))
    return table


def _figures(case_result: CaseResult, result: Result) -> Sequence[str]:
    if result.times is None or result.gbps is None or result.of_copy is None:
        return [""] * len(DEVICE_TIME)
    used = "" if result.utilisation is None else f"{100 * result.utilisation:.0f}%"
    gbps = f"{result.gbps:.{0 if result.gbps >= 100 else 1}f}"
    against = _against(case_result, result)
    return _us(result.times), gbps, f"{100 * result.of_copy:.0f}%", used, against, _megabytes(result)


def _against(case_result: CaseResult, result: Result) -> str:
    """The speed relative to PyTorch; where PyTorch's own kernel runs, the time that our layer adds to it."""
    against = result.against_torch
    if against is None:
        return ""
    if case_result.within_cpu_bound is None or result.who != "ours":
        return f"{1 / against.ratio:.2f}x"
    added = f"{100 * (against.ratio - 1):+.1f}%", f"{against.added_us:+.2f} us"
    return added[case_result.case.elements < LARGE]


def above(content: Mapping[str, Any]) -> list[str]:
    """The lines above the table: operations, device, versions, date, and a warning where the machine is busy."""
    device, git, version = content["device"], content["git"], content["versions"]
    commit = git["commit"][:12] + (" with changes" if git["dirty"] else "")
    name = device.get("processor") or device["name"]
    what = ", ".join(dict.fromkeys(case["operation"] for case in content["cases"]))
    framework = content["options"].get("framework") or "torch"
    lines = [f"{what} on {name}, {framework} {version[framework]}, commit {commit}, {content['date']}"]
    load = device.get("load")
    if load is not None and load > BUSY * (os.cpu_count() or 1):
        lines.append(f"The machine is busy (load {load:.1f}): other work slows these times.")
    return lines


def sentences(results: Sequence[CaseResult], content: Mapping[str, Any]) -> list[str]:
    """A sentence of analysis about each case."""
    device = content["device"]
    there = any(result.utilisation is not None for found in results for result in found.results)
    # The bandwidth of a device that nobody measured comes from its datasheet, as the source says.
    peak = f"A large copy on this GPU has {device['bandwidth']:.0f} GB/s ({device.get('source')})." if there else ""
    return [*filter(None, [peak]), *(sentence(found) for found in results)]


def below(results: Sequence[CaseResult], content: Mapping[str, Any]) -> list[str]:
    """The lines below the table: the tensors that a gradient's GB/s count, our layer on a CPU, older host times."""
    cases = [found.case for found in results if found.case.backward or found.case.with_gradient]
    reductions = [f" with reduction {case.reduction}" if case.reduction else "" for case in cases]
    kinds = {
        f"{case.operation}{reduction}{' with gradient' * case.with_gradient}": case.passes
        for case, reduction in zip(cases, reductions, strict=True)
    }
    lines = [
        f"GB/s of {kind} count {count} tensors, read or written once; those of the copy count 2."
        for kind, count in kinds.items()
    ]
    if any(result.flush == "clean" for result in results):
        lines.append("Before a call that only reads, the L2 cache is left without dirty lines.")
    bounds = [result.within_cpu_bound for result in results if result.within_cpu_bound is not None]
    if bounds:
        lines.append(
            f"Our layer stays within its limit in {sum(bounds)} of {len(bounds)} cases.  It may add "
            f"{100 * (CPU_RATIO - 1):.0f}% to PyTorch from 2^20 elements up, {CPU_ADDED_US:.0f} us per call below."
        )
    # Records from before the suite `host` may have host times beside their cases.
    host = content.get("host") or {}
    for times in filter(None, (host, host.get("cross_entropy"))):
        each = ", ".join(f"{name} {found['median_us']:.1f} us" for name, found in times["times"].items())
        shape = "x".join(map(str, times["shape"]))
        lines.append(f"Host time of one {times['operation']} call, {shape} {times['dtype']}: {each}.")
    return lines


def _calls(
    lines: Callable[[Sequence[Result], str], list[str]], results: Sequence[CallsCaseResult], content: Mapping[str, Any]
) -> Table:
    """The table of a suite of calls, with its own lines below."""
    every: list[Any] = [result for found in results for result in found.results]
    names = tuple(dict.fromkeys(name for result in every for name in result.calls))

    def figures(_: CaseResult, result: Any) -> Sequence[str]:
        calls = result.calls
        return result.state, *(duration(calls[name].median_us) if name in calls else "" for name in names)

    found = _table(results, content, ("caches", *names), figures, "notes")
    # A column that is empty in every row is left out.
    empty = {name for i, name in enumerate(found.header) if not any(row[i] for row in found.rows)}
    below = lines(every, content["device"]["kind"])
    return replace(found.without(empty - {"who", "notes"}), numbers=names, below=below)


def _sharded_time(results: Sequence[ShardedCaseResult], content: Mapping[str, Any]) -> Table:
    table, processes = _table(results, content, SHARDED_TIME, _sharded_figures, "analysis"), content["processes"]
    over = f"{processes['backend']} {processes.get('nccl', '')}".strip()
    table.above.append(f"{processes['count']} processes over {over}; each figure is the slowest process's.")
    table.below.extend(_below_sharded(results))
    return table


def _sharded_figures(_: CaseResult, result: Any) -> Sequence[str]:
    if result.times is None:
        return [""] * len(SHARDED_TIME)
    host = "" if result.host_us is None else _digits(result.host_us)
    copies = "" if result.copies is None else f"{result.copies:.2f}"
    sent = f"{result.sent_row_bytes:.6g}"
    return _us(result.times), host, copies, _megabytes(result), str(result.collectives), sent, f"{result.error:.1e}"


def _us(times: Times) -> str:
    return _digits(times.median_us)


def _digits(microseconds: float) -> str:
    return f"{microseconds:.{1 if microseconds >= 10 else 2}f}"


def _megabytes(result: Result) -> str:
    return "" if result.extra_bytes is None else f"{result.extra_bytes / 1e6:.1f}"


def _below_sharded(results: Sequence[ShardedCaseResult]) -> list[str]:
    """The lines below the table: bytes that differ from the formula, and the speed-up over one process."""
    lines, speed_ups = [], []
    for found in results:
        name, every = f"{found.case.operation} {found.case}", cast("Sequence[ShardedResult]", found.results)
        for result in every:
            if result.formula_row_bytes not in (None, result.sent_row_bytes):
                sent, formula = f"{result.sent_row_bytes:.6g}", result.formula_row_bytes
                lines.append(f"{name}: {result.who} sends {sent} bytes per row, and the formula says {formula}.")
        us = {result.who: result.times.median_us for result in every if result.times}
        if {"ours", "one-process"} <= us.keys():
            ratio = us["one-process"] / us["ours"]
            speed_ups.append(f"{name}: {found.processes} processes have {ratio:.2f} times the speed of one.")
    return lines + speed_ups


KINDS: dict[Measures, Kind] = {
    "device time": Kind(CaseResult, _device_time),
    "host time": Kind(CallsCaseResult, partial(_calls, host_times.below)),
    "first calls": Kind(CallsCaseResult, partial(_calls, cold_suite.below)),
    "sharded time": Kind(ShardedCaseResult, _sharded_time),
}
"""The kinds by the name that a suite and a record have for them."""
