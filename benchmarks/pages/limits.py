"""The honest losses of docs/performance.md: cases far from the copy, and cases where another library is faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from onlinesoftmax.lab.bench.result import CaseResult, Result
from onlinesoftmax.lab.report.charts import NAMES
from onlinesoftmax.lab.report.records import Record

from .markdown import NOTHING, SHORT, commit, shape, share, strategy, table
from .records import Records, ours

FAR = 0.95
"""Share of the copy's bandwidth below which a case is listed as a loss."""

SHOWN = 3
"""Cases of a group that are named."""

SLOWER = 1.02
"""Ratio of two times above which a library counts as faster: two runs of one plan differ by 1 to 2 %."""


def _measured(records: Records) -> Iterator[tuple[Record, CaseResult]]:
    """The cases of device times of GPUs, with their records; without sharded rows and without forced backends."""
    for record in records:
        on_gpu = record.content["device"].get("kind") == "cuda"
        if on_gpu and not record.sharded and not record.content["options"].get("backend"):
            for found in record.results:
                if not found.skipped and found.copy is not None:
                    yield record, found


def far_from_the_copy(records: Records) -> str:
    """The cases of ours that reach less than FAR of the copy, by device, operation and strategy."""
    groups: dict[tuple[str, str, str], list[tuple[float, str]]] = {}
    for record, found in _measured(records):
        part = ours(found).of_copy
        if part is not None:
            words = " ".join([shape(found.case), *found.case.fused, SHORT[found.case.dtype]])
            operation = f"`{found.case.operation}`" + (" and its gradient" if found.case.with_gradient else "")
            key = (_device(record.name).upper().replace("-", ", "), operation, strategy(found))
            groups.setdefault(key, []).append((part, words))
    rows = []
    for (device, operation, chosen), cases in sorted(groups.items()):
        far = sorted((part, words) for part, words in cases if round(part, 2) < FAR)
        if far:
            lowest = "; ".join(f"{part:.2f} at {words}" for part, words in far[:SHOWN])
            rows.append([device, operation, chosen, f"{len(far)} of {len(cases)}", lowest])
    if not rows:
        return f"No case is below {FAR}."
    return table(("device", "operation", "strategy", f"cases below {FAR}", "the lowest"), rows)


def faster_libraries(records: Records) -> str:
    """Every case where another library takes at most 1/SLOWER of our time, in the same run."""
    rows = []
    for record, found in _measured(records):
        mine = ours(found).times
        for result in found.results:
            if mine and result.who != "ours" and result.times and mine.median_us > SLOWER * result.times.median_us:
                rows.append(_row(record, found, result, mine.median_us / result.times.median_us))
    if not rows:
        return f"In no run was another library faster by more than {SLOWER - 1:.0%}."
    return table(("record", "case", "faster library", "its share", "ours", "our time / its time"), rows)


def _device(name: str) -> str:
    """The device of a record's name, and the framework."""
    return "-".join(name.split("-")[: 2 if "-jax-" in name else 1])


def _row(record: Record, found: CaseResult, result: Result, ratio: float) -> list[str]:
    case = found.case
    words = " ".join([f"`{case.operation}`", shape(case), *case.fused, SHORT[case.dtype]])
    times = share(result) if result.of_copy is not None else NOTHING
    name = f"{record.name.removesuffix('.json')} ({commit(record)})"
    return [name, words, NAMES.get(result.who, result.who), times, share(ours(found)), f"{ratio:.2f}"]


BLOCKS: dict[str, Callable[[Records], str]] = {block.__name__: block for block in (far_from_the_copy, faster_libraries)}
"""The blocks by name."""
