"""The numbers of the charts: one line of numbers for each case and library of a record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..bench.result import CALLS, ONLY_OF, CaseResult, Result
from ..bench.tables import measures
from .lengths import STEP
from .records import Record

COPY = "copy"
"""Name of the copy among the libraries."""

MARGIN = 2**0.25
"""Factor between the ends of an axis of row lengths and the points beside them."""


def series(record: Record) -> dict[str, Any]:
    """A record as the page shows it: its panels with their points, its facts, its notes and its table.

    A panel holds the cases of one operation, one dtype and one choice of score options and gradient.
    """
    panels: dict[str, list[dict[str, Any]]] = {}
    # Times of calls have no place in charts of bandwidth; the table has them.
    drawn = [found for found in record.results if ONLY_OF[found.measures] != CALLS]
    for found in drawn:
        if found.skipped is None:
            panels.setdefault(title(found), []).extend(_points(found))
    for points in panels.values():
        joined(points)
    table = record.table
    return {
        "name": record.name,
        "label": _label(record),
        "device": record.content["device"].get("processor") or record.content["device"]["name"],
        "facts": record.facts,
        "notes": [*table.above, *table.below, *([record.content["note"]] if record.content.get("note") else [])],
        "panels": [{"title": name, "points": points, "ends": ends(points)} for name, points in sorted(panels.items())],
        "header": table.header,
        "rows": table.rows,
        "numbers": table.numbers,
    }


def joined(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The points, with a mark on those that lines join: of the cases of each length, the one with the most rows.

    Unaligned rows and strided rows are points alone: a line through 1023, 1024 and 1025 columns would be a zigzag.
    """
    most: dict[int, tuple[int, str]] = {}
    for point in points:
        if point["cols"] % STEP == 0 and " dim " not in point["shape"]:
            most[point["cols"]] = max(most.get(point["cols"], (0, "")), (point["rows"], point["shape"]))
    for point in points:
        point["joined"] = most.get(point["cols"]) == (point["rows"], point["shape"])
    return points


def ends(points: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The ends of the axis of row lengths, a quarter of a power of two beyond the points.

    Example:
        >>> ends([{"cols": 256}, {"cols": 65536}])
        {'begin': 215.3, 'end': 77935.9}
    """
    lengths = [point["cols"] for point in points] or [1]
    return {"begin": round(min(lengths) / MARGIN, 1), "end": round(max(lengths) * MARGIN, 1)}


def title(found: CaseResult) -> str:
    """The title of the panel of a case."""
    case = found.case
    words = [case.operation, *(["with gradient"] if case.with_gradient else [])]
    words += [f"reduction {case.reduction}"] if case.reduction else []
    return ", ".join([*words, *case.fused, case.dtype])


def _label(record: Record) -> str:
    """The text of a record in the list of all: measurement, framework or forced backend, commit, date and name."""
    operations = ", ".join(dict.fromkeys(found.case.operation for found in record.results)) or "no cases"
    framework = "JAX, " if any(found.framework == "jax" for found in record.results) else ""
    content, kind = record.content, measures(record.content)
    if backend := content["options"].get("backend"):
        framework += f"{backend} alone, "
    operations = operations if kind == "device time" else f"{kind}: {operations}"
    return f"{operations} ({framework}{content['git']['commit'][:7]}, {content['date'][:10]}, {record.name})"


def _points(found: CaseResult) -> list[dict[str, Any]]:
    case, points = found.case, []
    common = {"cols": case.shape[case.dim], "rows": case.rows, "shape": str(case)}
    if found.copy is not None:
        points.append(common | {"who": COPY, "us": _digits(found.copy.median_us), "gbps": _digits(found.copy_gbps),
                                "ratio": 1.0})  # fmt: skip
    # What is drawn last lies on top.
    for result in sorted(found.results, key=lambda result: result.who == "ours"):
        if result.times is not None:
            points.append(common | _point(found, result))
    return points


def _point(found: CaseResult, result: Result) -> dict[str, Any]:
    gbps, ratio = result.gbps, result.of_copy
    if found.measures == "sharded time" and result.times:
        # Of one of the devices, as the copy beside it.
        gbps = found.case.bytes / found.processes / result.times.median_us / 1e3
        ratio = found.copy_gbps and gbps / found.copy_gbps
    return {
        "who": result.who,
        "plan": f"{result.plan.backend}/{result.plan.strategy}" if result.plan else "",
        "us": _digits(result.times.median_us if result.times else None),
        "gbps": _digits(gbps),
        "ratio": _digits(ratio),
        "error": _digits(result.error),
        "allowed": _digits(result.allowed),
        "mb": None if result.extra_bytes is None else _digits(result.extra_bytes / 1e6),
    }


def _digits(value: float | None) -> float | None:
    """Four digits, which a chart shows."""
    return None if value is None else float(f"{value:.4g}")
