"""`onlinesoftmax cache`: the folder of compiled kernels and measured tables, its size, and the way to empty it."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import typer

from . import output
from .options import AS_JSON

if TYPE_CHECKING:
    from pathlib import Path

    from ..core.cache_size import Item

KINDS = {"kernel": "kernels", "table": "tables", "answers": "answers", "part": "unfinished"}
"""Names of the kinds of files that are ours."""


def cache(
    clear: bool = typer.Option(False, "--clear", help="Delete kernels, answers and tables; what is not ours stays."),
    as_json: bool = AS_JSON,
) -> None:
    """Show the cache folder, or empty it.

    The folder is $ONLINESOFTMAX_CACHE, or onlinesoftmax in the user's cache folder.  It holds compiled kernels, the
    answers that report has computed, and the tables of tune.  When kernels and answers have more bytes than
    $ONLINESOFTMAX_CACHE_MAXSIZE (by default 1G; a number of bytes, or with K, M or G as in 500M), those that were used
    longest ago are deleted; tables stay.

    A kernel that is deleted is compiled again when it is needed.  A table takes minutes of the GPU to make again.

    \b
    Examples:
      onlinesoftmax cache
      onlinesoftmax cache --clear
    """  # noqa: D301  \b is typer's mark for lines that it does not wrap
    from ..core import cache_size
    from ..core.cache import cache_folder, folder_origin

    folder = cache_folder()
    try:
        limit = cache_size.parse_size(os.environ.get(cache_size.VARIABLE) or str(cache_size.DEFAULT_LIMIT))
        removed = cache_size.clear(folder) if clear else []
        found = cache_size.contents(folder)
        tables = (item.path.name for item in found if item.kind == "table")
        unused = {name: reason for name in tables if (reason := _unused(name))}
    except ValueError as error:
        output.fail(error)
    except OSError as error:
        output.fail(f"{error.filename or folder}{folder_origin()}: {error.strerror or error}", 1)
    if as_json:
        output.print_json(_document(folder, limit, found, unused, removed))
    elif clear:
        stay = f"; {_summary(found)} stay: they are not ours, or are being written" if found else ""
        output.note(f"{folder}: {_summary(removed)} deleted{stay}")
    else:
        _print(folder, limit, found, unused)


def _unused(table: str) -> str | None:
    """The reason why the planner does not read the table of this name."""
    from ..core.cache import UnusableError, parse_document, read_private
    from ..planner.measured import Table

    try:
        parse_document(read_private(table) or b"", Table.checked)
    except UnusableError as error:
        return str(error)
    return None


def _document(
    folder: Path, limit: int, found: list[Item], unused: dict[str, str], removed: list[Item]
) -> dict[str, Any]:
    counts = Counter(item.kind for item in found)
    return {
        "folder": str(folder),
        "bytes": sum(item.nbytes for item in found if item.kind in KINDS),
        "limit": limit,
        **{name: counts[kind] for kind, name in KINDS.items()},
        "others": counts["other"],
        "not_used": unused,
        "removed": {"files": len(removed), "bytes": sum(item.nbytes for item in removed)},
    }


def _print(folder: Path, limit: int, found: list[Item], unused: dict[str, str]) -> None:
    from ..core.cache import not_private
    from ..core.cache_size import VARIABLE

    of_kind = {kind: [item for item in found if item.kind == kind] for kind in (*KINDS, "other")}
    output.facts([
        ("folder", str(folder)),
        ("size", _summary([item for item in found if item.kind in KINDS])),
        *((KINDS[kind], _summary(of_kind[kind])) for kind in KINDS if of_kind[kind] or kind in ("kernel", "table")),
        *([("others", f"{_summary(of_kind['other'])}, which are not ours and stay")] if of_kind["other"] else []),
        ("limit", f"{output.size(limit)} of kernels and answers; {VARIABLE} sets another"),
    ])  # fmt: skip
    if folder.exists() and (reason := not_private(folder.stat())):
        output.note(f"The folder is not used: it {reason}.")
    for name, reason in unused.items():
        output.note(f"The table {name} is not used: {reason}.")


def _summary(items: list[Item]) -> str:
    count = len(items)
    return f"{count} file{'' if count == 1 else 's'}, {output.size(sum(item.nbytes for item in items))}"
