"""The chart of one record as an SVG file, for the README: speed over the row length."""

from __future__ import annotations

from typing import Any

from .charts import GREY, measured
from .records import Record
from .series import series

WIDTH, HEIGHT = 720, 300
"""Pixels of the chart without its axes."""

FONT = "system-ui, sans-serif"


def headline(record: Record) -> str:
    """The first panel of a record as SVG; its colours are legible on light and on dark pages.

    Raises:
        ValueError: the record has no case that was measured.
    """
    import vl_convert

    panels = series(record)["panels"]
    if not panels:
        raise ValueError(f"{record.name} has no case that was measured")
    # Unaligned and strided rows, which no line joins, are for the page.
    points = [point for point in panels[0]["points"] if point["joined"]]
    svg: str = vl_convert.vegalite_to_svg(_specification(points))
    return svg


def _specification(points: list[dict[str, Any]]) -> dict[str, Any]:
    """The chart with its data, of a fixed size."""
    document = measured("gbps")
    here = {point["who"] for point in points if point["gbps"] is not None}
    for parameter in document["params"]:
        if parameter["name"] == "shown":
            parameter["value"] = [who for who in parameter["value"] if who in here]
    legend = {"labelColor": GREY, "columns": len(here)}
    axis = {"labelColor": GREY, "titleColor": GREY, "domainColor": GREY, "tickColor": GREY, "gridColor": f"{GREY}40"}
    return document | {
        "width": WIDTH,
        "height": HEIGHT,
        "background": None,
        "datasets": {"points": points},
        "config": {"font": FONT, "axis": axis, "legend": legend, "view": {"stroke": None}},
    }
