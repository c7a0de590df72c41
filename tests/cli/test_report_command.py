"""The command `report`: its page, its exit codes, and a sentence for each wrong argument."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from commands import run, run_json

pytest.importorskip("altair", reason="a report needs altair")
pytest.importorskip("jinja2", reason="a report needs jinja2")
pytest.importorskip("jsonschema", reason="a report needs jsonschema")
pytest.importorskip("vl_convert", reason="a report needs vl_convert")

SMALL = ("--framework", "jax", "--device", "a100", "--op", "softmax_backward", "--dtype", "float32", "--rows", "1")


@pytest.fixture(autouse=True)
def small_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of the charts takes seconds to bundle; test_browser.py runs it."""
    monkeypatch.setattr("onlinesoftmax.lab.report.page._library", lambda: "")


def test_without_results_the_page_has_the_picker_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("onlinesoftmax.lab.report.records.SHIPPED", tmp_path / "shipped")
    result = run("report", *SMALL)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("report.html: the picker alone: there are no records to show; ")
    assert "There are no records to show" in (tmp_path / "report.html").read_text()
    # An archive of the package has records of its own.
    (tmp_path / "shipped").mkdir()
    (tmp_path / "shipped" / "other.json").write_text("{}")
    assert "other.json is left out" in run("report", *SMALL).stdout


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
        (["--device", "h300"], "Error: unknown GPU 'h300'; there are: h200, "),
        (["--device", "cpu"], "Error: unknown GPU 'cpu'; there are: h200, "),
        (["--op", "softmin"], "Error: --op: unknown operation 'softmin'; there are: softmax, "),
        (["--dtype", "int8"], "Error: --dtype: unknown dtype 'int8'; there are: "),
        (["--framework", "mxnet"], "Error: --framework: unknown framework 'mxnet'; there are: torch, jax"),
        (["--rows", "0"], "Error: a number of rows must be at least 1, got 0"),
        (["--rows", str(10**20)], "Error: a number of rows must be less than 2^60, got 1"),
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


def make_outputs(folder: Path) -> None:
    """A record, links to it, and names that stand for no regular file."""
    (folder / "results").mkdir()
    record = folder / "results" / "record.json"
    record.write_text(json.dumps({"format": 0}))
    (folder / "link.html").symlink_to(record)
    (folder / "hard.html").hardlink_to(record)
    (folder / "null.html").symlink_to("/dev/null")
    (folder / "page.html").touch()
    (folder / "page.svg").symlink_to("page.html")
    os.mkfifo(folder / "fifo.html")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no fifos")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-o", "/dev/null"], "Error: --out /dev/null is a device; name a file\n"),
        (["-o", "null.html"], "Error: --out null.html is a device; name a file\n"),
        (["-o", "fifo.html"], "Error: --out fifo.html is a fifo; name a file\n"),
        (["--svg", "fifo.html"], "Error: --svg fifo.html is a fifo; name a file\n"),
        (["-o", "new/page.html"], "Error: --out new/page.html cannot be written: there is no folder new\n"),
        (
            ["-o", "results/record.json"],
            "Error: --out results/record.json would replace the record results/",
        ),
        (["-o", "link.html"], "Error: --out link.html would replace the record results/record.json"),
        (["-o", "hard.html"], "Error: --out hard.html would replace the record results/record.json"),
        (["--svg", "link.html"], "Error: --svg link.html would replace the record results/record.json"),
        (["-o", "new.html", "--svg", "./new.html"], "Error: --svg new.html is the file of the page"),
        (["-o", "page.html", "--svg", "page.svg"], "Error: --svg page.svg is the file of the page"),
    ],
)
def test_outputs_that_cannot_be_are_refused_before_the_work(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_outputs(tmp_path)
    monkeypatch.setattr("onlinesoftmax.lab.report.records.read", lambda paths: pytest.fail("it reads"))
    before = sorted(tmp_path.rglob("*"))
    result = run("report", "results", *arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith(sentence)
    assert sorted(tmp_path.rglob("*")) == before
    assert Path("/dev/null").is_char_device()
    assert json.loads((tmp_path / "results" / "record.json").read_text()) == {"format": 0}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no fifos")
def test_a_record_that_is_no_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.json")
    found = run_json("report", tmp_path, tmp_path / "none.json", "-o", tmp_path / "page.html", *SMALL, code=1)
    assert found["not_shown"] == [
        f"{tmp_path}/fifo.json is a fifo, not a file", f"{tmp_path}/none.json cannot be read: No such file or directory"
    ]  # fmt: skip


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
