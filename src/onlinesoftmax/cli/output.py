"""The output of the commands: tables for a terminal, aligned text for a pipe, JSON for a program, errors as sentences.

Results go to stdout; errors and progress go to stderr.  Text of files and devices is made printable.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import Any, NoReturn

from ..core.printable import printable
from ..core.units import duration, size
from ..core.whole_files import NotRegularError

__all__ = [
    "duration", "facts", "fail", "heading", "note", "print_json", "progress_of", "refusing", "size", "table",
    "warn", "writing",
]  # fmt: skip

STYLES = {
    "pass": "green",
    "usable": "green",
    "fail": "bold red",
    "not usable": "yellow",
    "interpreter only": "yellow",
    "skipped": "yellow",
}
"""Colour of a cell, by its text."""


def fail(sentence: object, code: int = 2) -> NoReturn:
    """Print one sentence to stderr and exit: 2 for bad input, 1 for a check that failed."""
    import typer

    print(f"Error: {_lines(sentence)}", file=sys.stderr)
    raise typer.Exit(code)


@contextmanager
def refusing(prefix: str = "", *errors: type[Exception]) -> Iterator[None]:
    """End the command with the sentence of a ValueError, or of one of these errors, that the block raises."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, (ValueError, *errors)):
            raise
        fail(f"{prefix}{error}")


def warn(sentence: object) -> None:
    """Print one sentence to stderr and go on."""
    print(f"Warning: {_lines(sentence)}", file=sys.stderr)


def _lines(text: object) -> str:
    """A text whose lines are printable."""
    return "\n".join(map(printable, str(text).split("\n")))


def heading(text: str, first: bool = False) -> None:
    """Print a title, after an empty line unless it comes first."""
    if not first:
        print()
    note(printable(text), style="bold")


def note(text: str, style: str | None = None) -> None:
    """Print a line of text, wrapped in a terminal."""
    text = _lines(text)
    if sys.stdout.isatty():
        _console().print(text, markup=False, style=style)
    else:
        print(text)


def facts(pairs: Sequence[tuple[str, str]]) -> None:
    """Print names and values, aligned."""
    if not sys.stdout.isatty():
        _print_aligned(pairs)
        return
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(_cell(f"  {name}"), _cell(value))
    _console().print(grid)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> None:
    """Print a table; the columns named in `right` are aligned to the right."""
    if not sys.stdout.isatty():
        _print_aligned([headers, *rows], [i for i, header in enumerate(headers) if header in right])
        return
    from rich import box
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for header in headers:
        # Only the last column, which holds the reasons, may wrap its lines; a minimum width keeps it visible.
        # A word that is longer than that column is cut into lines, so that a narrow terminal loses no text.
        last = header == headers[-1]
        drawn.add_column(
            _cell(header), justify="right" if header in right else "left", no_wrap=not last,
            overflow="fold" if last else "ellipsis", min_width=len(header) if last else None,
        )  # fmt: skip
    for row in rows:
        drawn.add_row(*map(_cell, row))
    _console().print(drawn)


def _cell(text: str) -> Any:
    """A cell of a table in a terminal, in the colour of its text."""
    from rich.text import Text

    return Text(printable(text), style=STYLES.get(text, ""))


def _print_aligned(lines: Sequence[Sequence[str]], right: Collection[int] = ()) -> None:
    """Print cells in columns; the columns at the places `right` are aligned to the right."""
    columns = []
    for i, column in enumerate(zip(*lines, strict=True)):
        cells = [printable(cell) if i else f"  {printable(cell)}" for cell in column]
        width = max(map(len, cells))
        columns.append([cell.rjust(width) if i in right else cell.ljust(width) for cell in cells])
    for line in zip(*columns, strict=True):
        print("  ".join(line).rstrip())


def print_json(document: Any) -> None:
    """Print one JSON document on stdout; inf and NaN, which JSON does not have, become null."""
    print(json.dumps(_plain(document), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@contextmanager
def writing(name: str) -> Iterator[None]:
    """End the command with a sentence if the block cannot write the file of this name."""
    try:
        yield
    except NotRegularError as error:
        fail(f"{name} {error.strerror}; name a file")
    except OSError as error:
        fail(f"{name} cannot be written: {error.strerror or error}")


@contextmanager
def progress_of(description: str, *, nbytes: bool = False) -> Iterator[Callable[..., None] | None]:
    """The function show(done, total, description) that moves a progress bar; None where stderr is no terminal.

    The bar stands on stderr with rate and remaining time, and is removed at the end.

    Args:
        description: The text before the bar, where `show` gets no other.
        nbytes: Show the amount as bytes and the rate as bytes per second.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress as rich
    from rich.console import Console

    amount = (rich.DownloadColumn(), rich.TransferSpeedColumn()) if nbytes else (rich.MofNCompleteColumn(),)
    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), *amount, rich.TimeRemainingColumn())
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=None)

        def show(done: int, total: int, description: str = description) -> None:
            bar.update(task, completed=done, total=total, description=description)

        yield show


def _console() -> Any:
    from rich.console import Console

    return Console(highlight=False)
