"""The cache folder: the kinds of its entries, the limit of its size, and the order of deletion."""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from .whole_files import PART, remove_leftovers

VARIABLE = "ONLINESOFTMAX_CACHE_MAXSIZE"
"""The environment variable with the limit, in bytes, or with K, M or G as in 500M."""

DEFAULT_LIMIT = 10**9
"""Bytes of kernels and answers that are kept: about as many as in the CUDA driver's own cache."""

KERNEL = re.compile(r"[0-9a-f]{32}\.cubin")

ANSWERS = "report-plans.json.gz"
"""Name of the answers of `onlinesoftmax report`: there is one file, which every report replaces."""

_TABLE_HEAD = re.compile(rb'\s*\{\s*"format":\s*\d+,\s*"device":')
"""The first bytes of a table of `onlinesoftmax tune`, by which a damaged one is known, too."""


class Item(NamedTuple):
    """An entry of the cache folder: a file, link or folder.

    Attributes:
        path: Its path.
        kind: "kernel", "answers", "table" or "part"; "other" for anything that this library did not write.
        nbytes: Its size.
        used: When it was last loaded or stored, in seconds since 1970.
    """

    path: Path
    kind: str
    nbytes: int
    used: float


def parse_size(text: str) -> int:
    """Bytes of a size such as "500M"; a ValueError for another text.

    >>> parse_size("500M"), parse_size("2g"), parse_size("4096")
    (500000000, 2000000000, 4096)
    """
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE | re.ASCII)
    if found is None:
        raise ValueError(f"{VARIABLE}={text!r} is no size; write bytes, or K, M or G behind a number, as in 500M")
    return int(float(found[1]) * 1000 ** " KMGT".index(found[2].upper() or " "))


def limit() -> int:
    """Bytes of kernels and answers that the cache keeps; a wrong value of the variable is logged once."""
    return _limit(os.environ.get(VARIABLE))


@cache
def _limit(text: str | None) -> int:
    try:
        return parse_size(text) if text else DEFAULT_LIMIT
    except ValueError as error:
        logging.getLogger("onlinesoftmax").warning("%s. The limit is the default, %d bytes", error, DEFAULT_LIMIT)
        return DEFAULT_LIMIT


def trim(folder: Path, most: int, keep: str) -> None:
    """Delete the kernels and answers that were used longest ago, until the rest has at most `most` bytes.

    Args:
        folder: The cache folder.
        most: The limit.
        keep: Name of a file that stays.
    """
    items = [item for item in _items(folder) if item.kind in ("kernel", "answers")]
    total = sum(item.nbytes for item in items)
    if total <= most:
        return
    for item in sorted(items, key=lambda item: item.used):
        if total > most and item.path.name != keep:
            # Another process may have deleted the file. On Windows, a file that is open cannot be deleted.
            with suppress(OSError):
                item.path.unlink(missing_ok=True)
                total -= item.nbytes


def contents(folder: Path) -> list[Item]:
    """Delete abandoned parts, then list the entries of the cache folder; subfolders are not searched.

    Raises:
        OSError: the folder cannot be read; none if it is missing.
    """
    remove_leftovers(folder)
    return [*_items(folder)]


def clear(folder: Path) -> list[Item]:
    """Delete kernels, answers and tables, and return them; links, folders and other files stay.

    Raises:
        OSError: a file cannot be deleted.
    """
    removed = [item for item in contents(folder) if item.kind in ("kernel", "answers", "table")]
    for item in removed:
        item.path.unlink(missing_ok=True)
    return removed


def _items(folder: Path) -> Iterator[Item]:
    try:
        entries = os.scandir(folder)
    except FileNotFoundError:
        return
    with entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                yield Item(Path(entry.path), _kind(Path(entry.path), status), status.st_size, status.st_mtime)


def _kind(path: Path, status: os.stat_result) -> str:
    if not stat.S_ISREG(status.st_mode) or (hasattr(os, "geteuid") and status.st_uid != os.geteuid()):
        return "other"
    if KERNEL.fullmatch(path.name):
        return "kernel"
    if PART.fullmatch(path.name):
        return "part"
    if path.name == ANSWERS:
        return "answers"
    with suppress(OSError):
        if path.suffix == ".json" and _TABLE_HEAD.match(_head(path)):
            return "table"
    return "other"


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(200)
