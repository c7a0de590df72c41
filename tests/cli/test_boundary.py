"""Streams that are closed or full, errors of the system and text that a terminal would obey: one sentence for each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run

import onlinesoftmax
from onlinesoftmax.cli import boundary, output
from onlinesoftmax.core.printable import printable

COMMAND = f"{sys.executable} -m onlinesoftmax"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the shell is that of Unix")


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of bash with the command line as $O; the cache folder is new."""
    env = {
        **os.environ, "O": COMMAND, "PYTHONPATH": str(Path(onlinesoftmax.__file__).parents[1]),
        "ONLINESOFTMAX_CACHE": str(folder / "cache"),
    }  # fmt: skip
    return subprocess.run(["bash", "-c", line], env=env, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("line", "code", "error"),
    [
        ("$O cache >/dev/full", 1, "Error: stdout cannot be written: No space left on device\n"),
        ("$O cache --json >&-", 1, "Error: stdout is closed, and the results are written to it\n"),
        ("$O --help >/dev/full", 1, "Error: stdout cannot be written: No space left on device\n"),
        ("$O cache > >(exec <&-; sleep 1)", 1, "Error: stdout cannot be written: Broken pipe\n"),
        ("$O explain 1y2 2>&-", 2, ""),
        ("$O cache <&- 2>&-", 0, ""),
        ("O_LONG=$(printf 'a%.0s' {1..300}); ONLINESOFTMAX_CACHE=/$O_LONG $O cache 2>&1 >/dev/null | wc -l", 0, ""),
        ("ulimit -v 60000; $O cache", 1, None),
    ],
)  # fmt: skip
def test_streams_and_memory(line: str, code: int, error: str | None, tmp_path: Path) -> None:
    result = shell(line, tmp_path)
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    if error is not None:
        assert result.stderr == error


@pytest.mark.parametrize(
    ("error", "words", "code"),
    [
        (MemoryError("Unable to allocate 8.00 GiB for an array"), "too little memory: Unable to allocate 8.00 GiB", 1),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "there is too little memory: ", 1),
        (ImportError("libc10.so: failed to map segment from shared object"), "there is too little memory: libc10", 1),
        (OSError(12, "Cannot allocate memory"), "there is too little memory: ", 1),
        (OSError(2, "No such file or directory", "out of memory.json"), "Error: out of memory.json: No such file", 2),
        (OSError(2, "there is no folder out of memory"), "Error: there is no folder out of memory", 1),
        (OSError("the plugin is out of memory"), "there is too little memory: the plugin", 1),
        (OSError(36, "File name too long", "a" * 300), f"{'a' * 300}: File name too long", 2),
        (PermissionError(13, "Permission denied", b"folder\xff"), "folder\\udcff: Permission denied", 2),
        (ValueError("embedded null byte"), "no file can have a name with a NUL in it", 2),
        (ImportError("cannot import name 'x'"), "a package cannot be imported: cannot import name 'x'", 1),
        (KeyError("x\x1b[2J"), "This is a fault of onlinesoftmax.", 1),
        (KeyboardInterrupt(), "interrupted", 130),
        (SystemExit("a text\nof two lines"), "Error: a text", 1),
        (SystemExit(0.0), "Error: 0.0", 1),
    ],
)
def test_an_error_is_one_line(error: BaseException, words: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        sys.stdout.write("half of a result")
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boundary, "_open_streams", lambda: None)
        assert boundary.guarded(command) == code
    said = capsys.readouterr().err
    assert words in said
    assert (said.count("\n"), "\x1b" in said) == (1, False)


@pytest.mark.parametrize(("code", "returned"), [(None, 0), (0, 0), (3, 3), (True, 1)])
def test_an_exit_with_a_number_says_nothing(code: object, returned: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boundary, "_open_streams", lambda: None)
        assert boundary.guarded(lambda: sys.exit(code)) == returned  # type: ignore[arg-type]  any object is allowed
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("argument", ["a\0b.npy", "\ud800.npy", "a" * 300 + ".npy", "folder/" * 999 + "x.npy"])
def test_names_that_no_file_has(argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in ((argument, "y.npy"), ("x.npy", argument)):
        result = run("apply", *arguments)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.exception
    result = run("report", argument, "-o", argument, "--device", "h300")
    assert (result.exit_code, type(result.exception)) == (2, SystemExit)
    assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may search every folder")
def test_a_folder_that_may_not_be_searched(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    result = run("apply", closed / "x.npy", tmp_path / "y.npy")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


def test_printable_keeps_what_can_be_printed() -> None:
    assert printable("naïve 日本 😀 'x'") == "naïve 日本 😀 'x'"
    wrong = "\x00\x07\x1b]0;x\x07\x9b2J\x7f\r\n\u202e\u2028\ud800\U000e0041"
    assert printable(wrong).isprintable()
    assert printable(wrong).isascii()
    assert printable(printable(wrong)) == printable(wrong)


def test_no_text_of_a_file_is_obeyed_by_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = "x\x1b]0;title\x07\x9b2J"
    output.heading(wrong)
    output.note(wrong)
    output.facts([(wrong, wrong)])
    output.table((wrong,), [(wrong,)])
    output.warn(wrong)
    shown = capsys.readouterr()
    assert {*"\x1b\x07\x9b"} & {*shown.out, *shown.err} == set()
    header = json.dumps({wrong: {"dtype": "I32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path = tmp_path / "names.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    for more in ([], ["--tensor", "none"]):
        result = run("apply", path, tmp_path / "y.safetensors", *more)
        assert result.exit_code == 2
        assert "title" in result.stderr
        assert {*"\x1b\x07\x9b"} & {*result.output} == set()
