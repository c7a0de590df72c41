"""Charts of records as SVG files, for README.md and the documentation: a measure over the row length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .charts import GREY, LIBRARIES, measured
from .records import Record
from .series import COPY, ends, joined, series

WIDTH, HEIGHT = 560, 280
"""Pixels of the chart without its axes; texts of a wider chart could not be read on a phone."""

AXIS = {
    "labelColor": GREY, "titleColor": GREY, "domainColor": GREY, "tickColor": GREY, "gridColor": f"{GREY}40",
    "labelFontSize": 12, "titleFontSize": 13, "titleFontWeight": "normal", "titlePadding": 10, "labelSeparation": 12,
}  # fmt: skip
"""Axes of a chart as SVG; a browser's font may be wider than the one with which the room for labels is computed."""

LEGEND = {"labelColor": GREY, "labelFontSize": 13, "symbolSize": 100, "columnPadding": 24}
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


def svg(points: Sequence[dict[str, Any]], measure: str = "gbps", height: int = HEIGHT) -> str:
    """A measure of these points over the row length, as SVG of a fixed size."""
    document = measured(measure)
    here = {point["who"] for point in points if point.get(measure) is not None}
    given = ends(points) | {"shown": [who for who in LIBRARIES if who in here]}
    for parameter in document["params"]:
        if parameter["name"] in given:
            parameter["value"] = given[parameter["name"]]
    for layer in document["layer"]:
        if "legend" in layer["encoding"].get("color", {}):
            layer["encoding"]["color"]["legend"]["columns"] = len(here)
    return static(document | {"height": height, "datasets": {"points": list(points)}})


def static(document: dict[str, Any]) -> str:
    """A Vega-Lite specification with its data as SVG; its colours are legible on light and on dark pages."""
    import vl_convert

    config = {"font": FONT, "axis": AXIS, "legend": LEGEND, "view": {"stroke": None}}
    text: str = vl_convert.vegalite_to_svg(document | {"width": WIDTH, "background": None, "config": config})
    return text
