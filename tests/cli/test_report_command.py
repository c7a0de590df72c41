"""The command `report`: its page, its exit codes, and a sentence for each wrong argument."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from commands import run, run_json

pytest.importorskip("altair", reason="a report needs altair")
pytest.importorskip("jinja2", reason="a report needs jinja2")
pytest.importorskip("jsonschema", reason="a report needs jsonschema")
pytest.importorskip("vl_convert", reason="a report needs vl_convert")

SMALL = ("--framework", "jax", "--gpu", "a100", "--op", "softmax_backward", "--dtype", "float32", "--rows", "1")


def test_without_results_the_page_has_the_picker_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("report", *SMALL)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("report.html: the picker alone: there are no records to show; ")
    assert "There are no records to show" in (tmp_path / "report.html").read_text()


def test_a_broken_file_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "old.json").write_text(json.dumps({"format": 0}))
    out = tmp_path / "page.html"
    found = run_json("report", tmp_path, "-o", out, *SMALL, code=1)
    assert found["records"] == []
    assert found["bytes"] == out.stat().st_size
    first, second = found["not_shown"]
    assert "broken.json is no JSON: line 1" in first
    assert "old.json: field format: this version of onlinesoftmax reads 1, and the file has 0" in second
    assert f"Warning: {first}" in run("report", tmp_path, "-o", out, *SMALL).stderr


def test_by_default_the_records_of_the_checkout_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "other.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    result = run("report", *SMALL)
    assert result.exit_code == 0, result.output
    assert "other.json is left out: it is no record of onlinesoftmax bench." in result.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpu", "h300"], "Error: unknown GPU 'h300'; there are: h200, "),
        (["--op", "softmin"], "Error: unknown operation 'softmin'; there are: softmax, "),
        (["--dtype", "int8"], "Error: unknown dtype 'int8'; there are: "),
        (["--framework", "mxnet"], "Error: unknown framework 'mxnet'; there are: torch, jax"),
        (["--rows", "0"], "Error: a number of rows must be at least 1, got 0"),
        (["-o", "."], "Error: --out . is a folder; name a file"),
    ],
)
def test_wrong_arguments_are_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("report", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(sentence)
    assert result.stderr.count("\n") == 1
    assert not [*tmp_path.iterdir()]


def test_a_page_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run("report", "-o", tmp_path / "file" / "page.html", *SMALL)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: --out {tmp_path}/file/page.html cannot be written: ")


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "altair", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "altair" else name)
    result = run("report", "-o", tmp_path / "page.html")
    assert result.exit_code == 2
    assert result.stderr == "Error: report needs altair: pip install 'onlinesoftmax[report]'\n"
