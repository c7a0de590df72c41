"""The charts of the page, as Vega-Lite specifications that Altair writes, and of the documentation, as SVG files.

The page fills in its data.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ...ops import OPERATIONS
from ...planner.strategies import FOR_JAX, TABLE
from .panels import COPY, PROSE, ends, series
from .records import Record

GREY = "#808890"
"""Colour of the copy and of lines that are no measurement; it is legible on a light page and on a dark one."""

COLORS = ("#4c8dd6", "#e0913a", "#58a866", "#c05a8c", "#8a74c9", "#4fb0b5", "#c9a93b", "#b5694f")
"""Colours of libraries, of strategies and of blocks."""

SHARDED = ("dtensor", "loss-parallel", "all-gather", "one-process", "collective", "without-shards")
"""Ways to compute rows that are sharded over processes, besides ours; no record has them beside other libraries."""

ALONE = ("ours", "torch", "compile", "liger", "quack", "jax.nn")
"""Libraries of the charts over row lengths."""

MORE = {
    "jax": COLORS[5], "flashinfer": COLORS[6], "flashinfer-logits": "#8f7a2c", "cce": COLORS[7], "cce-exact": "#d9a08c",
    "torch-linear": "#b5651d", "torch-chunks": "#eec08f", "ours-stored": "#8fb8e6", "ours-small": "#6f8fb3",
    "ours-bounded": "#5fc0d6", "ours-columns": "#3a6fd0", "ours-logits": "#6f8fb3",
    "ours-compile": "#5fc0d6", "jax-ours": "#8fd3d6", "flash-attn": "#d95f5f",
    "transformer-engine": "#76b900", "megatron": "#4a6b1f", "trl": "#e6c229", "trl-logits": "#a68a1f",
}  # fmt: skip
"""Colours of the libraries, and of our own other ways, that other suites are measured with."""

LIBRARY_COLORS = {
    **dict(zip(ALONE, COLORS, strict=False)), **MORE, **dict(zip(SHARDED, COLORS[1:], strict=False)), COPY: GREY,
}  # fmt: skip
"""The colour of each library, in the order in which legends name them."""

LIBRARIES = tuple(LIBRARY_COLORS)

LEGEND = f"({json.dumps(PROSE | {COPY: f'{COPY} (dashed)'})})[datum.label] || datum.label"
"""Label of a library in a legend."""

AXIS_WIDTH = 52
"""Width in pixels of the axis to the left of the chart over row lengths; the slider below begins where it ends."""

LENGTH = (
    "datum.value < 1024 ? format(datum.value, '') : datum.value < 1048576 ? format(datum.value / 1024, '') + ' Ki'"
    " : datum.value < 1073741824 ? format(datum.value / 1048576, '') + ' Mi' : '1 Gi'"
)
"""Label of a row length: 65536 is 64 Ki."""

NAMED = ("row", "cluster", "grid", "looped", "split", "column")
"""Strategies in the order of their colours."""


def strategy_colors() -> dict[str, str]:
    """The colour of each backend/strategy: that of the strategy, and lighter in Triton; brown for eager operations."""
    own = [row[:2] for operation in OPERATIONS.values() for row in operation.own_strategies]
    names = dict.fromkeys([row[:2] for row in (*TABLE, *FOR_JAX)] + own)
    order = list(dict.fromkeys([*NAMED, *(strategy for _, strategy in names)]))

    def color(backend: str, strategy: str) -> str:
        found = COLORS[-1] if backend == "eager" else COLORS[order.index(strategy) % (len(COLORS) - 1)]
        return _lighter(found) if backend == "triton" else found

    return {f"{backend}/{strategy}": color(backend, strategy) for backend, strategy in names}


def _lighter(color: str) -> str:
    """A colour half way to white."""
    return "#" + "".join(f"{(int(color[i : i + 2], 16) + 255) // 2:02x}" for i in (1, 3, 5))


MEASURES = {
    "gbps": ("GB/s", "linear", ",~f"),
    "ratio": ("ratio to the copy's speed", "linear", "~f"),
    "us": ("microseconds", "log", ",~r"),
    "error": ("largest error against float64", "log", ".0e"),
    "mb": ("MB beyond input and result", "linear", ",~f"),
}
"""Title of the axis, scale and number format of each measure, by its name in the points of a panel."""


def specifications() -> dict[str, Any]:
    """Every chart by its name: a measure, "listed" and a measure, and "lengths" for the axis of the picker."""
    found = {name: measured(name) for name in MEASURES}
    return found | {f"listed {name}": listed(name) for name in MEASURES} | {"lengths": lengths()}


def _by_length(**scale: Any) -> Any:
    """The axis of row lengths, with logarithms.

    Args:
        scale: The ends of the axis, as arguments of `altair.Scale`.
    """
    import altair as alt

    powers = [1 << k for k in range(31)]
    axis = alt.Axis(labelExpr=LENGTH, title="row length", values=powers, labelOverlap="parity", grid=False,
                    tickColor="transparent")  # fmt: skip
    return alt.X("cols:Q", scale=alt.Scale(type="log", base=2, nice=False, **scale), axis=axis)


def _by_library() -> Any:
    """The colour of each library, and the legend, whose parameter `shown` has the libraries of the chart."""
    import altair as alt

    scale = alt.Scale(domain=list(LIBRARIES), range=list(LIBRARY_COLORS.values()))
    legend = alt.Legend(title=None, orient="bottom", columns=3, values=alt.ExprRef("shown"), labelExpr=LEGEND)
    return alt.Color("who:N", scale=scale, legend=legend)


def _by_measure(measure: str, channel: Any, title: str, **axis: Any) -> Any:
    """A measure along an axis; `channel` is `altair.X` or `altair.Y`, and `axis` has arguments of `altair.Axis`."""
    import altair as alt

    _, scale, form = MEASURES[measure]
    ends = alt.Scale(type="log") if scale == "log" else alt.Scale(zero=True)
    return channel(f"{measure}:Q", title=title, scale=ends, axis=alt.Axis(format=form, **axis))


def _clicked() -> tuple[Any, Any]:
    """The library that is clicked in the legend, and the opacity that leaves the others in the background."""
    import altair as alt

    clicked = alt.selection_point("clicked", fields=["who"], bind="legend")
    return clicked, alt.condition(clicked, alt.value(1), alt.value(0.1))


def _finished(chart: Any, height: int) -> dict[str, Any]:
    """The specification of a chart that is as wide as its place on the page."""
    room = {"left": 0, "right": 14, "top": 4, "bottom": 6}
    document: dict[str, Any] = chart.properties(width="container", height=height, padding=room).to_dict()
    # The bundle has one version of Vega-Lite, and the address of its schema would be the only one on the page.
    for name in ("config", "$schema"):
        document.pop(name, None)
    return document


def measured(measure: str) -> dict[str, Any]:
    """A measure of all libraries over the row length.

    The copy is the dashed line.  A line joins the aligned cases with the most rows of each length.
    """
    import altair as alt

    label, scale, _ = MEASURES[measure]
    kept = f"isValid(datum.{measure})" + (f" && datum.{measure} > 0" if scale == "log" else "")
    clicked, opacity = _clicked()
    base = alt.Chart(alt.NamedData("points")).transform_filter(kept)
    base = base.encode(
        x=_by_length(domainMin=alt.ExprRef("begin"), domainMax=alt.ExprRef("end")),
        y=_by_measure(measure, alt.Y, label, tickCount=6), color=_by_library(), opacity=opacity,
    )  # fmt: skip
    lines = base.transform_filter("datum.joined").mark_line(strokeWidth=1.8).encode(
        strokeDash=alt.condition(f"datum.who === '{COPY}'", alt.value([5, 4]), alt.value([1, 0])), detail="who:N",
    )  # fmt: skip
    dots = base.transform_filter(f"datum.who !== '{COPY}'").mark_point(filled=True, size=36)
    dots = dots.encode(tooltip=_tips("of copy"))
    layers = [lines, dots]
    if measure == "error":
        allowed = base.transform_filter("isValid(datum.allowed) && datum.allowed > 0 && datum.who === 'ours'")
        layers.append(
            allowed.mark_tick(thickness=2, orient="horizontal", size=14).encode(y="allowed:Q", color=alt.value(GREY))
        )
    # The libraries in the legend, and the ends of the axis; `series.ends` has the ends of a panel.
    given = [alt.param(name="shown", value=list(LIBRARIES)), alt.param(name="begin", value=1)]
    given.append(alt.param(name="end", value=1 << 30))
    return _finished(alt.layer(*layers).add_params(clicked, *given), 230)


def listed(measure: str) -> dict[str, Any]:
    """A measure of all libraries, with a line for each case: of cases whose yardstick is not the copy.

    The page gives it the height of its lines.
    """
    import altair as alt

    title = "ratio to the yardstick's speed" if measure == "ratio" else MEASURES[measure][0]
    clicked, opacity = _clicked()
    chart = alt.Chart(alt.NamedData("points")).transform_filter(f"isValid(datum.{measure})")
    chart = chart.mark_point(filled=True, size=60).encode(
        x=_by_measure(measure, alt.X, title, tickCount=5, labelOverlap="greedy"),
        y=alt.Y("shape:N", sort=None, title=None, axis=alt.Axis(grid=True, labelLimit=230)),
        color=_by_library(), tooltip=_tips("of yardstick"), opacity=opacity,
    )  # fmt: skip
    shown = alt.param(name="shown", value=list(LIBRARIES))
    return _finished(chart.add_params(clicked, shown), 200)


def _tips(ratio: str) -> list[Any]:
    """What the pointer shows on a point."""
    import altair as alt

    titles = {"who:N": "library", "shape:N": "shape", "plan:N": "plan", "us:Q": "µs", "gbps:Q": "GB/s",
              "ratio:Q": ratio, "error:Q": "error", "allowed:Q": "allowed error", "mb:Q": "extra MB"}  # fmt: skip
    return [alt.Tooltip(name, title=title) for name, title in titles.items()]


def lengths() -> dict[str, Any]:
    """The estimated speed over the row length, the plan of every length as a band above, and the cliffs.

    A second GPU has a band of its own, above the first, and a dashed line.
    """
    import altair as alt

    whole = _by_length(domain=[1, 1 << 30], padding=8)
    colors = strategy_colors()
    legend = alt.Legend(title=None, orient="top", offset=36, values=alt.ExprRef("shown"))
    scale = alt.Scale(domain=list(colors), range=list(colors.values()))
    plans = alt.Color("plan:N", scale=scale, legend=legend)
    speed = alt.Y("gbps:Q", title="estimated GB/s", scale=alt.Scale(zero=True, domainMin=0),
                  axis=alt.Axis(minExtent=AXIS_WIDTH, maxExtent=AXIS_WIDTH, format="~s", tickCount=4))  # fmt: skip
    bands = [
        alt.Chart(alt.NamedData(name)).mark_rect().encode(
            x=whole, x2="end:Q", y=alt.value(top), y2=alt.value(top + 12), color=plans,
            tooltip=["gpu:N", "plan:N", "words:N"],
        )
        for name, top in (("pieces", -16), ("pieces_beside", -30))
    ]  # fmt: skip
    cliffs = alt.Chart(alt.NamedData("cliffs")).mark_rule(strokeDash=[2, 3], color=GREY).encode(
        x=whole, tooltip=[alt.Tooltip("words:N", title="cliff")],
    )  # fmt: skip
    ceiling = alt.Chart(alt.NamedData("ceiling")).mark_rule(strokeDash=[5, 4], color=GREY).encode(
        y=speed, tooltip=[alt.Tooltip("gbps:Q", title="copy, GB/s")],
    )  # fmt: skip
    line = alt.Chart(alt.NamedData("answers")).mark_line(color=GREY, strokeWidth=1.5).encode(
        x=whole, y=speed, detail="beside:N",
        strokeDash=alt.condition("datum.beside", alt.value([6, 3]), alt.value([1, 0])),
    )  # fmt: skip
    own = alt.Chart(alt.NamedData("answers")).transform_filter("!datum.beside")
    dots = own.mark_point(filled=True, size=28, opacity=1).encode(
        x=whole, y=speed, color=plans,
        tooltip=[alt.Tooltip("cols:Q", title="row length"), "plan:N", alt.Tooltip("gbps:Q", title="estimated GB/s")],
    )  # fmt: skip
    here = alt.Chart(alt.NamedData("here"))
    rule = here.mark_rule(strokeWidth=2).encode(x=whole, color=alt.value(alt.ExprRef("ink")))
    ring = here.mark_point(size=140, strokeWidth=2).encode(x=whole, y=speed, color=alt.value(alt.ExprRef("ink")))
    layered = alt.layer(*bands, ceiling, cliffs, line, dots, rule, ring).add_params(
        alt.param(name="ink", value="#000000"), alt.param(name="shown", value=list(colors))
    )
    return _finished(layered, 170)


WIDTH, HEIGHT = 560, 280
"""Pixels of the chart without its axes; texts of a wider chart could not be read on a phone."""

SVG_AXIS = {
    "labelColor": GREY, "titleColor": GREY, "domainColor": GREY, "tickColor": GREY, "gridColor": f"{GREY}40",
    "labelFontSize": 12, "titleFontSize": 13, "titleFontWeight": "normal", "titlePadding": 10, "labelSeparation": 12,
}  # fmt: skip
"""Axes of a chart as SVG; a browser's font may be wider than the one with which the room for labels is computed."""

