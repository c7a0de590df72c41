"""The chart of a record as SVG, and the one that the README shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("altair", reason="Altair draws the charts")
pytest.importorskip("vl_convert", reason="vl-convert makes SVG of charts")
pytest.importorskip("jsonschema", reason="a schema checks the records")

from onlinesoftmax.report.headline import headline
from onlinesoftmax.report.records import read

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "results" / "h200-5dfdd37-softmax.json"


def test_the_chart_of_the_readme_is_that_of_its_record() -> None:
    """Onlinesoftmax report benchmarks/results/h200-5dfdd37-softmax.json --svg docs/softmax-h200.svg."""
    (record,), _, _ = read([RECORD])
    assert headline(record) == (ROOT / "docs" / "softmax-h200.svg").read_text(encoding="utf-8")
    assert "docs/softmax-h200.svg" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_chart_shows_the_libraries_of_its_record() -> None:
    (record,), _, _ = read([RECORD])
    svg = headline(record)
    for name in ("ours", "torch", "liger", "copy", "row length", "GB/s"):
        assert f">{name}<" in svg
    assert ">quack<" not in svg


def test_a_record_without_measured_cases_has_no_chart() -> None:
    (record,), _, _ = read([RECORD])
    with pytest.raises(ValueError, match="has no case that was measured"):
        headline(replace(record, results=[]))
