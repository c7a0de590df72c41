"""`onlinesoftmax tune`: measure which plans are fastest on this GPU, and give the planner the table."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer

from . import output
from .bench import torch_device

if TYPE_CHECKING:
    from ..planner.measured import Table

WRITE_SECONDS = 5
"""Seconds between two writes of the file, so that a run that dies leaves what it has measured."""


def tune(
    quick: bool = typer.Option(False, "--quick", help="Six shapes instead of all: to see that it works."),
    backend: list[str] = typer.Option(
        [], "--backend", help="Measure this backend: cuda, triton or pallas; repeatable.  By default cuda and triton."
    ),
    minutes: float | None = typer.Option(
        None, min=0, help="Begin no other shape after so many minutes; --resume continues the table."
    ),
    device: str | None = typer.Option(None, help="cuda or cuda:1; the first GPU by default."),
    out: Path | None = typer.Option(
        None, help="Write the table to this JSON file instead of the folder where the planner looks for it."
    ),
    commit: str | None = typer.Option(
        None, help="The commit to record, where the sources were copied without their history."
    ),
    resume: bool = typer.Option(False, "--resume", help="Keep what an interrupted run has left in the file."),
    as_json: bool = typer.Option(False, "--json", help="Print what was done as one JSON document."),
) -> None:
    """Time the proposals of every strategy over a grid of shapes, and keep the fast ones.

    The planner then interpolates between measured shapes instead of using its own estimates.  A run takes some
    minutes of the GPU, and all cores to compile; the shapes that matter most come first.  Tables of some GPUs come
    with the package; yours is read first.

    Example: onlinesoftmax tune --minutes 10
    """
    from ..core.cache import cache_folder
    from ..planner.measured import slug
    from ..torch.device import from_torch

    backends = _backends(backend)
    where = torch_device(device or "cuda")
    if where.type != "cuda":
        output.fail(f"--device {device}: only a GPU can be tuned for")
    machine = from_torch("cuda", where.index)
    if quick and out is None:
        output.fail("--quick makes a table that is too small to plan with; name a file for it with --out")
    path = out or cache_folder() / f"{slug(machine.name)}.json"
    if path.is_dir():
        output.fail(f"--out {path} is a folder; name a file")
    begun = _begun(path, machine.name) if resume else None
    table, left, refused = _measure(_Run(where, machine, tuple(backends), minutes, quick), commit, path, begun)
    _report(table, path, left, refused, as_json)


def _backends(asked: list[str]) -> list[str]:
    """The backends to measure; ends the program where one that is asked for cannot be measured."""
    from ..bench.tune import BACKENDS, unavailable

    for name in asked:
        if name not in BACKENDS:
            output.fail(f"--backend {name}: unknown; backends that can be tuned: {', '.join(BACKENDS)}")
    for name in asked or ["cuda"]:
        if reason := unavailable(name):
            output.fail(f"tune needs the {name} backend: {reason}")
    return list(dict.fromkeys(asked)) or ["cuda", *(() if unavailable("triton") else ("triton",))]


def _begun(path: Path, device: str) -> Table | None:
    """The table that is to be continued, if there is one."""
    from ..planner.measured import Table

    if not path.exists():
        return None
    try:
        table = Table.from_json(json.loads(path.read_text(encoding="utf-8")))
        # Cells are made when they are looked up: a damaged one is to be found here.
        list(table.cells.values())
    except (OSError, ValueError, LookupError, TypeError):
        output.fail(f"--resume: {path} is no table of tune; name another file with --out, or leave --resume out")
    if table.device != device:
        output.fail(f"--resume: {path} is of {table.device}, and this is {device}; name another file with --out")
    if not table.every_variant:
        output.fail(f"--resume: {path} has one variant of each strategy; leave --resume out to measure all of them")
    return table


class _Run:
    """The shapes to measure, the device, and the time limit."""

    def __init__(self, where: Any, machine: Any, backends: tuple[str, ...], minutes: float | None, quick: bool) -> None:
        self.where, self.machine, self.backends, self.minutes, self.quick = where, machine, backends, minutes, quick


def _measure(
    run: _Run, commit: str | None, path: Path, begun: Table | None
) -> tuple[Table, int, dict[tuple[str, str, str], str]]:
    """(table, number of shapes that are left, reasons of refused proposals); the table is written as it grows."""
    from ..bench.grid import shapes
    from ..bench.record import record
    from ..bench.tune import begin, left_of, tune

    head = record(run.where, {}, {}, commit)
    table = begin(run.machine, f"commit {head['git']['commit']}, made {head['date']}", begun)
    todo = shapes(run.quick)
    refused: dict[tuple[str, str, str], str] = {}
    total = len(left_of(table, todo, run.backends))
    written = perf_counter()
    with output.progress_bar() as bar:
        task = bar.add_task("measuring", total=total) if bar else None
        steps = tune(run.where, run.machine, todo, table, run.backends, run.minutes)
        for done, (table, refused) in enumerate(steps, 1):  # noqa: B007  the last ones count
            if perf_counter() - written > WRITE_SECONDS:
                _write(path, table)
                written = perf_counter()
            if bar and task is not None:
                bar.update(task, completed=done)
    _write(path, table)
    return table, len(left_of(table, todo, run.backends)), refused


def _report(table: Table, path: Path, left: int, refused: dict[tuple[str, str, str], str], as_json: bool) -> None:
    cells = [cell for found in table.cells.values() for cell in found]
    first = Counter(f"{cell.timings[0].backend}/{cell.timings[0].strategy}" for cell in cells if cell.timings)
    if as_json:
        output.print_json(
            {
                "table": str(path), "device": table.device, "shapes": len(cells), "left": left, "fastest": dict(first),
                "refused": {" ".join(name): reason for name, reason in refused.items()},
            }
        )  # fmt: skip
        return
    output.note(f"{table.device}: {len(cells)} shapes measured; fastest: ")
    output.table(("strategy", "shapes"), [(name, str(count)) for name, count in first.most_common()], ("shapes",))
    for name, reason in refused.items():
        output.note(f"refused by the compiler or the driver: {' '.join(name)}: {reason}")
    if left:
        output.note(f"{left} shapes are left: tune --resume continues")
    output.note(f"written to {path}")


def _write(path: Path, table: Table) -> None:
    from ..core.cache import write_whole

    try:
        write_whole(path, as_text(table.as_json()).encode())
    except OSError as error:
        output.fail(f"{path} cannot be written: {error.strerror or error}")


def as_text(document: dict[str, Any]) -> str:
    """JSON with a line for every plan and for every shape."""
    plans = ",\n".join("  " + json.dumps(plan) for plan in document["plans"])
    cells = ",\n".join(json.dumps(cell, separators=(",", ":")) for cell in document["cells"])
    head = json.dumps({name: value for name, value in document.items() if name not in ("plans", "cells")}, indent=1)
    return f'{head[:-2]},\n "plans": [\n{plans}\n ],\n "cells": [\n{cells}\n]}}\n'
