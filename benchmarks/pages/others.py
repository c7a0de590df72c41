"""The blocks of docs/performance.md about host times, first calls, CPUs, files, and one row in detail."""

from __future__ import annotations

from onlinesoftmax.lab.bench.cases import Case
from onlinesoftmax.lab.bench.result import BOTH, LARGE, PLAIN, RECORDING, Result
from onlinesoftmax.lab.report.panels import NAMES

from .markdown import ABSENT, microseconds, shape, source, table
from .records import Records, ours


def host_table(records: Records) -> str:
    """The host times of calls, ours and PyTorch's."""
    groups: dict[str, dict[str, Result]] = {}
    for case, result in _calls(records, "h200-host"):
        groups.setdefault(f"`{case.operation}`, {shape(case)}", {})[result.who] = result
    rows = [
        [call, *(" / ".join(microseconds(found[who].calls[name]) for who in ("ours", "torch"))
                 for name in CALLS)]
        for call, found in groups.items()
    ]  # fmt: skip
    return records.table(("call", *(f"{name}: ours / PyTorch" for name in CALLS)), rows, "h200-host")


CALLS = (PLAIN, RECORDING, BOTH)
"""Columns of `host_table`, by their names in the record."""


def cold_table(records: Records) -> str:
    """The times of first calls and of new shapes: the range over all cases."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for _, result in _calls(records, "h200-cold"):
        groups.setdefault((NAMES.get(result.who, result.who), result.state), []).append(result)
    rows = []
    for key, results in groups.items():
        times = ([result.calls[name].median_us / 1e3 for name in names for result in results] for names in FIRST)
        rows.append([*key, *(f"{microseconds(min(each))}\u00a0to\u00a0{microseconds(max(each))}" for each in times)])
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
    found = records.document("stamps/h200")
    if found is None:
        return ABSENT
    rows = [
        [case["name"], *("{} ({} to {})".format(*map(microseconds, case[name])) for name in STAMPS.values()),
         microseconds(case["between_events"])]
        for case in found["cases"]
    ]  # fmt: skip
    said = f"*Record: `stamps/h200.json` ({found['device']}, commit {found['commit'][:7]}, {found['date'][:10]}).*"
    return f"{table(('columns', *STAMPS, 'between two events'), rows)}\n\n{said}"


def memory_traffic_table(records: Records) -> str:
    """What one row moves between L2 and memory, as the profiler counts it."""
    found = records.document("profiles/h200")
    if found is None:
        return ABSENT
    item = {"bfloat16": 2, "float32": 4}[found["dtype"]]
    rows = [
        [case["name"],
         *(f"{size / 1e6:.0f}" for size in (case["columns"] * item, case["read_bytes"], case["written_bytes"])),
         microseconds(case["nanoseconds"] / 1e3)]
        for case in found["cases"]
    ]  # fmt: skip
    header = ("columns", "size of the row (MB)", "read from memory (MB)", "written to memory (MB)", "kernel alone (µs)")
    said = f"*Record: `profiles/h200.json` ({found['device']}, commit {found['commit'][:7]}, {found['date'][:10]}).*"
    return f"{table(header, rows)}\n\n{said}"
