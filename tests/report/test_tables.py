"""Tables, figures and measured numbers of README.md and docs are those of the records; one command writes them."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="records of sharded rows are read with torch")
pytest.importorskip("altair", reason="Altair draws the charts")
pytest.importorskip("vl_convert", reason="vl-convert makes SVG of charts")
pytest.importorskip("jsonschema", reason="a schema checks the records")

from onlinesoftmax.lab.bench.record_file import record_name

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"

pytestmark = pytest.mark.skipif(not RESULTS.is_dir(), reason="an sdist has no records")


@pytest.fixture(scope="module")
def tables() -> Any:
    """The names of benchmarks/tables.py, which is not part of the package."""
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))
    finally:
        sys.path.remove(folder)


@pytest.fixture(scope="module")
def records(tables: Any) -> Any:
    return tables["Records"](RESULTS)


def test_every_page_and_chart_is_that_of_the_records(tables: Any, records: Any) -> None:
    stale = [
        path.name for path, text in tables["generated"](records).items() if path.read_text(encoding="utf-8") != text
    ]
    assert not stale, "run: make tables"


def test_every_block_and_chart_is_used(tables: Any) -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert [name for name in tables["BLOCKS"] if f"<!-- generated: {name} -->" not in text] == []
    assert [name for name in tables["CHARTS"] if f"charts/{name}.svg" not in text] == []
    drawn = {path.stem for path in (ROOT / "docs" / "charts").iterdir()}
    assert drawn == set(tables["CHARTS"])


def test_a_record_has_the_name_of_its_device_and_suite(records: Any) -> None:
    names = {each.name.removesuffix(".json") for each in records}
    assert {"h200-forward", "h200-cross-entropy", "h200x2-distributed", "cpu"} <= names
    for each in records:
        assert each.name == record_name(each.content)


def test_a_new_record_changes_the_pages(tables: Any, tmp_path: Path) -> None:
    """A new run replaces one file; the pages then have its numbers and its commit."""
    shutil.copytree(RESULTS, tmp_path / "results")
    path = tmp_path / "results" / "h200-forward.json"
    content = json.loads(path.read_text())
    content["git"]["commit"] = "feedbeef"
    for case in content["cases"]:
        for result in case["results"]:
            if result["who"] == "ours":
                result["of_copy"] = 0.4321
    path.write_text(json.dumps(content))
    table = tables["BLOCKS"]["softmax_table"](tables["Records"](tmp_path / "results"))
    assert "**0.43**" in table
    assert "`h200-forward.json` (feedbee)" in table


def test_a_missing_record_is_said(tables: Any, tmp_path: Path) -> None:
    for name, block in tables["BLOCKS"].items():
        assert block(tables["Records"](tmp_path)), name


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<!-- generated: nothing -->\n<!-- end -->\n", "no function makes the block nothing"),
        ("<!-- generated: softmax_table -->\n", "1 markers"),
        ("<!-- end -->\n", "1 markers"),
    ],
)
def test_a_wrong_marker_is_an_error(tables: Any, records: Any, text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        tables["filled"](text, records)
