"""Cases with a target or with a gradient through autograd, and the two ways to measure them: a command and `run`."""

from __future__ import annotations

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
from onlinesoftmax.lab.bench.peers import Peer
from onlinesoftmax.lab.bench.result import Result
from onlinesoftmax.lab.bench.run import run

CPU = torch.device("cpu")
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


def name(case: Case) -> str:
    return f"{case.operation} {case}"


def call(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(bench)
    return CliRunner().invoke(app, ["--device", "cpu", "--repeat", "1", *arguments])


def results(case: Case, *everybody: Peer) -> list[Result]:
    (found,) = run([case], everybody, CPU, 1)
    return found.results
