"""examples/demo.py: its results on digits and on a file are right, and a wrong result or command fails it."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

for name in ("sklearn", "torch", "typer"):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"the demo needs {name}", allow_module_level=True)


def test_the_probabilities_of_digits_are_right(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.classify_digits() == []
    assert "State, merged over 3 shards" in capsys.readouterr().out


def test_the_rows_of_a_file_are_right(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "FILE_ROWS", 101)
    monkeypatch.setattr(example, "FILE_COLS", 4096)
    assert example.apply_to_a_file() == []


def test_a_command_that_fails_is_named(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    failed = ["onlinesoftmax nonsense: exit code 2"]
    assert example.commands(("It works", "--version"), ("It fails", "nonsense")) == failed
    assert "== It works" in capsys.readouterr().out


def test_every_part_is_run_and_a_wrong_one_counts(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(example, "classify_digits", list)
    monkeypatch.setattr(example, "apply_to_a_file", lambda: ["a row differs"])
    monkeypatch.setattr(example, "commands", lambda *titled: ran.extend(each[1] for each in titled) or [])
    assert example.main() == 1
    assert ran == ["doctor", "verify", "verify", "explain", "bench"]
