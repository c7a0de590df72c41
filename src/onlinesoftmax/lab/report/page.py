"""The page: data, charts, styles and scripts in one HTML file that works offline."""

from __future__ import annotations

import base64
import gzip
import importlib.util
import json
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import cache
from importlib import resources
from typing import Any

from ... import __version__
from ...core.device import known
from ...core.options import SCORE_OPTIONS
from ...planner.measured import tuned_table
from ..bench.record_file import git_state
from ..bench.tables import measures
from . import charts
from .combinations import EVERY, LONGEST, STEP, STEPS, Choices
from .panels import series
from .plans import planned
from .records import Record

NEEDED = {"altair": "altair", "jinja2": "jinja2", "jsonschema": "jsonschema", "vl_convert": "vl-convert-python"}
"""Modules that a report needs, and their packages."""

SCRIPTS = ("charts.js", "results.js", "picker.js", "start.js")
"""Scripts of the page, in the order in which they run."""


def missing() -> list[str]:
    """The packages that a report needs and that are not installed."""
    return [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]


def page(
    records: Sequence[Record],
    choices: Choices,
    left_out: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> str:
    """The HTML of a report.

    Args:
        records: The records to show, the newest first; without any, the page has the picker alone.
        choices: The choices that the picker offers.
        left_out: A sentence for each file that is not shown.
        progress: Called with the number of combinations that are planned, and the number of all.

    Example:
        >>> few = Choices(["a100"], ["softmax"], [], ["float32"], [1], ["jax"])
        >>> page([], few).splitlines()[0]
        '<!DOCTYPE html>'
    """
    import jinja2

    shown = [series(record) for record in records]
    plans = planned(choices.combinations(), progress)
    plans["arguments"] = {name: _argument(name) for name in SCORE_OPTIONS}
    data = {"records": shown, "plans": plans, "specs": charts.specifications(), "colors": charts.strategy_colors()}
    templates = jinja2.Environment(
        loader=jinja2.FunctionLoader(_template), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    trusted: Any = templates.filters["safe"]
    return templates.get_template("page.html").render(
        version=__version__, commit=git_state()["commit"][:12], date=datetime.now(timezone.utc).date().isoformat(),
        records=shown, left_out=left_out,
        devices=_devices(shown), default=shown_first(records), step=STEP, steps=STEPS, every=EVERY, longest=LONGEST,
        own_tables=any(tuned_table(known(gpu)) for gpu in choices.gpus),
        css=trusted(_template("page.css")), data=_packed(data), library=trusted(_script(_library())),
        scripts=[trusted(_script(_template(name))) for name in SCRIPTS],
    )  # fmt: skip


@cache
def _library() -> str:
    """The program of the charts: Vega, Vega-Lite and Vega-Embed."""
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def _template(name: str) -> str:
    return resources.files(__package__).joinpath("templates").joinpath(name).read_text(encoding="utf-8")


def _script(text: str) -> str:
    """A script as it may stand inside an HTML element."""
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _packed(data: Any) -> str:
    """Data as compressed JSON in base64.  The same data give the same text."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _argument(option: str) -> str:
    """The argument of `onlinesoftmax explain` for a score option; SHAPE stands for the shape of the input."""
    declared = SCORE_OPTIONS[option]
    return f"--{option} 0.5" if declared.number else f"--{option}{' SHAPE' if declared.tensor else ''}"


def _devices(shown: Sequence[dict[str, Any]]) -> list[tuple[str, list[int]]]:
    """The machines, each with the places of its records."""
    found: dict[str, list[int]] = {}
    for place, record in enumerate(shown):
        found.setdefault(record["device"], []).append(place)
    return list(found.items())


def shown_first(records: Sequence[Record]) -> int | None:
    """The place of the record that is shown first; None without records.

    It has device times; of these, the most libraries, no forced backend, torch, the most cases, and is the newest.
    """

    def rank(place: int) -> tuple[bool, int, bool, bool, int, int]:
        record = records[place]
        options = record.content["options"]
        forced, in_jax = options.get("backend") is not None, options.get("framework") == "jax"
        libraries = {each.who for found in record.results for each in found.results if each.times}
        on_device = measures(record.content) == "device time"
        return on_device, len(libraries), not forced, not in_jax, len(record.results), -place

    return max(range(len(records)), key=rank, default=None)
