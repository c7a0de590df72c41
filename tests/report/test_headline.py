"""The chart of a record as SVG."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("altair", reason="Altair draws the charts")
pytest.importorskip("vl_convert", reason="vl-convert makes SVG of charts")
pytest.importorskip("jsonschema", reason="a schema checks the records")

from made_records import record

from onlinesoftmax.lab.report.charts import NAMES
from onlinesoftmax.lab.report.headline import headline, points_of, svg
from onlinesoftmax.lab.report.records import read

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "results" / "h200-forward.json"

pytestmark = pytest.mark.skipif(not RECORD.exists(), reason="an sdist has no records")


def test_a_chart_shows_the_libraries_of_its_record() -> None:
    (found,), _, _ = read([RECORD])
    svg = headline(found)
    here = {result.who for each in found.results for result in each.results if result.times}
    for name in (*(NAMES.get(who, who) for who in here), "copy (dashed)", "row length", "GB/s"):
        assert f">{name}<" in svg
    assert all(f">{NAMES[who]}<" not in svg for who in {*NAMES} - here)


def test_a_chart_of_one_length_has_an_axis_around_it() -> None:
    """The axis of a single length would have no width otherwise, and the labels of all powers of two on one place."""
    axis = svg([{"who": "ours", "cols": 128256, "rows": 1, "shape": "1x128256", "gbps": 1.0, "joined": True}])
    assert ">128 Ki<" in axis
    assert ">1 Gi<" not in axis


def test_points_of_several_records_have_one_copy_and_every_library(tmp_path: Path) -> None:
    made = [record(), record(date="2026-01-01T00:00:00+00:00")]
    for case in made[1]["cases"]:
        for result in case["results"]:
            result["who"] = result["who"].replace("torch", "quack")
    for i, content in enumerate(made):
        (tmp_path / f"{i}.json").write_text(json.dumps(content))
    records, _, _ = read([tmp_path])
    points = points_of(records, "softmax, bfloat16")
    keys = [(point["shape"], point["who"]) for point in points]
    assert len(set(keys)) == len(keys)
    assert {who for _, who in keys} == {"ours", "torch", "quack", "copy"}
    assert (points[0]["who"], points[-1]["who"]) == ("copy", "ours")


def test_a_record_without_measured_cases_has_no_chart() -> None:
    (found,), _, _ = read([RECORD])
    with pytest.raises(ValueError, match="has no case that was measured"):
        headline(replace(found, results=[]))
