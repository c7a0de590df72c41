"""Cache folder on disk: compiled kernels and the tables that `onlinesoftmax tune` writes.

A compiled kernel runs as machine code, so an entry is loaded only if nobody else can have changed it, and only if
it is complete. An entry that is missing, damaged or not private counts as absent; the caller makes it again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

MAGIC = b"onlinesoftmax cache entry, format 1\n"
"""First bytes of an entry. The SHA-256 digest of name and content follows, then the content."""

_DIGEST_BYTES = hashlib.sha256().digest_size

_reported: set[Path] = set()
"""Folders that this process has already logged a warning about."""


@cache
def cache_folder() -> Path:
    """Return $ONLINESOFTMAX_CACHE, or the folder `onlinesoftmax` in the user's cache folder.

    The folder need not exist yet.
    """
    if folder := os.environ.get("ONLINESOFTMAX_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onlinesoftmax"


def load_entry(name: str) -> bytes | None:
    """Return the content of an entry of the cache folder, or None if there is no valid entry.

    An entry is not valid if it is missing, unreadable, truncated, stored under another name or in another format.
    It is not loaded if the folder or the file belongs to another user, or if other users may write to it. The
    first such case in a process is logged as a warning.
    """
    folder = cache_folder()
    try:
        if reason := _not_private(folder.stat()):
            _report(folder, f"the folder {reason}", folder)
            return None
        with (folder / name).open("rb") as file:
            # fstat describes the open file; the name could get a new file between two calls.
            if reason := _not_private(os.fstat(file.fileno())):
                _report(folder, f"the file {name} {reason}", folder / name)
                return None
            entry = file.read()
    except OSError:
        return None
    header = len(MAGIC) + _DIGEST_BYTES
    content = entry[header:]
    return content if entry[:header] == _header(name, content) else None


def store_entry(name: str, content: bytes) -> None:
    """Write an entry that only its owner can read, in place of any older one.

    Nothing is written if the folder is not private or cannot be written: the cache saves time and nothing else.
    """
    folder = cache_folder()
    with suppress(OSError):
        _make_folder(folder)
        if not _not_private(folder.stat()):
            _write(folder / name, _header(name, content) + content, 0o600)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that every reader sees the old content or the new content, never a part of it.

    Missing folders are made. The file is readable by everybody.

    Raises:
        OSError: the file cannot be written; no other file is left behind.
    """
    _make_folder(path.parent)
    _write(path, content, 0o644)


def _header(name: str, content: bytes) -> bytes:
    # The name is part of the digest, so an entry that was renamed to another name is not valid.
    return MAGIC + hashlib.sha256(b"\0".join((name.encode(), content))).digest()


def _not_private(status: os.stat_result) -> str | None:
    """Return the reason why other users may have changed a file or folder, or None."""
    # Windows has no user ids, and its permission bits do not describe access by other users. The default folder
    # lies in the user's profile there, which other users cannot write to.
    if not hasattr(os, "geteuid"):
        return None
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}, not to user {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "may be written by other users"
    return None


def _report(folder: Path, reason: str, path: Path) -> None:
    if folder not in _reported:
        _reported.add(folder)
        logging.getLogger("onlinesoftmax").warning(
            "kernels are compiled again instead of loaded from the cache %s: %s. "
            "Delete %s, or make it yours and run: chmod go-w %s",
            folder, reason, path, path,
        )  # fmt: skip


def _make_folder(folder: Path) -> None:
    # mkdir applies the mode to the last folder only; its parents get the usual permissions.
    folder.mkdir(mode=0o700 if folder == cache_folder() else 0o777, parents=True, exist_ok=True)


def _write(path: Path, content: bytes, mode: int) -> None:
    """Write a new file and give it the name `path` in one step."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes the file with mode 0o600.
        if mode != 0o600:
            Path(name).chmod(mode)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
