"""Runs commands for the tests, in this process or in a fresh one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("typer", reason="the command line needs typer")
pytest.importorskip("rich", reason="the command line needs rich")

import typer.main
import typer.testing

import onlinesoftmax
from onlinesoftmax.cli import build
from onlinesoftmax.kernels.registry import module_missing

needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
needs_nvrtc = pytest.mark.skipif(module_missing("cuda.core", "cuda") is not None, reason="cuda.core is not installed")
needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
NOT_PLAIN = set("\x1b─━│┃┏╭")


@cache
def _application() -> Any:
    """All commands, with their options: they take longer to make than most take to run."""
    return typer.main.get_command(build())


def run(*arguments: object) -> Any:
    """Run a command in this process, where stdout and stderr are no terminals."""
    with mock.patch.object(typer.testing, "_get_command", return_value=_application()):
        return typer.testing.CliRunner().invoke(typer.Typer(), [str(argument) for argument in arguments])


def run_json(*arguments: object, code: int = 0) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def run_apart(*arguments: str, code: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run in a fresh process as a user does, without the interpreter that conftest.py turns on."""
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    source = str(Path(onlinesoftmax.__file__).parents[1])
    program = ["-m", "onlinesoftmax"] if code is None else ["-c", code]
    return subprocess.run(
        [sys.executable, *program, *arguments],
        env={**inherited, "PYTHONPATH": source, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
