"""The kinds of measurements that a record may hold: how their results are read, and their tables for readers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ...core.units import duration
from .analysis import sentence
from .entries import Measures
from .result import BARE, BOTH, CALLS, CPU_ADDED_US, CPU_RATIO, FORMS, LARGE, OUT, RECORDING, WORDS, CaseResult, Result
from .suites import SUITES

BUSY = 0.3
"""Load per processor above which other work on the machine shows in the times."""

MEMORY = "extra MB"
"""Column of the memory that a call takes beyond its input and its result."""

USED = "of GPU"
"""Column of the utilisation: the bandwidth over that of a large copy on this GPU."""

Columns = Mapping[str, Callable[[CaseResult, Result], str]]
"""The columns of numbers of a kind, each with the function from a case and its result to the cell."""


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


class Kind(NamedTuple):
    """The table of a kind of measurements.

    Attributes:
        columns: Function from the results to the columns of numbers.
        notes: Name of the last column.
        below: Function (results, record) -> the lines below the table.
    """

    columns: Callable[[Sequence[CaseResult]], Columns]
    notes: str
    below: Callable[[Sequence[CaseResult], Mapping[str, Any]], list[str]]


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
    kind, framework = measures(content), content["options"].get("framework", "torch")
    found = []
    for i, case in enumerate(content["cases"]):
        try:
            found.append(CaseResult.of(case, framework, kind))
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            missing = isinstance(error, KeyError)
            raise ValueError(f"field cases[{i}]: {f'{error} is missing' if missing else error}") from None
    return found


def table_of(results: Sequence[CaseResult], content: Mapping[str, Any]) -> Table:
    """The table of the results of a record, with the lines around it.

    It has one row per result, skipped case, yardstick and absent library.
    """
    kind, rows = KINDS[measures(content)], list[tuple[str, ...]]()
    columns = kind.columns(results)
    blank = [""] * len(columns)
    for found in results:
        start = (found.case.operation, str(found.case), found.case.dtype)
        if found.skipped:
            rows.append((*start, "-", *blank, f"skipped: {found.skipped}"))
        for each in found.results:
            has_times = each.times or FORMS[found.measures] is CALLS
            cells = [cell(found, each) for cell in columns.values()] if has_times else blank
            who = f"{each.who} {each.plan.backend}/{each.plan.strategy}" if each.plan else each.who
            rows.append((*start, who, *cells, _note(each)))
        rows += [(*start, name, _digits(times.median_us), *blank) for name, times in found.yardsticks.items()]
    rows += [("-", "-", "-", name, *blank, f"absent: {reason}") for name, reason in content["absent"].items()]
    header = ("operation", "shape", "dtype", "who", *columns, kind.notes)
    # The line above names the operation of a table of device times.
    first = int(measures(content) == "device time" and len({found.case.operation for found in results}) < 2)
    lines = above(content), kind.below(results, content)
    numbers = tuple(name for name in columns if name != "caches")
    return Table(header[first:], [row[first:] for row in rows], numbers, *lines)


def _note(result: Result) -> str:
    word = "" if result.status == "ok" else f"{WORDS[result.status]}: "
    return word + "; ".join(filter(None, (result.reason, result.analysis)))


def _device_columns(results: Sequence[CaseResult]) -> Columns:
    """Columns of device times: no memory where no gradient ran on a GPU, and no utilisation on a CPU."""
    each = [(found.case, result) for found in results for result in found.results]
    shown = {
        MEMORY: any(case.with_gradient and result.extra_bytes is not None for case, result in each),
        USED: any(result.utilisation is not None for _, result in each),
    }
    return {name: cell for name, cell in DEVICE_TIME.items() if shown.get(name, True)}


def _against(case_result: CaseResult, result: Result) -> str:
    """The speed relative to PyTorch; where PyTorch's own kernel runs, the time that our layer adds to it."""
    against = result.against_torch
    if against is None:
        return ""
    if case_result.within_cpu_bound is None or result.who != "ours":
        return f"{1 / against.ratio:.2f}x"
    few = case_result.case.elements < LARGE
    return f"{against.added_us:+.2f} us" if few else f"{100 * (against.ratio - 1):+.1f}%"


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
    if measures(content) == "sharded time":
        processes = content["processes"]
        over = f"{processes['backend']} {processes.get('nccl', '')}".strip()
        lines.append(f"{processes['count']} processes over {over}; each figure is the slowest process's.")
    return lines


