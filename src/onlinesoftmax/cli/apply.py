"""`onlinesoftmax apply`: the operations on files of any size, in bounded memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from ..core.printable import printable
from ..lab.names import parse_bytes
from ..ops import FORWARD, OPERATIONS
from . import output
from .options import AS_JSON, DTYPES, named
from .sharded import joining, processes
from .signals import interrupted_by_signals

if TYPE_CHECKING:
    from ..files.apply import Report

OF_FILES = tuple(name for name in FORWARD if not OPERATIONS[name].has_target)
"""Names of the operations that need no other tensor beside the rows."""


def apply(
    source: str = typer.Argument(metavar="IN", help="A .npy or .safetensors file, of any size."),
    target: str = typer.Argument(metavar="OUT", help="The file to write, with the same suffix; it may be IN itself."),
    dim: int = typer.Option(-1, help="The softmax dimension; negative counts from the end."),
    op: str = named("operation", OF_FILES, "softmax", help=f"The operation: {', '.join(OF_FILES)}."),
    dtype: str | None = named("dtype", DTYPES, help=f"Dtype of OUT: {', '.join(DTYPES)}; by default the dtype of IN."),
    memory: str = typer.Option("16MiB", help="Working memory, as 64MiB or 1.5GiB."),
    tensor: list[str] | None = typer.Option(None, help="A tensor of a .safetensors file; repeatable.  By default all."),
    as_json: bool = AS_JSON,
) -> None:
    """Apply an operation to a file of any size, in bounded memory.

    OUT is written completely or not at all: after an error, Ctrl-C or SIGTERM no file is new or changed.  A file that
    is replaced keeps its permissions; of a link, the file behind it is replaced.

    Under torchrun, the processes share the work: each reads a part of IN and writes a region of OUT.

    \b
    Example:
      onlinesoftmax apply logits.npy probabilities.npy --dim -1 --memory 64MiB
      torchrun --nproc-per-node 4 --no-python onlinesoftmax apply logits.npy probabilities.npy
    """  # noqa: D301  \b is typer's mark for lines that it does not wrap
    with output.refusing():
        size = parse_bytes(memory)
    with interrupted_by_signals(), _process_group() as group:
        request = {"axis": dim, "operation": op, "dtype": dtype, "chunk_bytes": size, "tensors": tensor or None}
        report = _run(source, target, {**request, "group": group})
    if group is not None and int(os.environ["RANK"]):
        return  # Process 0 reports for all.
    if as_json:
        output.print_json({"source": source, "target": target, "operation": op, "dim": dim, **asdict(report)})
    else:
        output.note(_summary(target, op, report))


@contextmanager
def _process_group() -> Iterator[Any]:
    """The group of the processes that torchrun has started; None where there is one process."""
    if processes() < 2:
        yield None
        return
    import torch.distributed as dist

    with joining():
        dist.init_process_group("gloo")
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def _run(source: str, target: str, request: dict[str, Any]) -> Report:
    from ..files.apply import apply_file
    from ..files.disk import FileError

    shown = output.progress_of(request["operation"], nbytes=True)
    try:
        with shown if os.environ.get("RANK", "0") == "0" else nullcontext() as show:
            return apply_file(source, target, progress=show, **request)
    except FileError as error:
        output.fail(error)
    except KeyboardInterrupt:
        print(f"Interrupted: {printable(target)} was not written.", file=sys.stderr)
        raise typer.Exit(130) from None


def _summary(target: str, op: str, report: Report) -> str:
    count = f"{report.tensors} tensor{'' if report.tensors == 1 else 's'}"
    read, written = output.size(report.bytes_read), output.size(report.bytes_written)
    rate = output.size((report.bytes_read + report.bytes_written) / max(report.seconds, 1e-9))
    return (
        f"{target}: {op} of {count}, {report.elements:,} elements; "
        f"{read} read, {written} written in {output.duration(report.seconds * 1e6)} ({rate}/s)"
    )
