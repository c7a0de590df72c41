"""Runs `onlinesoftmax bench` in this process; peers that are wrong or raise."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmark measures torch tensors")
pytest.importorskip("typer", reason="the benchmark is a command")

import torch
import typer
from typer.testing import CliRunner

from onlinesoftmax.cli.bench import bench
from onlinesoftmax.lab.bench.cases import Case
from onlinesoftmax.lab.bench.peers import Peer
from onlinesoftmax.lab.bench.result import CaseResult
from onlinesoftmax.lab.bench.tables import Table, table_of

SMALL = ("--device", "cpu", "--shape", "4x8", "--dtype", "float32", "--repeat", "1")


def call(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(bench)
    return CliRunner().invoke(app, list(arguments))


def table(*results: CaseResult, absent: dict[str, str] | None = None, measures: str = "device time") -> Table:
    """The table of these results in a record."""
    content = {
        "absent": absent or {}, "measures": measures, "options": {}, "cases": [], "date": "today",
        "device": {"name": "CPU", "kind": "cpu"}, "versions": {"torch": "2"}, "git": {"commit": "0", "dirty": False},
    }  # fmt: skip
    return table_of(results, content)


class Wrong(Peer):
    """Right but for one element in the last row, as a kernel with a bad mask would be."""

    name = "wrong"

    def prepare(self, case: Case) -> Any:
        def function(x: torch.Tensor) -> torch.Tensor:
            y = torch.softmax(x, case.dim)
            y.view(-1)[-1] = 0.5
            return y

        return function


class Raises(Peer):
    """A peer that says by raising that it cannot."""

    name = "raises"

    def prepare(self, case: Case) -> Any:
        def function(x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("N must be a multiple of 8\nand more")

        return function