def sentences(results: Sequence[CaseResult], content: Mapping[str, Any]) -> list[str]:
    """A sentence of analysis about each case."""
    device = content["device"]
    there = any(result.utilisation is not None for found in results for result in found.results)
    # The bandwidth of a device that nobody measured comes from its datasheet, as the source says.
    peak = f"A large copy on this GPU has {device['bandwidth']:.0f} GB/s ({device.get('source')})." if there else ""
    return [*filter(None, [peak]), *(sentence(found) for found in results)]


def below(results: Sequence[CaseResult], content: Mapping[str, Any]) -> list[str]:
    """The lines below device times: sentences, tensors that a gradient's GB/s count, our layer on a CPU, host times."""
    passes = {}
    for case in (found.case for found in results if found.case.declaration.backward or found.case.with_gradient):
        reduction = f" with reduction {case.reduction}" if case.reduction else ""
        passes[f"{case.operation}{reduction}{' with gradient' * case.with_gradient}"] = case.passes
    counts = "tensors, read or written once; those of the copy count 2."
    # Old records name suites that are gone.
    suite = SUITES.get(content["options"].get("suite"))
    lines = sentences(results, content) if suite and suite.sentences else []
    lines += [f"GB/s of {kind} count {count} {counts}" for kind, count in passes.items()]
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


def _call_columns(results: Sequence[CaseResult]) -> Columns:
    """The state of the caches where it makes a difference, and a column for each kind of call."""
    every = [result for found in results for result in found.results]

    def cell(name: str, _: CaseResult, result: Result) -> str:
        return duration(result.calls[name].median_us) if name in result.calls else ""

    caches: Columns = {"caches": lambda _, result: result.state} if any(result.state for result in every) else {}
    return {**caches, **{name: partial(cell, name) for result in every for name in result.calls}}


def _calls(lines: Callable[[Sequence[Result], str], list[str]]) -> Kind:
    """The table of a suite of calls, with its own lines below."""

    def below(results: Sequence[CaseResult], content: Mapping[str, Any]) -> list[str]:
        return lines([result for found in results for result in found.results], content["device"]["kind"])

    return Kind(_call_columns, "notes", below)


def host_lines(results: Sequence[Result], device_kind: str) -> list[str]:
    """The lines below a table of host times: the meaning of each column."""
    if device_kind == "cpu":
        first = "Host time: on a CPU a call is over when it returns, so each time holds the arithmetic."
    else:
        first = "Host time: until the call returns; the GPU's own time is not in it."
    there = {name for result in results for name in result.calls}
    lines = {
        OUT: "out=: the result goes to a tensor that is given.",
        RECORDING: "recording: the forward call on a tensor that requires a gradient.",
        BOTH: "forward+backward: that call and the gradient of its result.",
        BARE: "bare launch: our compiled kernel without the layers above it.",
    }
    return [first, *(line for name, line in lines.items() if name in there)]


_OF_JAX = "JAX makes a program for each shape, and keeps none on disk by default: only again does without that time."


def cold_lines(results: Sequence[Result], device_kind: str) -> list[str]:
    """The lines below a table of first calls: the meaning of each column."""
    calls = [result.calls for result in results]
    count = max((times.count for each in calls for times in each.values()), default=1)
    waits = "" if device_kind == "cpu" else ", until the GPU is done"
    return [
        f"Each row: the medians of {count} fresh process{'es' if count > 1 else ''}; each step is timed from its "
        f"beginning to its end{waits}.  The operating system's cache of files is warm.",
        "first: the first call after the imports; it plans and compiles.  again: the same call once more.  new rows: "
        "half as many rows.  new length: a length close by.  other length: four times the length.",
        *([_OF_JAX] if any("start JAX" in each for each in calls) else []),
        "caches: the folders in which libraries keep compiled kernels are empty, or filled by a process before.",
    ]


def _beside(names: Columns, notes: str, *lines: str) -> Kind:
    """The table of a suite whose calls are timed beside a yardstick, with these lines below."""

    def columns(results: Sequence[CaseResult]) -> Columns:
        # The peak of PyTorch's allocator is not known on a CPU.
        extra = any(result.extra_bytes is not None for found in results for result in found.results)
        return {name: cell for name, cell in names.items() if extra or name != MEMORY}

    return Kind(columns, notes, lambda results, content: [*lines, *_speed_ups(results, content)])


def _shown(number: float | None, form: str) -> str:
    """A number in a format; empty where there is none."""
    return "" if number is None else f"{number:{form}}"


def _digits(microseconds: float | None) -> str:
    return _shown(microseconds, ".2f" if microseconds is None or microseconds < 10 else ".1f")


