"""`onlinesoftmax tune`: measure which plans are fastest on this GPU, and give the planner the table."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from ..ops import OPERATIONS
from . import output
from .bench import torch_device
from .options import AS_JSON, BACKENDS, DTYPES, OUTPUTS, named, split_names
from .signals import interrupted_by_signals

if TYPE_CHECKING:
    from ..core.device import Device
    from ..lab.bench.tune_shapes import Shape
    from ..planner.measured import Table

WRITE_SECONDS = 5
"""Seconds between two writes of the file, so that a run that dies leaves what it has measured."""


def tune(
    quick: bool = typer.Option(False, "--quick", help="Six shapes instead of all: to see that it works."),
    op: list[str] = named(
        "operation", OPERATIONS, [], help="softmax, softmax_backward, logsumexp or one with a target; repeatable."
    ),
    outputs: str = named(
        "output",
        OUTPUTS,
        "",
        help="Measure calls with these outputs, as loss,y for a loss and its gradient.",
        commas=True,
    ),
    cols: list[int] = typer.Option([], min=1, help="Measure rows of this length of the grid; repeatable."),
    shape: list[str] = typer.Option([], help="Measure this shape instead of the grid's, as 8192x128256; repeatable."),
    dtype: list[str] = named("dtype", DTYPES, [], help="Measure this dtype: bfloat16 or float32; repeatable."),
    backend: list[str] = named(
        "backend", BACKENDS, [], help="cuda, triton or pallas; repeatable.  By default cuda and triton."
    ),
    minutes: float | None = typer.Option(None, min=0, help="Begin no shape after so many minutes; --resume continues."),
    device: str | None = typer.Option(None, help="cuda or cuda:1; the first GPU by default."),
    out: Path | None = typer.Option(None, "--out", "-o", help="Write this JSON file, and not the planner's."),
    commit: str | None = typer.Option(None, help="The commit to record, if the sources have no history."),
    resume: bool = typer.Option(False, "--resume", help="Keep what an interrupted run has left in the file."),
    replace: bool = typer.Option(
        False,
        "--replace",
        help="Measure again, and replace the times in the file; times of other shapes and backends stay.  Where there "
        "is no file yet, they replace those of the package's table of this GPU.",
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Time the proposals of every strategy over a grid of shapes, and keep the fast ones.

    The planner then interpolates between measured shapes instead of using its own estimates.  A run takes some
    minutes of the GPU, and all cores to compile; the shapes that matter most come first.  Tables of some GPUs come
    with the package; yours is read first.

    --op, --outputs, --cols, --shape and --dtype measure a part of the grid.  With --replace, the times of that part
    take the place of the old ones in a table.

    \b
    Examples:
      onlinesoftmax tune --minutes 10
      onlinesoftmax tune --op cross_entropy --outputs loss,y --shape 8192x128256 --replace
    """  # noqa: D301  \b is typer's mark for lines that it does not wrap
    from ..core.cache import cache_folder
    from ..lab.bench.tune import left_of
    from ..planner.measured import slug
    from ..torch.device import from_torch

    todo, some = _todo(quick, op, outputs, cols, shape, dtype)
    if resume and replace:
        output.fail("--resume keeps times that --replace measures again; leave one of them out")
    backends = _backends(backend)
    where = torch_device(device or "cuda")
    if where.type != "cuda":
        output.fail(f"--device {device}: only a GPU can be tuned for")
    machine = from_torch("cuda", where.index)
    file = TableFile(out or cache_folder() / f"{slug(machine.name)}.json", out is None)
    file.check_writable()
    begun = file.begun(machine.name) if resume or replace else None
    if replace and begun is None:
        begun = _planned_with(machine)
    if some and out is None and begun is None:
        output.fail(
            "a table of these shapes alone is too small to plan with; name a file for it with --out, or put their "
            "times into this GPU's table with --replace"
        )
    left = left_of(None if replace else begun, todo, backends)
    with interrupted_by_signals():
        table, count, refused = _measure(where, machine, left, minutes, commit, file, begun)
    _report(table, file.path, (count, not replace), refused, as_json)


def _todo(
    quick: bool, op: list[str], outputs: str, cols: list[int], shape: list[str], dtype: list[str]
) -> tuple[list[Shape], bool]:
    """(the shapes to measure, True where they are a part of the grid); ends the program where there are none."""
    from ..lab.bench.tune_shapes import Part, shapes
    from ..lab.names import parse_shape

    some = any([op, outputs, cols, shape, dtype])
    if quick and some:
        output.fail("--quick has six shapes of its own; leave --op, --outputs, --cols, --shape and --dtype out")
    if cols and shape:
        output.fail("--cols chooses shapes of the grid, which --shape replaces; leave one of them out")
    with output.refusing():
        sizes = [parse_shape(text) for text in shape]
        for text, size in zip(shape, sizes, strict=True):
            if len(size) != 2:
                output.fail(f"--shape {text}: rows and columns are measured, as in 8192x128256")
        part = Part(op, split_names(outputs), dtype, cols, [(size[0], size[1]) for size in sizes])
        return part.of(shapes(quick)), quick or some


