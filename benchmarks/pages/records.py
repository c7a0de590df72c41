"""The records of benchmarks/results by their names, and the results in them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from onlinesoftmax.lab.bench.cases import Case
from onlinesoftmax.lab.bench.result import CaseResult, Result
from onlinesoftmax.lab.report.records import Record, read

from .markdown import ABSENT, source, table


class Records:
    """Every record of a folder, by the name of its file without the suffix, as "h200-forward"."""

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

    def first(self, suite: str) -> str:
        """The name of the record of a suite, of the first GPU that has one; empty where there is none."""
        return next((name for gpu in ("h100", "h200") if (name := f"{gpu}-{suite}") in self._records), "")

    def newest(self, suite: str) -> str:
        """The name of the newest record of a suite, of one GPU; empty where there is none."""
        found = [name for gpu in ("h100", "h200") if (name := f"{gpu}-{suite}") in self._records]
        return max(found, key=lambda name: str(self._records[name].content["date"]), default="")

    def document(self, name: str) -> Any:
        """The content of a file that `onlinesoftmax bench` did not write; None where there is none."""
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def cases(self, name: str, **fields: Any) -> list[CaseResult]:
        """The measured cases of a record with these values in the fields of `Case`; none where there is no record."""
        record = self._records.get(name)
        return [found for found in record.results if not found.skipped and fits(found.case, fields)] if record else []

    def result(self, case: Case, who: str, name: str) -> Result | None:
        """The result of a library for a case of a record; None where there is none."""
        return next((each.result(who) for each in self.cases(name) if each.case == case), None)

    def table(self, header: Sequence[str], rows: Iterable[Sequence[str]], *names: str) -> str:
        """A table, and a line that names the records that it is made from; ABSENT without any row."""
        lines = list(rows)
        return f"{table(header, lines)}\n\n{source(*map(self.get, names))}" if lines else ABSENT


def fits(case: Case, fields: dict[str, Any]) -> bool:
    """True where the case has these values."""
    return all(getattr(case, name) == value for name, value in fields.items())


def ours(found: CaseResult) -> Result:
    """Our result of a case.

    Raises:
        ValueError: ours has no result that could be shown.
    """
    result = found.result("ours")
    if result is None or result.failed:
        raise ValueError(f"{found.case.operation} {found.case} {found.case.dtype}: {result and result.status}")
    return result
