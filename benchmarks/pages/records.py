"""The records of benchmarks/results by their names, and the results in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onlinesoftmax.bench.cases import Case
from onlinesoftmax.bench.result import CaseResult, Result
from onlinesoftmax.report.records import Record, read

LIBRARIES, CASES = ("liger", "quack"), ("lengths",)
"""Additions to the name of a record: another library, or other cases than those of the suite."""


class Records:
    """Every record of a folder.

    A name is that of a file without its suffix, as "h200-forward".  A name may have an addition, as
    "h200-forward-quack": a run of the same suite with other libraries or other lengths.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        records, wrong, _ = read([folder])
        if wrong:
            raise ValueError("; ".join(wrong))
        self._records = {Path(record.name).stem: record for record in records}

    def __iter__(self) -> Iterator[Record]:
        """The records in the order of their names."""
        return iter(sorted(self._records.values(), key=lambda record: record.name))

    def get(self, name: str) -> Record | None:
        """A record, or None where it has not been measured."""
        return self._records.get(name)

    def family(self, name: str) -> list[Record]:
        """The record of this name, and those with an addition to it."""
        names = (name, *(f"{name}-{each}" for each in (*LIBRARIES, *CASES)))
        return [self._records[each] for each in names if each in self._records]

    def superseded(self) -> list[str]:
        """The names of records that were added for a library, where the record of the suite has that library now."""
        found = []
        for name, record in self._records.items():
            here = {each.who for case in record.results for each in case.results if each.times}
            found += [f"{name}-{who}" for who in LIBRARIES if who in here and f"{name}-{who}" in self._records]
        return found

    def document(self, name: str) -> Any:
        """The content of a file that `onlinesoftmax bench` did not write; None where there is none."""
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def cases(self, name: str, **fields: Any) -> list[CaseResult]:
        """The measured cases of a record with these values in the fields of `Case`; none where there is no record."""
        record = self._records.get(name)
        return [found for found in record.results if not found.skipped and fits(found.case, fields)] if record else []

    def result(self, case: Case, who: str, *names: str) -> Result | None:
        """The result of a library for a case, from the first of these families of records that has one."""
        found = [
            result
            for name in names
            for record in self.family(name)
            for each in record.results
            if each.case == case
            for result in each.results
            if result.who == who
        ]
        return next((result for result in found if result.times), found[0] if found else None)


def fits(case: Case, fields: dict[str, Any]) -> bool:
    """True where the case has these values."""
    return all(getattr(case, name) == value for name, value in fields.items())


def ours(found: CaseResult) -> Result:
    """Our result of a case.

    Raises:
        ValueError: ours has no result that could be shown.
    """
    result = next(each for each in found.results if each.who == "ours")
    if result.failed:
        raise ValueError(f"{found.case.operation} {found.case} {found.case.dtype}: {result.status}")
    return result