SVG_LEGEND = {"labelColor": GREY, "labelFontSize": 13, "symbolSize": 100, "columnPadding": 24}
"""Legend of a chart as SVG."""

FONT = "system-ui, sans-serif"


def headline(record: Record) -> str:
    """The first panel of a record as SVG; its colours are legible on light and on dark pages.

    Raises:
        ValueError: the record has no case that was measured.
    """
    panels = series(record)["panels"]
    if not panels:
        raise ValueError(f"{record.name} has no case that was measured")
    # Unaligned and strided rows, which no line joins, are for the page.
    return svg([point for point in panels[0]["points"] if point["joined"]])


def svg(points: Sequence[dict[str, Any]], measure: str = "gbps", height: int = HEIGHT) -> str:
    """A measure of these points over the row length, as SVG of a fixed size."""
    document = measured(measure)
    here = {point["who"] for point in points if point.get(measure) is not None}
    shown = [who for who in LIBRARIES if who in here]
    given = ends(points) | {"shown": shown}
    for parameter in document["params"]:
        if parameter["name"] in given:
            parameter["value"] = given[parameter["name"]]
    for layer in document["layer"]:
        if "legend" in (color := layer["encoding"].get("color", {})):
            color["legend"]["columns"] = len(here)
            # Readers of a screen hear the domain: the libraries of this chart alone.
            color["scale"] = {"domain": shown, "range": [LIBRARY_COLORS[who] for who in shown]}
    return static(document | {"height": height, "datasets": {"points": list(points)}})


def static(document: dict[str, Any]) -> str:
    """A Vega-Lite specification with its data as SVG; its colours are legible on light and on dark pages."""
    import vl_convert

    config = {"font": FONT, "axis": SVG_AXIS, "legend": SVG_LEGEND, "view": {"stroke": None}}
    text: str = vl_convert.vegalite_to_svg(document | {"width": WIDTH, "background": None, "config": config})
    return text
