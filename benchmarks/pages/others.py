"""The blocks of docs/performance.md about host times, first calls, CPUs, files, and one row in detail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onlinesoftmax.core.task import ITEMSIZE
from onlinesoftmax.lab.bench.cases import Case
from onlinesoftmax.lab.bench.result import BOTH, LARGE, PLAIN, RECORDING, Result
from onlinesoftmax.lab.report.panels import NAMES

from .markdown import ABSENT, grouped, microseconds, shape, source, spread, table
from .records import Records, ours


def host_table(records: Records) -> str:
    """The host times of calls, ours and PyTorch's."""
    rows = []
    for case, pairs in grouped(_calls(records, "h200-host"), lambda pair: pair[0]).items():
        found = {result.who: result.calls for _, result in pairs}
        times = (" / ".join(microseconds(found[who][name]) for who in ("ours", "torch")) for name in CALLS)
        rows.append([f"`{case.operation}`, {shape(case)}", *times])
    return records.table(("call", *(f"{name}: ours / PyTorch" for name in CALLS)), rows, "h200-host")


CALLS = (PLAIN, RECORDING, BOTH)
"""Columns of `host_table`, by their names in the record."""


def cold_table(records: Records) -> str:
    """The times of first calls and of new shapes: the range over all cases."""
    found = (result for _, result in _calls(records, "h200-cold"))
    rows = []
    for key, results in grouped(found, lambda result: (NAMES.get(result.who, result.who), result.state)).items():
        times = ([result.calls[name].median_us / 1e3 for name in names for result in results] for names in FIRST)
        rows.append([*key, *(spread(each, microseconds) for each in times)])
    return records.table(("library", "caches", "first call", "new shape"), rows, "h200-cold")


FIRST = (("first",), ("new rows", "new length", "other length"))
"""Calls of a column of `cold_table`, by their names in the record."""


def jax_cold_table(records: Records) -> str:
    """The times of first calls in JAX: of the kernels that are planned by default, of CUDA kernels, and of `jax.nn`."""
    names = [name for suite in ("jax-cold", "jax-cuda-cold") if (name := records.first(suite))]
    rows = [
        [f"`{case.operation}`, {shape(case)}, {name.partition('-')[0].upper()}",
         f"{result.plan.backend}/{result.plan.strategy}" if result.plan else result.who, result.state,
         *(microseconds(result.calls[call].median_us / 1e3) for call in FIRST_IN_JAX)]
        for name in names for case, result in _calls(records, name)
    ]  # fmt: skip
    return records.table(("call", "kernel", "caches", *FIRST_IN_JAX), rows, *names)


FIRST_IN_JAX = ("first", "new length", "other length", "again")
"""Columns of `jax_cold_table`, by their names in the record."""


def _calls(records: Records, name: str) -> list[tuple[Case, Result]]:
    """The cases of a record of host times or first calls, with the result of each library."""
    found = [(each.case, result) for each in records.cases(name) for result in each.results]
    return [(case, result) for case, result in found if result.calls]


def cpu_text(records: Records) -> str:
    """The time that our layer adds on a CPU: microseconds of small calls, a part of large ones."""
    record = records.get("cpu")
    found = [(each.case, ours(each).against_torch) for each in records.cases("cpu")]
    added = [against.added_us for case, against in found if against and case.elements < LARGE]
    ratios = [against.ratio - 1 for case, against in found if against and case.elements >= LARGE]
    if record is None or not added or not ratios:
        return ABSENT
    device = record.content["device"]
    return (
        f"On {device['threads']} cores of an {device['processor']}, our layer adds {min(added):.2f} to "
        f"{max(added):.2f} µs to a call of fewer than 2^20 elements, and {min(ratios):+.1%} to {max(ratios):+.1%} to "
        f"the time of a larger one.\n\n{source(record)}"
    )


def files_text(records: Records) -> str:
    """Softmax of a file of several gigabytes."""
    found = records.document("files/cpu")
    if found is None:
        return ABSENT
    said = [f"{case['file_mb_per_s']:.0f} MB/s for {case['name']}" for case in found["cases"]]
    most = max(found["cases"], key=lambda case: case["peak_rss_mb"])
    return (
        f"A file of {most['bytes'] / 2**30:.0f} GiB on {found['machine']['cores']} cores of {found['machine']['cpu']}: "
        f"{', '.join(said)}. The process takes at most {most['peak_rss_mb']:.0f} MB, {most['import_rss_mb']:.0f} of "
        f"them for imports.\n\n*Record: `files/cpu.json` (commit {found['commit'][:7]}, {found['date'][:10]}).*"
    )


STAMPS = {
    "first tile there": "first_tile", "slice reduced": "reduced", "state of the row known": "state_known",
    "slice written": "written",
}  # fmt: skip
"""Columns of the table of time stamps, and their names in the record."""


def stamps_table(records: Records) -> str:
    """The times of the blocks of one row: the mean over the blocks, and the first and the last block."""

    def cells(case: Any) -> list[str]:
        times = ("{} ({} to {})".format(*map(microseconds, case[name])) for name in STAMPS.values())
        return [*times, microseconds(case["between_events"])]

    return _of_document(records, "stamps/h200", (*STAMPS, "between two events"), cells)


def memory_traffic_table(records: Records) -> str:
    """What one row moves between L2 and memory, as the profiler counts it."""

    def cells(case: Any) -> list[str]:
        sizes = case["columns"] * ITEMSIZE[case["dtype"]], case["read_bytes"], case["written_bytes"]
        return [*(f"{size / 1e6:.0f}" for size in sizes), microseconds(case["nanoseconds"] / 1e3)]

    header = "size of the row (MB)", "read from memory (MB)", "written to memory (MB)", "kernel alone (µs)"
    return _of_document(records, "profiles/h200", header, cells)


def _of_document(records: Records, name: str, header: Sequence[str], cells: Callable[[Any], list[str]]) -> str:
    """A row for each length of a row, of a file that `onlinesoftmax bench` did not write."""
    found = records.document(name)
    if found is None:
        return ABSENT
    rows = [[case["name"], *cells(found | case)] for case in found["cases"]]
    said = f"*Record: `{name}.json` ({found['device']}, commit {found['commit'][:7]}, {found['date'][:10]}).*"
    return f"{table(('columns', *header), rows)}\n\n{said}"