COLUMNS: Columns = {
    "time us": lambda _, result: _digits(result.us),
    "time ms": lambda _, result: _shown(result.us and result.us / 1e3, ".1f"),
    "tokens/s": lambda found, result: _shown(result.us and 1e6 * found.case.rows / result.us, ",.0f"),
    "host us": lambda _, result: _digits(result.host_us),
    "GB/s": lambda _, result: _shown(result.gbps, ".0f" if result.gbps is None or result.gbps >= 100 else ".1f"),
    "of copy": lambda _, result: _shown(result.of_copy, ".0%"),
    USED: lambda _, result: _shown(result.utilisation, ".0%"),
    "copies": lambda _, result: _shown(result.copies, ".2f"),
    "of products": lambda _, result: _shown(result.of_products, ".2f"),
    "of read": lambda _, result: _shown(result.of_read, ".2f"),
    "vs torch": _against,
    MEMORY: lambda _, result: _shown(result.extra_bytes and result.extra_bytes / 1e6, ".1f"),
    "collectives": lambda _, result: _shown(result.collectives, "d"),
    "bytes/row": lambda _, result: _shown(result.sent_row_bytes, ".6g"),
    "error": lambda _, result: _shown(result.error, ".1e"),
}
"""Every column of numbers."""


def _columns(*names: str) -> Columns:
    return {name: COLUMNS[name] for name in names}


DEVICE_TIME = _columns("time us", "GB/s", "of copy", USED, "vs torch", MEMORY)
"""Columns of device times."""

SHARDED_TIME = _columns("time us", "host us", "copies", MEMORY, "collectives", "bytes/row", "error")
"""Columns of sharded times."""

HEAD_TIME = _columns("time us", "of products", "vs torch", MEMORY, "error")
"""Columns of the times of heads."""

TOKEN_TIME = _columns("time us", "of read", "vs torch", MEMORY)
"""Columns of the times of sampling and of routing."""

STEP_TIME = _columns("time ms", "tokens/s", "vs torch", MEMORY, "error")
"""Columns of training steps."""


def _below_sharded(results: Sequence[CaseResult], content: Mapping[str, Any]) -> list[str]:
    """A line for each result whose bytes differ from the formula, and the speed-ups."""
    lines = []
    for found in results:
        name = f"{found.case.operation} {found.case}"
        for result in found.results:
            if result.formula_row_bytes not in (None, result.sent_row_bytes):
                sent, formula = f"{result.sent_row_bytes:.6g}", result.formula_row_bytes
                lines.append(f"{name}: {result.who} sends {sent} bytes per row, and the formula says {formula}.")
    return lines + _speed_ups(results, content)


def _speed_ups(results: Sequence[CaseResult], content: Mapping[str, Any]) -> list[str]:
    """A line for each case that one process and several have measured."""
    lines = []
    for found in results:
        ours, whole = (each and each.us for each in map(found.result, ("ours", "one-process")))
        if ours and whole:
            name, ratio = f"{found.case.operation} {found.case}", whole / ours
            lines.append(f"{name}: {content['processes']['count']} processes have {ratio:.2f} times the speed of one.")
    return lines


KINDS: dict[Measures, Kind] = {
    "device time": Kind(_device_columns, "analysis", below),
    "host time": _calls(host_lines),
    "first calls": _calls(cold_lines),
    "sharded time": Kind(lambda _: SHARDED_TIME, "analysis", _below_sharded),
    "head time": _beside(
        HEAD_TIME, "plan or reason", "Time of forward and backward over that of three bare products in the same run.",
        "Error: norm over rows of the weight's gradient, relative to float64.",
    ),
    "token time": _beside(
        TOKEN_TIME, "way, what it lacks, or reason",
        "Time of a call over that of one read of the logits, our logsumexp, in the same run.",
    ),
    "gate time": _beside(
        TOKEN_TIME, "way or reason",
        "Time of a call over that of one read of the logits, our logsumexp of long rows, in the same run.",
    ),
    "step time": _beside(
        STEP_TIME, "reason",
        "Memory: beyond the weights and the optimizer's states, so with activations and all gradients.",
        "Error: norm of the error of the head's gradient, relative to float32 logits.",
    ),
    "decoding time": _beside(
        STEP_TIME, "way, what it lacks, or reason",
        "A step reads a token of each row, and the keys and values of 1024 tokens.  Memory: of the sampling.",
    ),
}  # fmt: skip
"""The table of each kind, by the name that a suite and a record have for a kind of measurement."""
