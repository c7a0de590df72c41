"""Markdown of numbers, cells and tables."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from onlinesoftmax.lab.bench.cases import Case
from onlinesoftmax.lab.bench.result import CANNOT, CaseResult, Result
from onlinesoftmax.lab.bench.timing import Times
from onlinesoftmax.lab.report.records import Record

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

NOTHING = "–"
"""Cell of a case that was not measured."""

ABSENT = "*No record: not measured yet.*"
"""Text of a block whose record does not exist."""

SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""Names of dtypes in headers."""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; columns without any content are left out."""
    lines = [list(row) for row in rows]
    kept = [i for i in range(len(header)) if i == 0 or any(line[i] not in ("", NOTHING) for line in lines)]
    cells = [[header[i] for i in kept], ["---"] * len(kept), *([line[i] for i in kept] for line in lines)]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def cell(result: Result | None, value: float | None, form: Callable[[float], str]) -> str:
    """A number of a result in this form; the word for a result that has no time."""
    if result is None or value is not None:
        return NOTHING if value is None else form(value)
    return CANNOT if result.status == "refused" else result.status


def hundredths(value: float) -> str:
    """A share."""
    return f"{value:.2f}" if value >= 0.005 else "< 0.01"


def share(result: Result | None) -> str:
    """The bandwidth of a result over that of the copy beside it."""
    return cell(result, result and result.of_copy, hundredths)


def copies(result: Result | None) -> str:
    """The time of a result over the time of the copy beside it."""
    return cell(result, result and result.copies, lambda value: f"{value:.{2 if value < 10 else 0}f}")


def spread(values: Iterable[float | None], form: Callable[[float], str] = hundredths) -> str:
    """The smallest and the largest of several shares, or of numbers in another form."""
    texts = [form(value) for value in sorted(value for value in values if value is not None)]
    return "\u00a0to\u00a0".join(dict.fromkeys([texts[0], texts[-1]])) if texts else NOTHING


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items by their key, in the order of the first of each group."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def size(nbytes: int | None) -> str:
    """A number of bytes."""
    if nbytes is None:
        return NOTHING
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if abs(nbytes) >= unit / 10:
            return f"{nbytes / unit:.1f}\u00a0{name}"
    return f"{nbytes / 1e3:.0f}\u00a0kB" if nbytes else "0"


def microseconds(time: Times | float | None) -> str:
    """The median of the times of a call, or a time."""
    us = time.median_us if isinstance(time, Times) else time
    return NOTHING if us is None else f"{us:.1f}" if us < 100 else f"{us:.0f}"


def shape(case: Case) -> str:
    """The sizes of the input, and the dimension where it is not the last."""
    inner = case.dim == len(case.shape) - 1
    return sizes(case.shape) + ("" if inner else f", dim {case.dim}")


def sizes(numbers: Sequence[int]) -> str:
    """Sizes with no-break spaces between them, so that a narrow cell keeps them in one line."""
    return "\u00a0×\u00a0".join(map(str, numbers))


def together(cells: Iterable[str]) -> str:
    """Several values of one cell in one line."""
    return ",\u00a0".join(cells)


def strategy(found: CaseResult) -> str:
    """The strategy of our plan; `eager` where the framework's own operations run."""
    ours = found.result("ours")
    if ours is None or ours.plan is None:
        return NOTHING
    return ours.plan.backend if ours.plan.backend == "eager" else ours.plan.strategy


def commit(record: Record) -> str:
    """The commit of a record, in seven digits."""
    text: str = record.content["git"]["commit"][:7]
    return text


def source(*records: Record | None) -> str:
    """A line that names records with their commits."""
    said = [f"`{record.name}` ({commit(record)})" for record in records if record is not None]
    return f"*Record{'s' if len(said) > 1 else ''}: {', '.join(said)}.*"
