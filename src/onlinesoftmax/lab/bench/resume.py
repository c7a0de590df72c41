"""The record of a run while it grows: cases that an earlier run has measured are kept, and the others are left."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.whole_files import NotRegularError, read_regular
from .cases import Case
from .result import CaseResult
from .tables import read_cases

IGNORED = ("date", "cases", "resumed", "device.load", "options.out", "options.commit", "options.as_json")
"""Fields that may differ between the two parts of a record: the others must be the same."""


class ResumeError(ValueError):
    """A record cannot be continued; the message names the field."""


@dataclass
class Recording:
    """A record in the making.

    Attributes:
        content: The record: JSON that is complete after every case.
        todo: Every case of the run, in the order of the record.
        results: The results so far, by their cases.
    """

    content: dict[str, Any]
    todo: Sequence[Case]
    results: dict[Case, CaseResult] = field(default_factory=dict)
    _recorded: dict[Case, dict[str, Any]] = field(default_factory=dict)

    @property
    def left(self) -> list[Case]:
        """The cases to measure, those that were skipped included: there may be more memory now."""
        return [case for case in self.todo if case not in self.results or self.results[case].skipped]

    @property
    def found(self) -> list[CaseResult]:
        """The results so far, in the order of the record."""
        return [self.results[case] for case in self.todo if case in self.results]

    def add(self, result: CaseResult) -> None:
        """Put the results of a case into the record."""
        self._keep(result, result.as_dict())

    def _keep(self, result: CaseResult, recorded: dict[str, Any]) -> None:
        self.results[result.case], self._recorded[result.case] = result, recorded
        self.content["cases"] = [self._recorded[case] for case in self.todo if case in self._recorded]

    def resume(self, old: Mapping[str, Any]) -> None:
        """Keep the results of an earlier record of the same run.

        Raises:
            ResumeError: the earlier record is of another run: the message names the first field that differs.
        """
        new = json.loads(json.dumps(self.content))
        for name, here, there in _differences(new, old):
            raise ResumeError(f"field {name}: the file has {there}, and this run has {here}")
        try:
            for result, recorded in zip(read_cases(old), old["cases"], strict=True):
                if result.case in self.todo:
                    self._keep(result, recorded)
        except ValueError as error:
            raise ResumeError(str(error)) from None
        # A complete record stays as it is.
        earlier, now = old.get("resumed", []), [self.content["date"]] if self.left else []
        if earlier or now:
            self.content["resumed"] = [*earlier, *now]
        self.content["date"] = old["date"]


def load(path: Path) -> dict[str, Any]:
    """The document in a file.

    Raises:
        ResumeError: it cannot be read, or it is no record of `onlinesoftmax bench`.
    """
    try:
        content = json.loads(read_regular(path))
    except NotRegularError as error:
        raise ResumeError(f"it {error.strerror}") from None
    except OSError as error:
        raise ResumeError(f"it cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ResumeError(f"it is no JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("cases"), list):
        raise ResumeError("it is no record of onlinesoftmax bench")
    resumed = content.get("resumed", [])
    if not isinstance(resumed, list) or not all(isinstance(date, str) for date in [content.get("date"), *resumed]):
        raise ResumeError("it is no record of onlinesoftmax bench")
    return content


def _differences(new: Any, old: Any, name: str = "") -> Iterator[tuple[str, str, str]]:
    """(field, value in the new record, value in the old one) of every field that differs and must not."""
    if name in IGNORED or new == old:
        return
    if not isinstance(new, dict) or not isinstance(old, dict):
        yield name, json.dumps(new), json.dumps(old)
        return
    for key in dict.fromkeys([*new, *old]):
        path = f"{name}.{key}" if name else key
        if path in IGNORED:
            continue
        if key not in new or key not in old:
            here, there = ("nothing" if key not in each else json.dumps(each[key]) for each in (new, old))
            yield path, here, there
        else:
            yield from _differences(new[key], old[key], path)
