"""The honest losses of docs/performance.md: cases far from the copy, and cases where another library is faster."""

from __future__ import annotations

from collections.abc import Iterator

from onlinesoftmax.lab.bench.result import CaseResult
from onlinesoftmax.lab.report.panels import NAMES
from onlinesoftmax.lab.report.records import Record

from .markdown import SHORT, shape, strategy, table
from .records import Records, ours

FAR = 0.9
"""Share of the copy's bandwidth below which a case is listed as a loss."""

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
    groups: dict[tuple[str, str], dict[str, list[tuple[float, str]]]] = {}
    for record, found in _measured(records):
        part = ours(found).of_copy
        if part is not None:
            words = " ".join([shape(found.case), *found.case.fused, SHORT[found.case.dtype]])
            operation = f"`{found.case.operation}`" + (" and its gradient" if found.case.with_gradient else "")
            key = (_device(record.name).upper().replace("-", ", "), operation)
            groups.setdefault(key, {}).setdefault(strategy(found), []).append((part, words))
    rows = []
    for key, strategies in sorted(groups.items()):
        said = []
        for chosen, cases in sorted(strategies.items()):
            count, (lowest, words) = sum(round(part, 2) < FAR for part, _ in cases), min(cases)
            if count:
                said.append(f"`{chosen}`: {count} of {len(cases)}, down to {lowest:.2f} at {words}")
        if said:
            rows.append([*key, "; ".join(said)])
    if not rows:
        return f"No case is below {FAR}."
    return table(("device", "operation", f"cases below {FAR}, by strategy"), rows)


def faster_libraries(records: Records) -> str:
    """The cases where another library takes at most 1/SLOWER of our time, in the same run, by record and library."""
    groups: dict[tuple[str, str, str], list[tuple[float, str]]] = {}
    for record, found in _measured(records):
        mine, case = ours(found).us, found.case
        for result in found.results:
            if mine and result.who != "ours" and result.us and mine > SLOWER * result.us:
                words = " ".join([shape(case), *case.fused, SHORT[case.dtype]])
                key = (record.name.removesuffix(".json"), f"`{case.operation}`", NAMES.get(result.who, result.who))
                groups.setdefault(key, []).append((mine / result.us, words))
    if not groups:
        return f"In no run was another library faster by more than {SLOWER - 1:.0%}."
    rows = [[*key, str(len(cases)), "{:.2f} at {}".format(*max(cases))] for key, cases in groups.items()]
    return table(("record", "operation", "faster library", "cases", "our time / its time, at most"), rows)


def _device(name: str) -> str:
    """The device of a record's name, and the framework."""
    return "-".join(name.split("-")[: 2 if "-jax-" in name else 1])
