"""`onlinesoftmax tune`: measure which plan is fastest on this GPU, and let the planner know."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Any

import typer

from . import output
from .bench import torch_device


def tune(
    quick: bool = typer.Option(False, "--quick", help="Six shapes instead of all: to see that it works."),
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
    """Time every proposal of the CUDA strategies over a grid of shapes, and keep the fastest of each.

    The planner then takes the times of the nearest shape instead of its own estimates.  Takes some minutes of the
    GPU, and all cores to compile.  Tables of some GPUs come with the package; yours is read first.

    Example: onlinesoftmax tune
    """
    from ..core.cache import cache_folder
    from ..kernels import registry
    from ..planner import measured as tuning
    from ..torch.device import from_torch

    if reason := registry.unavailable("cuda"):
        output.fail(f"tune needs the cuda backend: {reason}")
    where = torch_device(device or "cuda")
    if where.type != "cuda":
        output.fail(f"--device {device}: only a GPU can be tuned for")
    machine = from_torch("cuda", where.index)
    if quick and out is None:
        output.fail("--quick makes a table that is too small to plan with; name a file for it with --out")
    path = out or cache_folder() / f"{tuning.slug(machine.name)}.json"
    if path.is_dir():
        output.fail(f"--out {path} is a folder; name a file")
    begun = _begun(path, machine.name) if resume else None
    table = _measure(where, machine, quick, commit, path, begun)
    cells = [cell for found in table.cells.values() for cell in found]
    first = Counter(cell.timings[0].strategy for cell in cells)
    if as_json:
        output.print_json({"table": str(path), "device": machine.name, "shapes": len(cells), "fastest": dict(first)})
        return
    output.note(f"{machine.name}: {len(cells)} shapes measured; fastest: ")
    output.table(("strategy", "shapes"), [(name, str(count)) for name, count in first.most_common()], ("shapes",))
    output.note(f"written to {path}")


def _begun(path: Path, device: str) -> Any:
    """The table that is there to be continued, if there is one."""
    from ..planner.measured import Table

    if not path.exists():
        return None
    try:
        table = Table.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        output.fail(f"--resume: {path} is no table of tune; name another file with --out, or leave --resume out")
    if table.device != device:
        output.fail(f"--resume: {path} is of {table.device}, and this is {device}; name another file with --out")
    return table


def _measure(where: Any, machine: Any, quick: bool, commit: str | None, path: Path, begun: Any) -> Any:
    from dataclasses import replace

    from ..bench import report
    from ..bench.tune import shapes, tune
    from ..planner.measured import Table

    record = report.record(where, {}, {}, commit)
    source = f"commit {record['git']['commit']}, made {record['date']}"
    if begun is None:
        begun = Table(machine.name, source, machine.bandwidth, {})
    elif begun.source != source:
        begun = replace(begun, source=f"{begun.source}; {source}")
    todo = shapes(quick)
    table = begun
    written = perf_counter()
    with output.progress_bar() as bar:
        task = bar.add_task("measuring", total=len(todo)) if bar else None
        for table in tune(where, machine, todo, begun):
            # A run that dies leaves what it had.
            if perf_counter() - written > 5:
                _write(path, table)
                written = perf_counter()
            if bar and task is not None:
                bar.update(task, completed=sum(map(len, table.cells.values())))
    _write(path, table)
    return table


def _write(path: Path, table: Any) -> None:
    from ..core.cache import write_whole

    try:
        write_whole(path, _as_text(table.as_json()).encode())
    except OSError as error:
        output.fail(f"{path} cannot be written: {error.strerror or error}")


def _as_text(document: dict[str, Any]) -> str:
    """JSON with a line for every shape."""
    cells = ",\n".join(json.dumps(cell, separators=(",", ":")) for cell in document.pop("cells"))
    head = json.dumps(document, indent=1)
    return f'{head[:-2]},\n "cells": [\n{cells}\n]}}\n'
