"""The charts in docs/charts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import altair as alt

from onlinesoftmax.lab.bench.heads.cases import POLICY, TRAINING
from onlinesoftmax.lab.report.charts import GREY, HEIGHT, LIBRARY_COLORS, static, svg
from onlinesoftmax.lab.report.panels import COPY, NAMES, joined, series
from onlinesoftmax.lab.report.records import Record

from .losses import CROSS_ENTROPY
from .markdown import shape
from .records import Records
from .steps import DECODING_WAYS, STEP_WAYS, named, tokens_per_second

ROOM = 24
"""Pixels beside texts: a browser's font may be wider than that of the program that makes the SVG."""

TWO_LINES = "split(replace(datum.label, regexp(', (?=[0-9]+ layers)'), ',|'), '|')"
"""Label of a group of bars: the layers of a model stand on a line of their own, so that the bars have more room."""

LOW = 220
"""Height in pixels of a chart inside a page; that of the README is higher."""


def by_length(
    names: Sequence[str], title: str, measure: str = "ratio", height: int = LOW, lines_only: bool = False
) -> Callable[[Records], str]:
    """A function that draws a measure over the row length.

    Args:
        names: Names of records.
        title: Title of a panel: an operation and a dtype.
        measure: Name of the measure in `onlinesoftmax.lab.report.charts`.
        height: Pixels.
        lines_only: True to leave out the points that no line joins, which are those of unaligned and strided rows.
    """

    def draw(records: Records) -> str:
        found = [record for name in names if (record := records.get(name))]
        return svg([point for point in points_of(found, title) if point["joined"] or not lines_only], measure, height)

    return draw


def losses(records: Records) -> str:
    """Times of the mean cross-entropy with its gradient in copies, as bars of every library and shape."""
    found = records.cases(CROSS_ENTROPY, dtype="bfloat16", reduction="mean", with_gradient=True)
    bars = [
        (shape(each.case), result.who, result.copies)
        for each in found for result in each.results if result.copies
    ]  # fmt: skip
    return _bars(bars, {"ours": "ours", **NAMES}, "time of forward and backward, in copies of the logits", floor=1)


def whole_steps(operation: str) -> Callable[[Records], str]:
    """A function that draws the speeds of the training steps with this loss, as bars of every way and size."""

    def draw(records: Records) -> str:
        found = records.cases(records.first("training-step"), operation=operation)
        bars = [
            (named(each), result.who, tokens_per_second(each, result.us))
            for each in found for result in each.results if result.us
        ]  # fmt: skip
        return _bars(bars, STEP_WAYS, "tokens per second")

    return draw


def decoding(records: Records) -> str:
    """Times of a step of decoding of many rows, as bars of every way and of what is asked."""
    found = records.cases(records.first("decoding"))
    many = max((each.case.rows for each in found), default=0)
    bars = [
        (named(each), result.who, result.us / 1e3)
        for each in found for result in each.results if result.us and each.case.rows == many
    ]  # fmt: skip
    return _bars(bars, DECODING_WAYS, "milliseconds of a step: less is better")


def _bars(
    bars: Sequence[tuple[str, str, float]], names: Mapping[str, str], title: str, floor: float | None = None
) -> str:
    """Bars (group, library, value) of groups below each other, with a dashed line at the floor.

    Libraries have their names in records, and `names` has those of the legend.
    """
    values = [{"group": group, "library": names[who], "value": float(f"{value:.4g}")} for group, who, value in bars]
    colors = {names[who]: LIBRARY_COLORS[who] for _, who, _ in bars}
    here = list(colors)
    color = alt.Color("library:N", scale=alt.Scale(domain=here, range=list(colors.values())), sort=None,
                      legend=alt.Legend(title=None, orient="bottom", columns=3))  # fmt: skip
    drawn = alt.Chart(alt.NamedData("bars")).mark_bar().encode(
        y=alt.Y("group:N", title=None, sort=None, axis=alt.Axis(labelLimit=400, labelExpr=TWO_LINES)),
        yOffset=alt.YOffset("library:N", sort=here), color=color,
        x=alt.X("value:Q", title=title, axis=alt.Axis(tickCount=8)),
    )  # fmt: skip
    rule = alt.Chart(alt.NamedData("floor")).mark_rule(strokeDash=[5, 4], color=GREY).encode(x="value:Q")
    document = (alt.layer(drawn, rule) if floor is not None else alt.layer(drawn)).to_dict()
    del document["config"]
    groups = len({group for group, _, _ in bars})
    return static(
        document
        | {
            "height": max(160, groups * (12 * len(here) + 10)) if floor is None else 260,
            "padding": {"left": ROOM, "right": 5, "top": 5, "bottom": 5},
            "datasets": {"bars": values, "floor": [{"value": floor}]},
        }
    )


CHARTS: dict[str, Callable[[Records], str]] = {
    "softmax-h200": by_length(["h200-forward"], "softmax, bfloat16", "gbps", HEIGHT, lines_only=True),
    "softmax-h200-float32": by_length(["h200-forward", "h200-lengths"], "softmax, float32"),
    "single-row-h200": by_length(["h200-single-row"], "softmax, bfloat16", "gbps"),
    "gradients-h200": by_length(["h200-gradients"], "softmax_backward, bfloat16"),
    "softmax-jax": by_length(["h100-jax-forward", "h100-jax-lengths"], "softmax, bfloat16"),
    "losses-h200": losses,
    "training-steps": whole_steps(TRAINING),
    "policy-steps": whole_steps(POLICY),
    "decoding": decoding,
}
"""The function that draws each chart, by the name of its file."""


def points_of(records: Iterable[Record], title: str) -> list[dict[str, Any]]:
    """The points of the panels with this title, of several records of one device.

    Where two records have the same case and library, the first one counts; the copy is that of the first.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for record in records:
        for panel in series(record)["panels"]:
            if panel["title"] == title:
                for point in panel["points"]:
                    found.setdefault((point["shape"], point["who"]), point)
    # The copy lies below all others, and ours above.
    order = sorted(found.values(), key=lambda point: (point["who"] != COPY, point["who"] == "ours"))
    return joined(order)
