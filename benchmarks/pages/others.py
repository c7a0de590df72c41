"""The blocks of docs/performance.md about host times, first calls, CPUs, files, and the list of records."""

from __future__ import annotations

from collections.abc import Callable

from onlinesoftmax.lab.bench.calls import CallsResult
from onlinesoftmax.lab.bench.result import LARGE
from onlinesoftmax.lab.report.charts import NAMES

from .markdown import ABSENT, NOTHING, commit, microseconds, shape, source, table, together
from .records import Records, ours

PACKAGES = ("torch", "triton", "jax", "liger-kernel", "quack-kernels")
"""Packages whose versions are shown."""


def host_table(records: Records) -> str:
    """The host times of calls."""
    return _calls(records, "h200-host")


def cold_table(records: Records) -> str:
    """The times of first calls."""
    return _calls(records, "h200-cold", unit=1e3)


def _calls(records: Records, name: str, unit: float = 1.0) -> str:
    """A column for each kind of call; microseconds divided by the unit."""
    found = [(each.case, result) for each in records.cases(name) for result in each.results]
    calls = [(case, result) for case, result in found if isinstance(result, CallsResult)]
    if not calls:
        return ABSENT
    names = list(dict.fromkeys(name for _, result in calls for name in result.calls))
    rows = []
    for case, result in calls:
        times = (result.calls.get(name) for name in names)
        who = NAMES.get(result.who, result.who)
        said = who if result.status == "ok" else f"{who}: {result.status}"
        rows.append([
            f"`{case.operation}`{' with gradient' if case.with_gradient else ''}, {shape(case)}", said, result.state,
            *(microseconds(each.median_us / unit) if each else NOTHING for each in times),
        ])  # fmt: skip
    shown = table(("call", "library", "caches", *names), rows)
    return f"{shown}\n\n{source(records.get(name))}"


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


def files_table(records: Records) -> str:
    """Softmax of a file of several gigabytes."""
    found = records.document("files/cpu")
    if found is None:
        return ABSENT
    rows = [
        [case["name"], f"{case['bytes'] / 2**30:.0f} GiB", f"{case['seconds']:.1f}", f"{case['file_mb_per_s']:.0f}",
         f"{case['peak_rss_mb']:.0f}", f"{case['import_rss_mb']:.0f}"]
        for case in found["cases"]
    ]  # fmt: skip
    header = ("case", "file", "seconds", "MB/s of file", "peak resident MB", "of which imports")
    machine = f"{found['machine']['cores']} cores of {found['machine']['cpu']}"
    said = f"Record: `files/cpu.json` ({machine}, commit {found['commit'][:7]}, {found['date'][:10]})."
    return f"{table(header, rows)}\n\n{said}"


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


def records_list(records: Records) -> str:
    """Every record with its device, date, commit and versions; those of one commit and device stand together."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for record in records:
        content, device = record.content, record.content["device"]
        versions = together(
            f"{name}\u00a0{content['versions'][name]}" for name in PACKAGES if content["versions"].get(name)
        )
        key = (content["date"][:10], f"commit {commit(record)}", device.get("processor") or device["name"], versions)
        groups.setdefault(key, []).append(f"[{record.name}](../benchmarks/results/{record.name})")
    lines = [f"- {', '.join(key)}: {', '.join(names)}" for key, names in sorted(groups.items(), reverse=True)]
    return "\n".join(lines) or ABSENT


BLOCKS: dict[str, Callable[[Records], str]] = {
    block.__name__: block
    for block in (
        host_table, cold_table, cpu_text, files_table, stamps_table, memory_traffic_table, records_list
    )
}  # fmt: skip
"""The blocks by name."""
