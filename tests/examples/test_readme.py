"""README.md is correct: its Python code prints the output shown, and its commands and their options exist."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="the README shows commands, which need typer")

import typer.testing

from onlinesoftmax.cli import build

# All of them, because one process then runs the code of the README, once.
pytestmark = pytest.mark.early

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
COMMANDS = [
    line.removeprefix("$ ")
    for language, text in BLOCKS
    if language in ("console", "bash")
    for line in text.splitlines()
    if line.removeprefix("$ ").startswith("onlinesoftmax ")
]
QUICK = ("doctor", "apply")
"""Commands that the test runs as shown.  For other commands, it checks that --help lists every option used."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which all Python blocks of the README ran in order and printed the output shown."""
    folder = tmp_path_factory.mktemp("readme")
    scope: dict[str, Any] = {"__name__": "readme"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for (language, text), (following, output) in zip(BLOCKS, [*BLOCKS[1:], ("", "")], strict=True):
            if language == "python":
                with contextlib.redirect_stdout(io.StringIO()) as printed:
                    exec(compile(text, "README.md", "exec"), scope)
                assert printed.getvalue() == (output if following == "text" else ""), text
    return folder


def test_python_prints_the_output_shown(folder: Path) -> None:
    assert (folder / "probabilities.npy").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_exist_with_their_options(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    _, name, *arguments = shlex.split(command, comments=True)
    words = [name, *(arguments if name in QUICK else ["--help"])]
    shown = typer.testing.CliRunner().invoke(build(), words, env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    if name in QUICK:
        return
    for option in (argument.partition("=")[0] for argument in arguments if argument.startswith("--")):
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", shown.output), f"{name} has no option {option}"


def test_every_command_is_shown() -> None:
    assert {shlex.split(command)[1] for command in COMMANDS} >= {
        "doctor",
        "verify",
        "explain",
        "bench",
        "tune",
        "apply",
        "report",
        "cache",
    }
