"""README.md is correct: its Python code prints the output shown, and its commands and their options exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the README shows commands, which need typer")

import typer.testing

import onlinesoftmax
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


def run(code: str, folder: Path) -> str:
    """Run code in a fresh interpreter, which must succeed, and return its standard output."""
    # The README describes ordinary use, without Triton's interpreter.
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(Path(onlinesoftmax.__file__).parents[1]), "COLUMNS": "200", "PYTHONIOENCODING": "utf-8"}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, encoding="utf-8", check=False
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which all Python blocks of the README ran in order and printed the output shown."""
    folder = tmp_path_factory.mktemp("readme")
    script, shown, mark = [], [], "-- end of block --"
    for (language, text), (following, output) in zip(BLOCKS, [*BLOCKS[1:], ("", "")], strict=True):
        if language == "python":
            script.append(f"{text}\nprint({mark!r})\n")
            shown.append(output if following == "text" else "")
    printed = run("\n".join(script), folder).split(f"{mark}\n")[:-1]
    assert printed == shown
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
