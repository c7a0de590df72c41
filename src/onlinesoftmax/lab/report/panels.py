"""The records as the page shows them: panels with their points, the sentence above each, facts, notes and table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from ..bench.cases import Case
from ..bench.result import CALLS, FORMS, CaseResult, Result
from ..bench.tables import measures
from .combinations import STEP
from .records import Record

COPY = "copy"
"""Name of the copy among the libraries."""

MARGIN = 2**0.25
"""Factor between the ends of an axis of row lengths and the points beside them."""


NAMES = {"torch": "PyTorch", "compile": "torch.compile", "liger": "Liger", "quack": "quack", "jax.nn": "jax.nn"}
"""Names of libraries in prose, by their names in records, in the order in which tables show them."""

PROSE = NAMES | {
    "jax": "JAX", "flashinfer": "FlashInfer", "flashinfer-logits": "FlashInfer, logits", "cce": "cut-cross-entropy",
    "trl": "TRL", "trl-logits": "TRL on logits",
}  # fmt: skip
"""The same, with the libraries that only heads, sampling and routing are measured with."""

WITHOUT_PEERS = ("dtensor", "one-process", "collective", "without-shards", "jax-ours")
"""Other ways to call our own functions, besides those whose names begin with "ours"."""


def series(record: Record) -> dict[str, Any]:
    """A record as the page shows it.

    A panel holds the cases of one operation, one dtype and one choice of score options, arguments and gradient.  The
    cases of a kind that has another yardstick than the copy stand below each other; others over the row length.
    """
    panels: dict[str, list[dict[str, Any]]] = {}
    form = FORMS[measures(record.content)]
    # Times of calls have no place in charts of one time; the table has them.
    for found in record.results if form is not CALLS else ():
        if found.skipped is None:
            panels.setdefault(title(found), []).extend(_points(found))
    # Whole steps have no yardstick.
    yardstick = COPY if form.cases is Case else next(iter(form.yardsticks.values()), "")
    for points in panels.values():
        joined(points)
    table = record.table
    return {
        "name": record.name,
        "label": _label(record),
        "device": record.content["device"].get("processor") or record.content["device"]["name"],
        "facts": record.facts,
        "notes": [*table.above, *table.below, *([record.content["note"]] if record.content.get("note") else [])],
        "panels": [
            {"title": name, "points": points, "ends": ends(points), "listed": yardstick != COPY,
             "outcome": outcome(points, yardstick)}
            for name, points in sorted(panels.items()) if points
        ],
        "header": table.header,
        "rows": table.rows,
        "numbers": table.numbers,
    }  # fmt: skip


def outcome(points: Sequence[dict[str, Any]], yardstick: str = COPY) -> str:
    """The result of a panel in a sentence: medians over the cases that ours and the other library have both measured.

    Example:
        >>> slow = {"shape": "8x8", "who": "torch", "us": 30.0, "ratio": 0.3}
        >>> outcome([slow, slow | {"who": "ours", "us": 10.0, "ratio": 0.9}])
        'Ours is the fastest in 1 of 1 cases. In the median it has 3.00 times the speed of PyTorch, 0.90 of a copy.'
    """
    cases: dict[str, dict[str, Any]] = {}
    for point in points:
        if point["who"] not in (COPY, *WITHOUT_PEERS) and not point["who"].startswith("ours-"):
            cases.setdefault(point["shape"], {})[point["who"]] = point
    measured = [case for case in cases.values() if "ours" in case]
    ratios = [case["ours"]["ratio"] for case in measured if case["ours"]["ratio"] is not None]
    speeds: dict[str, list[float]] = {}
    for case in measured:
        for who in case.keys() - {"ours"}:
            speeds.setdefault(who, []).append(case[who]["us"] / case["ours"]["us"])
    order = [who for who in [*PROSE, *sorted(speeds.keys() - PROSE.keys())] if who in speeds]
    parts = [f"{median(speeds[who]):.2f} of {PROSE.get(who, who)}" for who in order]
    parts += [f"{median(ratios):.2f} of {'a copy' if yardstick == COPY else yardstick}"] if ratios else []
    if not parts:
        return ""
    parts[0] = parts[0].replace(" of ", " times the speed of ", 1)
    best = sum(case["ours"]["us"] <= min(each["us"] for each in case.values()) for case in measured)
    fastest = f"Ours is the fastest in {best} of {len(measured)} cases. " if speeds else ""
    return f"{fastest}In the median it has {', '.join(parts)}."


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
    if found.measures == "token time":
        return ", ".join([case.operation, str(case).partition(", ")[2], case.dtype])
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
    # The title has the rest of a case of sampling or routing.
    begins = {"token time": str(case).partition(", ")[0], "gate time": str(case).removesuffix(" with gradient")}
    shape = begins.get(found.measures, str(case))
    common = {"cols": case.shape[case.dim], "rows": case.rows, "shape": shape}
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
    if found.measures == "sharded time" and result.us:
        # Of one of the devices, as the copy beside it.
        gbps = found.case.bytes / found.processes / result.us / 1e3
        ratio = found.copy_gbps and gbps / found.copy_gbps
    if times_as_long := result.of_read or result.of_products:
        ratio = 1 / times_as_long
    return {
        "who": result.who,
        "plan": f"{result.plan.backend}/{result.plan.strategy}" if result.plan else "",
        "us": _digits(result.us),
        "gbps": _digits(gbps),
        "ratio": _digits(ratio),
        "error": _digits(result.error),
        "allowed": _digits(result.allowed),
        "mb": None if result.extra_bytes is None else _digits(result.extra_bytes / 1e6),
    }


def _digits(value: float | None) -> float | None:
    """Four digits, which a chart shows."""
    return None if value is None else float(f"{value:.4g}")
