"""Interrupted runs: a record is complete after every case, and --resume keeps its cases or names what differs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmark measures torch tensors")


from bench_cases import SMALL, Wrong, call

from onlinesoftmax.lab.bench import libraries, measure
from onlinesoftmax.lab.bench.cases import Case
from onlinesoftmax.lab.bench.record_file import Recording, ResumeError
from onlinesoftmax.lab.bench.result import CaseResult

THREE = (*SMALL, "--op", "softmax", "--op", "log_softmax", "--op", "logsumexp")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations that are measured from here on."""
    found: list[str] = []
    timed = measure.measure_begun

    def counted(case: Case, *rest: Any) -> CaseResult:
        found.append(case.operation)
        return timed(case, *rest)

    monkeypatch.setattr(measure, "measure_begun", counted)
    return found


def interrupt_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """End the next run of the benchmark by an interruption before it measures another case."""
    whole = measure.run

    def some(*arguments: Any) -> Iterator[CaseResult]:
        for done, found in enumerate(whole(*arguments)):
            if done == count:
                raise KeyboardInterrupt
            yield found

    monkeypatch.setattr(measure, "run", some)


def test_an_interrupted_run_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[str]) -> None:
    path = tmp_path / "r.json"
    with monkeypatch.context() as patch:
        interrupt_after(2, patch)
        done = call(*THREE, "--out", str(path), "--resume")
    assert done.exit_code == 130
    assert "interrupted after 2 of 3 cases" in done.stderr
    assert "--resume continues" in done.stderr
    before = json.loads(path.read_text())
    assert [case["operation"] for case in before["cases"]] == ["softmax", "log_softmax"]
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]
    measured.clear()
    done = call(*THREE, "--out", str(path), "--resume", "--json")
    assert done.exit_code == 0, done.output
    assert measured == ["logsumexp"]
    after = json.loads(path.read_text())
    assert json.loads(done.stdout) == after
    assert after["cases"][:2] == before["cases"]
    assert [case["operation"] for case in after["cases"]] == ["softmax", "log_softmax", "logsumexp"]
    assert (after["date"], len(after["resumed"])) == (before["date"], 1)


def test_a_complete_record_is_shown_again(tmp_path: Path, measured: list[str]) -> None:
    arguments = (*SMALL, "--out", str(tmp_path / "r.json"), "--resume")
    assert call(*arguments).exit_code == 0
    measured.clear()
    again = call(*arguments)
    assert (again.exit_code, measured) == (0, [])
    assert "ours eager/row" in again.stdout


def test_a_wrong_result_that_is_kept_fails_the_command_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(libraries.PEERS, "wrong", Wrong)
    arguments = (*SMALL, "--peers", "wrong", "--out", str(tmp_path / "r.json"), "--resume")
    assert [call(*arguments).exit_code for _ in range(2)] == [1, 1]


def test_a_skipped_case_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[str]) -> None:
    arguments = (*SMALL, "--out", str(tmp_path / "r.json"), "--resume")
    with monkeypatch.context() as patch:
        patch.setattr(measure, "lacks_memory", lambda *_: "no room")
        assert "skipped: no room" in call(*arguments).stdout
    assert call(*arguments).exit_code == 0
    assert measured == ["softmax"]


@pytest.mark.parametrize(
    ("place", "value", "field"),
    [
        ("git.commit", "abc", 'field git.commit: the file has "abc", and this run has'),
        ("git.sources", "abc", 'field git.sources: the file has "abc"'),
        ("versions.torch", "1.0", 'field versions.torch: the file has "1.0"'),
        ("device.processor", "abacus", 'field device.processor: the file has "abacus"'),
        ("options.repeat", 9, "field options.repeat: the file has 9, and this run has 1"),
        ("options.peers", "torch,liger", "field options.peers"),
        ("absent", {"quack": "x"}, 'field absent.quack: the file has "x", and this run has nothing'),
        ("format", 2, "field format: the file has 2, and this run has 1"),
        ("measures", "host time", "field measures"),
        ("cases.0.shape", 3, "field cases[0]: "),
        ("cases.0.results", None, "field cases[0]: "),
    ],
)
def test_a_record_of_another_run_is_named_with_its_field(place: str, value: Any, field: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    assert call(*SMALL, "--out", str(path)).exit_code == 0
    content = spot = json.loads(path.read_text())
    *way, last = (int(part) if part.isdigit() else part for part in place.split("."))
    for part in way:
        spot = spot[part]
    spot[last] = value
    path.write_text(json.dumps(content))
    done = call(*SMALL, "--out", str(path), "--resume")
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"Error: --resume: {path}: ")
    assert field in line
    assert json.loads(path.read_text()) == content


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        ("[1]", "it is no record"),
        ('{"a": 1}', "it is no record"),
    ],
)
def test_a_file_that_is_no_record_is_not_overwritten(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    done = call(*SMALL, "--out", str(path), "--resume")
    assert (done.exit_code, path.read_text()) == (2, text)
    assert reason in done.stderr


def test_the_load_of_the_machine_and_the_file_name_may_differ() -> None:
    """Nothing is left to measure here, so the continued record has the one date of the old one."""
    old = {"date": "1", "device": {"load": 1.0}, "options": {"out": "a.json", "as_json": True}, "cases": []}
    new = Recording({"date": "2", "device": {"load": 2.0}, "options": {"out": "b.json", "as_json": False}}, [])
    new.resume(old)
    assert new.content["date"] == "1"
    assert "resumed" not in new.content
    with pytest.raises(ResumeError, match="field device: "):
        Recording({"date": "2", "device": None, "options": {}}, []).resume(old)


class Terminal:
    """Stderr as a terminal, which keeps what is written."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return True


def test_progress_goes_to_a_terminal_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from onlinesoftmax.cli import build

    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    build()(["bench", *SMALL, "--json"], standalone_mode=False)
    assert "softmax 4x8 float32" in terminal.text
    assert len(json.loads(capsys.readouterr().out)["cases"]) == 1
    monkeypatch.undo()
    build()(["bench", *SMALL, "--json"], standalone_mode=False)
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no fifos")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--out", "fifo.json"], "Error: --out fifo.json is a fifo; name a file\n"),
        (["--out", "null.json"], "Error: --out null.json is a device; name a file\n"),
        (["--out", "new/r.json"], "Error: --out new/r.json cannot be written: there is no folder new\n"),
        (["--resume", "--out", "fifo.json"], "Error: --resume: fifo.json: it is a fifo; leave --resume out "),
    ],
)
def test_a_file_that_cannot_be_written_is_known_before_the_first_case(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo.json")
    Path("null.json").symlink_to("/dev/null")
    monkeypatch.setattr("onlinesoftmax.lab.bench.measure.run", lambda *_: pytest.fail("it measures"))
    result = call(*SMALL, "--peers", "torch", *arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith(sentence)
    assert {path.name for path in tmp_path.iterdir()} == {"fifo.json", "null.json"}
    assert Path("/dev/null").is_char_device()
