"""The tables for the terminal and for the report, of the records of device times; kinds.py has all kinds."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from .analysis import sentence
from .cases import Case
from .result import CPU_ADDED_US, CPU_RATIO, LARGE, WORDS, CaseResult, Result

BUSY = 0.3
"""Load per processor above which other work on the machine shows in the times."""

MEMORY = "extra MB"
"""Column of the memory that a call takes beyond its input and its result."""

USED = "of GPU"
"""Column of the utilisation: the bandwidth over that of a large copy on this GPU."""

HEADER = ("operation", "shape", "dtype", "who", "time us", "GB/s", "of copy", USED, "vs torch", MEMORY, "analysis")
"""Columns of the table.

The first is left out where every line would have the same operation, the memory where no gradient ran on a GPU, the
utilisation on a CPU and in older records.
"""

NUMBERS = ("time us", "GB/s", "of copy", USED, "vs torch", MEMORY)
"""Columns that are aligned to the right."""


def table(results: Sequence[CaseResult], absent: Mapping[str, str]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The header and the rows: one row per result, skipped case and absent library."""
    rows: list[tuple[str, ...]] = []
    for case_result in results:
        case = case_result.case
        start = (case.operation, str(case), case.dtype)
        if case_result.skipped:
            rows.append((*start, "-", *[""] * 6, f"skipped: {case_result.skipped}"))
        for result in case_result.results:
            rows.append((*start, _who(result), *_figures(case_result, result)))
    rows += [("-", "-", "-", name, *[""] * 6, f"absent: {reason}") for name, reason in absent.items()]
    left_out = set() if len({found.case.operation for found in results}) > 1 else {"operation"}
    if not any(found.case.with_gradient and r.extra_bytes is not None for found in results for r in found.results):
        left_out.add(MEMORY)
    if not any(result.utilisation is not None for found in results for result in found.results):
        left_out.add(USED)
    kept = [i for i, column in enumerate(HEADER) if column not in left_out]
    return tuple(HEADER[i] for i in kept), [tuple(row[i] for i in kept) for row in rows]


def _who(result: Result) -> str:
    return f"{result.who} {result.plan.backend}/{result.plan.strategy}" if result.plan else result.who


def _figures(case_result: CaseResult, result: Result) -> tuple[str, ...]:
    if result.times is None or result.gbps is None or result.of_copy is None:
        return *[""] * 6, f"{WORDS[result.status]}: {result.reason}"
    return (
        f"{result.times.median_us:.{1 if result.times.median_us >= 10 else 2}f}",
        f"{result.gbps:.{0 if result.gbps >= 100 else 1}f}",
        f"{100 * result.of_copy:.0f}%",
        "" if result.utilisation is None else f"{100 * result.utilisation:.0f}%",
        _against(case_result, result),
        "" if result.extra_bytes is None else f"{result.extra_bytes / 1e6:.1f}",
        result.analysis,
    )


def _against(case_result: CaseResult, result: Result) -> str:
    """The speed relative to PyTorch; where PyTorch's own kernel runs, the time that our layer adds to it."""
    if result.against_torch is None:
        return ""
    if case_result.within_cpu_bound is None or result.who != "ours":
        return f"{1 / result.against_torch.ratio:.2f}x"
    if case_result.case.elements >= LARGE:
        return f"{100 * (result.against_torch.ratio - 1):+.1f}%"
    return f"{result.against_torch.added_us:+.2f} us"


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


def _kind(case: Case) -> str:
    """The operation, its reduction and its gradient."""
    words = [case.operation, f"with reduction {case.reduction}" if case.reduction else ""]
    words.append("with gradient" if case.with_gradient else "")
    return " ".join(filter(None, words))


def below(results: Sequence[CaseResult], content: Mapping[str, Any]) -> list[str]:
    """The lines below the table: the tensors that a gradient's GB/s count, our layer on a CPU, older host times."""
    lines = []
    passes = {_kind(r.case): r.case.passes for r in results if r.case.backward or r.case.with_gradient}
    for kind, count in passes.items():
        lines.append(f"GB/s of {kind} count {count} tensors, read or written once; those of the copy count 2.")
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