def _backends(asked: list[str]) -> list[str]:
    """The backends to measure; ends the program where one that is asked for cannot be measured."""
    from ..lab.bench.tune import BACKENDS
    from ..lab.verify import unavailable

    if unknown := [name for name in asked if name not in BACKENDS]:
        output.fail(f"--backend {unknown[0]}: unknown; backends that can be tuned: {', '.join(BACKENDS)}")
    for name in asked or ["cuda"]:
        if reason := unavailable(name, "cuda"):
            output.fail(f"tune needs the {name} backend: {reason}")
    return list(dict.fromkeys(asked)) or ["cuda", *(() if unavailable("triton", "cuda") else ("triton",))]


class TableFile(NamedTuple):
    """The file of a table: one that --out names, or, if it is `own`, that of this GPU in the cache folder."""

    path: Path
    own: bool

    def begun(self, device: str) -> Table | None:
        """The table that is to be continued, if there is one."""
        from ..core.cache import UnusableError, parse_document, read_private
        from ..core.whole_files import read_regular
        from ..planner.measured import Table

        path, reason = self.path, None
        try:
            content = read_private(path.name) if self.own else read_regular(path)
            if content is None:
                return None
            table = parse_document(content, Table.checked)
        except FileNotFoundError:
            return None
        except OSError as error:
            reason = error.strerror
        except UnusableError as error:
            reason = str(error)
        if reason is not None:
            other = "name another file with --out, or leave --resume and --replace out"
            output.fail(f"{path} cannot be continued: {reason}; {other}")
        if table.device != device:
            output.fail(f"--resume: {path} is of {table.device}, and this is {device}; name another file with --out")
        if not table.every_variant:
            output.fail(f"--resume: {path} has one variant of each strategy; leave --resume out to measure all of them")
        return table

    def check_writable(self) -> None:
        """End the command before the first measurement if the table cannot be written."""
        from ..core import cache, whole_files

        with output.writing(self.name):
            cache.check_storable(self.path.name) if self.own else whole_files.check_writable(self.path)

    def write(self, table: Table) -> None:
        """Write the table."""
        from ..core import cache, whole_files

        content = as_text(table.as_json()).encode()
        with output.writing(self.name):
            cache.store_file(self.path.name, content) if self.own else whole_files.write_whole(self.path, content)

    @property
    def name(self) -> str:
        """The file in a sentence."""
        from ..core.cache import folder_origin

        return f"{self.path}{folder_origin()}" if self.own else f"--out {self.path}"


def _planned_with(machine: Device) -> Table | None:
    """The table of this GPU that the planner reads, mostly that of the package; None where there is none."""
    from ..planner.measured import table_for

    table = table_for(machine)
    return table if table and table.device == machine.name and table.every_variant else None


def _measure(
    where: Any, machine: Device, left: list[tuple[Shape, list[str]]], minutes: float | None, commit: str | None,
    file: TableFile, begun: Table | None,
) -> tuple[Table, int, dict[tuple[str, str, str], str]]:  # fmt: skip
    """(table, number of shapes that are left, reasons of refused proposals); the table is written as it grows."""
    from ..lab.bench.record_file import record
    from ..lab.bench.tune import begin, tune

    head = record(where, {}, {}, commit)
    table = begin(machine, f"commit {head['git']['commit']}, made {head['date']}", begun)
    refused: dict[tuple[str, str, str], str] = {}
    done, written, steps = 0, perf_counter(), tune(where, machine, left, table, minutes)
    with output.progress_of("measuring") as show:
        for done, (table, refused) in enumerate(steps, 1):  # noqa: B007  the last ones count
            if perf_counter() - written > WRITE_SECONDS:
                file.write(table)
                written = perf_counter()
            if show is not None:
                show(done, len(left))
    file.write(table)
    return table, len(left) - done, refused


def _report(
    table: Table, path: Path, left: tuple[int, bool], refused: dict[tuple[str, str, str], str], as_json: bool
) -> None:
    """Tell what was measured.

    Args:
        table: The table with the new times.
        path: The file of the table.
        left: (number of shapes that were not measured, True if --resume measures them).
        refused: Reason for each proposal that the compiler or the driver refused.
        as_json: Print one JSON document.
    """
    count, continued = left
    cells = [cell for found in table.cells.values() for cell in found]
    first = Counter(f"{cell.timings[0].backend}/{cell.timings[0].strategy}" for cell in cells if cell.timings)
    if as_json:
        output.print_json({
            "table": str(path), "device": table.device, "shapes": len(cells), "left": count, "fastest": dict(first),
            "refused": {" ".join(name): reason for name, reason in refused.items()},
        })  # fmt: skip
        return
    output.note(f"{table.device}: {len(cells)} shapes measured; fastest: ")
    output.table(("strategy", "shapes"), [(name, str(count)) for name, count in first.most_common()], ("shapes",))
    for name, reason in refused.items():
        output.note(f"refused by the compiler or the driver: {' '.join(name)}: {reason}")
    if count:
        output.note(f"{count} shapes are left" + (": tune --resume continues" if continued else ", with older times"))
    output.note(f"written to {path}")


def as_text(document: dict[str, Any]) -> str:
    """JSON with a line for every plan and for every shape."""
    plans = ",\n".join("  " + json.dumps(plan) for plan in document["plans"])
    cells = ",\n".join(json.dumps(cell, separators=(",", ":")) for cell in document["cells"])
    head = json.dumps({name: value for name, value in document.items() if name not in ("plans", "cells")}, indent=1)
    return f'{head[:-2]},\n "plans": [\n{plans}\n ],\n "cells": [\n{cells}\n]}}\n'
