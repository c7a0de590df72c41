"""Records: what the report reads, and the sentence for each file that it cannot show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_records import TIMES, record

pytest.importorskip("altair", reason="Altair draws the charts")
pytest.importorskip("jsonschema", reason="the records are checked with jsonschema")

from onlinesoftmax.lab.bench.result import CaseResult
from onlinesoftmax.lab.bench.tables import SHARDED_TIME
from onlinesoftmax.lab.report.charts import LIBRARIES
from onlinesoftmax.lab.report.page import shown_first
from onlinesoftmax.lab.report.panels import series
from onlinesoftmax.lab.report.records import read

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SHARDED = sorted(RESULTS.glob("*-distributed.json"))


def write(folder: Path, content: Any, name: str = "r.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_record_has_the_table_of_bench(tmp_path: Path) -> None:
    [found], wrong, others = read([write(tmp_path, record())])
    assert wrong == others == []
    header, rows = found.table.header, found.table.rows
    assert header == ("shape", "dtype", "who", "time us", "GB/s", "of copy", "vs torch", "analysis")
    assert rows[0] == ("4096x1024", "bfloat16", "ours cuda/row", "50.0", "3900", "98%", "2.00x", "at the floor")
    assert "WRONG: off by 3" in rows[2]
    assert "cannot run: no such dtype" in rows[3]
    assert rows[-2][-1] == "skipped: too large"
    assert rows[-1][-1] == "absent: quack is not installed"
    facts = dict(found.facts)
    assert facts["machine"] == "NVIDIA H200"
    assert "torch 2.13.0" in facts["versions"]
    assert "jax" not in facts["versions"]
    assert facts["commit"] == "0123456789abcdef, without changes"


def test_a_result_survives_its_record() -> None:
    for case in record()["cases"]:
        again = CaseResult.of(case).as_dict()
        for name, value in case.items():
            if name not in ("results", "bytes"):
                assert again[name] == value
        for old, new in zip(case["results"], again["results"], strict=True):
            if old["plan"]:
                # The variant belongs to the planner that made the record.
                old["plan"]["variant"] = ""
            assert new == old


def test_the_chart_has_every_measure(tmp_path: Path) -> None:
    [found], _, _ = read([write(tmp_path, record())])
    shown = series(found)
    [panel] = shown["panels"]
    assert panel["title"] == "softmax, bfloat16"
    ours = next(point for point in panel["points"] if point["who"] == "ours" and point["cols"] == 1024)
    assert (ours["gbps"], ours["ratio"], ours["us"], ours["error"], ours["mb"]) == (3900, 0.975, 50, 1e-3, 0.000512)
    assert {point["who"] for point in panel["points"]} == {"copy", "ours", "torch"}
    # Both libraries have the same times in this record.
    assert panel["outcome"] == (
        "Ours is the fastest in 2 of 2 cases. In the median it has 1.00 times the speed of PyTorch, 0.97 of a copy."
    )


def test_a_line_joins_one_aligned_case_of_each_length(tmp_path: Path) -> None:
    content = record()
    several = [content["cases"][0] | {"shape": shape} for shape in ([64, 1024], [4096, 1024], [4096, 1025])]
    several.append(several[0] | {"shape": [64, 1024, 4096], "dim": 1})
    [found], _, _ = read([write(tmp_path, content | {"cases": several})])
    joined = [point["shape"] for point in series(found)["panels"][0]["points"] if point["joined"]]
    assert {*joined} == {"4096x1024"}


def changed(path: str, value: Any) -> Any:
    """A record with another value in one place, or without it."""
    content = place = record()
    *way, last = (int(part) if part.isdigit() else part for part in path.split("."))
    for part in way:
        place = place[part]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return content


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[" * 100_000, "r.json is no record: it is nested too deeply"),
        ("{", "r.json is no JSON: line 1, column 2: Expecting property name enclosed in double quotes"),
        ("[1]", "r.json: [1] is not of type 'object'"),
        ({"cells": []}, "r.json: 'format' is a required property"),
        (changed("format", 2), "r.json: field format: this version of onlinesoftmax reads 1, and the file has 2"),
        (changed("date", 3), "r.json: field date: 3 is not of type 'string'"),
        (changed("git", None), "r.json: 'git' is a required property"),
        (changed("cases.1.shape", "4x4"), "r.json: field cases[1].shape: '4x4' is not of type 'array'"),
        (changed("cases.0.results.1.times.median_us", "fast"),
         "r.json: field cases[0].results[1].times.median_us: 'fast' is not of type 'number'"),
        (changed("cases.0.results.0.who", None), "r.json: field cases[0].results[0]: 'who' is a required property"),
        (changed("cases.1.operation", "softmin"), "r.json: field cases[1]: unknown operation 'softmin'; there are: "),
        (changed("cases.1.dim", 7), "r.json: field cases[1]: dim 7 is out of range"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_shown_is_named_with_its_field(tmp_path: Path, content: Any, sentence: str) -> None:
    good = write(tmp_path, record(), "good.json")
    records, wrong, others = read([write(tmp_path, content), good])
    assert [found.name for found in records] == ["good.json"]
    assert others == []
    assert len(wrong) == 1
    assert sentence in wrong[0]
    assert str(tmp_path) in wrong[0]


def test_a_missing_file_and_one_in_another_encoding_are_sentences(tmp_path: Path) -> None:
    (tmp_path / "latin.json").write_bytes('{"a": "é"}'.encode("latin-1"))
    _, wrong, _ = read([tmp_path / "none.json", tmp_path / "latin.json"])
    assert wrong == [
        f"{tmp_path}/none.json cannot be read: No such file or directory",
        f"{tmp_path}/latin.json is no text in UTF-8",
    ]


def test_a_folder_may_hold_other_json(tmp_path: Path) -> None:
    other = write(tmp_path, {"cells": []}, "other.json")
    write(tmp_path, record(), "good.json")
    records, wrong, others = read([tmp_path])
    assert len(records) == 1
    assert wrong == []
    assert others == [f"{other} is left out: it is no record of onlinesoftmax bench."]


def test_times_of_calls_are_a_table_and_no_chart(tmp_path: Path) -> None:
    content = {name: value for name, value in record().items() if name != "host"} | {"measures": "host time"}
    content["cases"] = content["cases"][:1]
    nothing = {"times": None, "gbps": None, "of_copy": None, "state": ""}
    times = {"plain": TIMES, "bare launch": TIMES | {"median_us": 4.25}}
    for result in content["cases"][0]["results"]:
        result |= nothing | {"calls": times if result["status"] == "ok" else {}}
    [found], wrong, _ = read([write(tmp_path, content)])
    assert wrong == []
    shown = series(found)
    assert shown["panels"] == []
    assert shown["label"].startswith("host time: softmax (")
    assert shown["header"][3:] == ("who", "plain", "bare launch", "notes")
    assert shown["rows"][0][3:] == ("ours cuda/row", "50.0 us", "4.2 us", "at the floor")
    assert shown["rows"][2][-1] == "WRONG: off by 3"
    assert shown["numbers"] == ("plain", "bare launch")
    assert any(note.startswith("bare launch: ") for note in shown["notes"])


def test_the_utilisation_and_the_sentences_are_shown_where_they_are_recorded(tmp_path: Path) -> None:
    content = record()
    content["options"]["suite"] = "rows1024"
    content["cases"][0] |= {"overhead_us": 4.0}
    content["cases"][0]["results"][0] |= {"utilisation": 0.91}
    [found], _, _ = read([write(tmp_path, content)])
    header, rows = found.table.header, found.table.rows
    assert [row[header.index("of GPU")] for row in rows[:2]] == ["91%", ""]
    assert found.table.below[0].startswith("A large copy on this GPU has 4270 GB/s (")
    assert "98% of a copy of the same size and 91% of a large copy's bandwidth.  A call" in found.table.below[1]
    # A suite that is gone has no sentences.
    content["options"]["suite"] = "full"
    [found], _, _ = read([write(tmp_path, content)])
    assert not any("of a copy of the same size" in line for line in found.table.below)


@pytest.mark.parametrize("measures", ["mood", 3])
def test_an_unknown_kind_of_measurement_is_named(measures: Any, tmp_path: Path) -> None:
    _, [sentence], _ = read([write(tmp_path, record() | {"measures": measures})])
    assert "r.json: field measures: " in sentence


def test_the_record_with_most_libraries_is_shown_first(tmp_path: Path) -> None:
    newest, small, large = record(date="2026-01-04T00:00:00+00:00"), record(date="2026-01-03T00:00:00+00:00"), record()
    newest["options"] = {"framework": "jax"}
    small["cases"] = small["cases"][:1]
    forced = record(date="2026-01-05T00:00:00+00:00") | {"note": "of older blocks"}
    forced["options"] = {"backend": "triton"}
    alone = record(date="2026-01-06T00:00:00+00:00")
    alone["cases"] = [case | {"results": case["results"][:1]} for case in 4 * alone["cases"]]
    made = {"newest": newest, "small": small, "large": large, "forced": forced, "alone": alone}
    for name, content in made.items():
        write(tmp_path, content, f"{name}.json")
    records, _, _ = read([tmp_path])
    chosen = shown_first(records)
    assert chosen is not None
    assert records[chosen].name == "large.json"
    assert shown_first([]) is None
    [found] = [series(one) for one in records if one.name == "forced.json"]
    assert "(triton alone, " in found["label"]
    assert found["notes"][-1] == "of older blocks"


def test_cases_of_whole_steps_stand_below_each_other(tmp_path: Path) -> None:
    step = {"operation": "linear_cross_entropy", "shape": [64, 32, 1000], "dim": 2, "layers": 2, "copy": None}
    content = record() | {"measures": "step time"}
    content["cases"] = [case | step for case in content["cases"][:1]]
    for result in content["cases"][0]["results"]:
        result |= {"of_copy": None, "plan": None}
    content["cases"][0]["results"][1]["times"]["median_us"] = 75.0
    [found], _, _ = read([write(tmp_path, content)])
    [panel] = series(found)["panels"]
    assert panel["listed"]
    assert {point["shape"] for point in panel["points"]} == {"64x32 -> 1000, 2 layers"}
    assert panel["outcome"].endswith("In the median it has 1.50 times the speed of PyTorch.")


@pytest.mark.parametrize("path", SHARDED, ids=lambda path: path.name)
def test_a_record_of_sharded_rows_is_shown(path: Path) -> None:
    (shown_record,), wrong, others = read([path])
    assert not wrong
    assert not others
    shown = series(shown_record)
    assert shown["header"] == ("operation", "shape", "dtype", "who", *SHARDED_TIME, "analysis")
    points = [point for panel in shown["panels"] for point in panel["points"]]
    assert {point["who"] for point in points} <= set(LIBRARIES)
    panel = next(panel for panel in shown["panels"] if "with gradient" in panel["title"])
    ours = next(point for point in panel["points"] if point["who"] == "ours")
    found = next(each for each in shown_record.sharded if str(each.case) == ours["shape"])
    times = next(result.times for result in found.results if result.who == "ours")
    assert times is not None
    assert found.copy is not None
    assert found.all_reduce is not None
    assert any(f"{found.processes} processes" in note for note in shown["notes"])
    # The gradient is counted beside the logits, so a call that takes as long as the copy has its speed.
    assert ours["ratio"] == pytest.approx(found.copy.median_us / times.median_us, rel=0.01)


def test_a_sharded_case_is_read_as_it_was_written() -> None:
    records, _, _ = read(SHARDED[:1])
    for found in (each for one in records for each in one.sharded):
        assert CaseResult.of(found.as_dict(), measures="sharded time") == found
