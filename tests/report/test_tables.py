"""Tables, charts and measured numbers of README.md and docs are those of the records; one command writes them."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch", reason="records of sharded rows are read with torch")
pytest.importorskip("altair", reason="Altair draws the charts")
pytest.importorskip("vl_convert", reason="vl-convert makes SVG of charts")
pytest.importorskip("jsonschema", reason="a schema checks the records")

from made_records import record

from onlinesoftmax.lab.bench.heads.cases import HeadCase
from onlinesoftmax.lab.bench.record_file import record_name
from onlinesoftmax.lab.bench.result import CaseResult, Result
from onlinesoftmax.lab.bench.sampling.cases import TokenCase
from onlinesoftmax.lab.bench.timing import Times
from onlinesoftmax.lab.report.charts import LIBRARIES, headline, svg
from onlinesoftmax.lab.report.panels import NAMES, series
from onlinesoftmax.lab.report.records import read

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
RECORD = RESULTS / "h200-forward.json"

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
def recorded() -> Any:
    return read([RESULTS])


@pytest.fixture(scope="module")
def records(tables: Any, recorded: Any) -> Any:
    # A schema checks every value, which takes long.
    with mock.patch.object(sys.modules["pages.records"], "read", return_value=recorded):
        return tables["Records"](RESULTS)


def test_every_page_and_chart_is_that_of_the_records(tables: Any, records: Any) -> None:
    stale = [
        path.name for path, text in tables["generated"](records).items() if path.read_text(encoding="utf-8") != text
    ]
    assert not stale, "run: make tables"


def test_every_recorded_run_is_read(recorded: Any) -> None:
    records, wrong, others = recorded
    assert wrong == []
    assert len(records) + len(others) == len([*RESULTS.glob("*.json")])
    dates = [found.content["date"] for found in records]
    assert dates == sorted(dates, reverse=True)
    for found in records:
        # Times of calls are shown as tables only.
        shown = series(found)
        assert shown["panels"] or found.content["measures"] in ("host time", "first calls"), found.name
        assert all(panel["outcome"].split("the median it has")[1:] for panel in shown["panels"]), found.name
        assert {point["who"] for panel in shown["panels"] for point in panel["points"]} <= {*LIBRARIES}, found.name
        assert found.table.above
        assert found.table.rows


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
    """A table has the numbers and the commit of its record."""
    content = json.loads(RECORD.read_text())
    content["git"]["commit"] = "feedbeef"
    for case in content["cases"]:
        for result in case["results"]:
            if result["who"] == "ours":
                result["of_copy"] = 0.4321
    (tmp_path / RECORD.name).write_text(json.dumps(content))
    table = tables["BLOCKS"]["softmax_table"](tables["Records"](tmp_path))
    assert "**0.43**" in table
    assert "`h200-forward.json` (feedbee)" in table


def test_a_record_of_heads_fills_its_table(tables: Any, tmp_path: Path) -> None:
    """Without a column for a library that no head was timed by."""
    case, times = HeadCase("linear_cross_entropy", (8192, 4096, 128256), 2, "bfloat16"), Times(36000.0, 35.0, 37.0, 7)
    ours = Result("ours", "ok", error=3e-3, times=times, of_products=1.024, extra_bytes=2_101_346_304)
    found = CaseResult(
        case, results=[ours, Result("liger", "refused", "no")], measures="head time", three_products=times,
        four_products=times,
    )  # fmt: skip
    content = record() | {"measures": "head time", "cases": [found.as_dict()]}
    (tmp_path / "h100-linear-cross-entropy.json").write_text(json.dumps(content))
    lines = tables["BLOCKS"]["linear_cross_entropy_table"](tables["Records"](tmp_path)).splitlines()
    assert lines[0] == "| tokens × hidden → classes | three products | ours |"
    shown = "| 8192\u00a0×\u00a04096 → 128256 | 36000 µs | **1.02,\u00a02.1\u00a0GB** |"
    assert lines[2] == shown


def test_a_record_of_tokens_fills_its_table(tables: Any, tmp_path: Path) -> None:
    """FlashInfer runs one of the cases, and XLA none of them."""

    def measured(asked: str, logits: str, us: float) -> CaseResult:
        case = TokenCase("sample", (64, 128256), 1, "float32", logits=logits, asked=asked)
        ours = Result("ours", "ok", error=1e-7, times=Times(us, us, us, 7), of_read=us / 20)
        theirs = [Result(who, "refused", "no") for who in ("flashinfer", "jax")]
        if asked == "top-p 0.9":
            theirs[0] = Result("flashinfer", "ok", error=1e-7, times=Times(45.0, 45.0, 45.0, 7), of_read=2.25)
        return CaseResult(case, results=[ours, *theirs], measures="token time", one_read=Times(20.0, 20.0, 20.0, 7))

    cases = ("top-k 50", "normal", 26.0), ("top-k 50", "zipf", 31.0), ("top-p 0.9", "normal", 40.0)
    content = record() | {"measures": "token time", "cases": [measured(*case).as_dict() for case in cases]}
    (tmp_path / "h100-sampling.json").write_text(json.dumps(content))
    lines = tables["BLOCKS"]["sampling_table"](tables["Records"](tmp_path)).splitlines()
    assert lines[0] == "| rows × tokens |  | one read | ours | FlashInfer, probabilities |"
    assert lines[2] == "| 64\u00a0×\u00a0128256 | top-k 50 | 20.0 | **26.0\u00a0to\u00a031.0** | cannot run |"
    assert lines[3] == "| 64\u00a0×\u00a0128256 | top-p 0.9 | 20.0 | **40.0** | 45.0 |"


def test_a_record_of_drafts_fills_its_table(tables: Any, tmp_path: Path) -> None:
    case = TokenCase("verify", (64, 5, 128256), 2, "float32", asked="top-p 0.9")
    results = [
        Result(who, "ok", error=1e-7, times=Times(us, us, us, 7), of_read=us / 100)
        for who, us in (("ours", 150.0), ("torch", 9000.0))
    ]
    found = CaseResult(case, results=results, measures="token time", one_read=Times(100.0, 100.0, 100.0, 7))
    content = record() | {"measures": "token time", "cases": [found.as_dict()]}
    (tmp_path / "h100-verify.json").write_text(json.dumps(content))
    lines = tables["BLOCKS"]["verify_table"](tables["Records"](tmp_path)).splitlines()
    assert lines[0] == "| rows × (drafts + 1) × tokens |  | one read | ours | PyTorch |"
    assert lines[2] == "| 64\u00a0×\u00a05\u00a0×\u00a0128256 | top-p 0.9 | 100 | **150** | 9000 |"


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


def test_a_chart_shows_the_libraries_of_its_record(records: Any) -> None:
    found = records.get(RECORD.stem)
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


def test_points_of_several_records_have_one_copy_and_every_library(tables: Any, tmp_path: Path) -> None:
    made = [record(), record(date="2026-01-01T00:00:00+00:00")]
    for case in made[1]["cases"]:
        for result in case["results"]:
            result["who"] = result["who"].replace("torch", "quack")
    for i, content in enumerate(made):
        (tmp_path / f"{i}.json").write_text(json.dumps(content))
    records, _, _ = read([tmp_path])
    points = sys.modules["pages.charts"].points_of(records, "softmax, bfloat16")
    keys = [(point["shape"], point["who"]) for point in points]
    assert len(set(keys)) == len(keys)
    assert {who for _, who in keys} == {"ours", "torch", "quack", "copy"}
    assert (points[0]["who"], points[-1]["who"]) == ("copy", "ours")


def test_a_record_without_measured_cases_has_no_chart(records: Any) -> None:
    found = records.get(RECORD.stem)
    with pytest.raises(ValueError, match="has no case that was measured"):
        headline(replace(found, results=[]))
