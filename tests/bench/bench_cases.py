"""Cases of the benchmark, the ways to measure them (the command and `run`), and peers that are wrong or raise."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmark measures torch tensors")
pytest.importorskip("typer", reason="the benchmark is a command")

import torch
import typer
from typer.testing import CliRunner

from onlinesoftmax.cli.bench import bench
from onlinesoftmax.lab.bench.cases import Case
from onlinesoftmax.lab.bench.measure import run
from onlinesoftmax.lab.bench.peers import Peer
from onlinesoftmax.lab.bench.result import CaseResult, Result
from onlinesoftmax.lab.bench.tables import Table, table_of

CPU = torch.device("cpu")
ON_CPU = ("--device", "cpu", "--repeat", "1")
SMALL = (*ON_CPU, "--shape", "4x8", "--dtype", "float32")
LOSS = Case("cross_entropy", (7, 65), 1, "float32")
ROWS = replace(LOSS, reduction="none")
TOKENS = Case("token_logprobs", (7, 65), 1, "float32")
WITH_TARGET = [
    LOSS, ROWS, TOKENS, replace(TOKENS, shape=(3, 17, 4)), *(
        replace(case, with_gradient=True) for case in (LOSS, ROWS, TOKENS, replace(LOSS, shape=(9,), dim=0))
    )
]  # fmt: skip
PLAIN = [Case(name, (7, 65), 1, "float32", with_gradient=True) for name in ("softmax", "log_softmax", "logsumexp")]
CASES = WITH_TARGET + PLAIN
needs_interpreter = pytest.mark.skipif(
    not importlib.util.find_spec("triton") or torch.cuda.is_available(),
    reason="runs the kernels on the CPU, in Triton's interpreter",
)


def name(case: Case) -> str:
    return f"{case.operation} {case}"


def results(case: Case, *everybody: Peer) -> list[Result]:
    (found,) = run([case], everybody, CPU, 1)
    return found.results


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
