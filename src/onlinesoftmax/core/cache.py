"""Cache folder on disk: compiled kernels, answers of `onlinesoftmax report`, and the tables of `onlinesoftmax tune`.

A compiled kernel runs as machine code, and a table decides which kernels run. So a file is used only if nobody else
can have changed it (`read_private`), and only if its checksum is right: that of an entry stands before its content
(`load_entry`), that of a JSON document in its key "sha256" (`load_document`). Any other file counts as absent.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from .cache_size import limit, trim
from .printable import printable
from .whole_files import NotRegularError, Part, open_regular, write_whole

MAGIC = b"onlinesoftmax cache entry, format 1\n"
"""First bytes of an entry. The SHA-256 digest of name and content follows, then the content."""

MOST_BYTES = 256 << 20
"""Size of the largest file that is read."""

_DIGEST_BYTES = hashlib.sha256().digest_size

_reported: set[Path] = set()
"""Files and folders that this process has already logged a warning about."""

T = TypeVar("T")


class UnusableError(ValueError):
    """A file of the cache folder cannot be used; the message is the reason."""


class NotPrivateError(UnusableError):
    """Other users may have changed a file or the folder."""


@cache
def cache_folder() -> Path:
    """Return $ONLINESOFTMAX_CACHE, or the folder `onlinesoftmax` in the user's cache folder.

    The folder need not exist yet. A user without a home folder has one among the temporary files.
    """
    if folder := os.environ.get("ONLINESOFTMAX_CACHE"):
        return Path(folder)
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "onlinesoftmax"
    try:
        return Path.home() / ".cache" / "onlinesoftmax"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"onlinesoftmax-{os.geteuid() if hasattr(os, 'geteuid') else 'cache'}"


def folder_origin() -> str:
    """Words about the environment variable that names the cache folder, for an error; none where it is the default."""
    given = next(filter(os.environ.get, ("ONLINESOFTMAX_CACHE", "XDG_CACHE_HOME")), None)
    return f" (from {given})" if given else ""


def read_private(name: str) -> bytes | None:
    """The content of a file in the cache folder, or None if there is no file.

    Raises:
        NotPrivateError: the folder or the file belongs to another user, or other users may write to it.
        UnusableError: the file cannot be read, is no regular file, or is larger than MOST_BYTES.
    """
    folder = cache_folder()
    try:
        with os.fdopen(open_regular(folder / name), "rb") as file:
            # fstat describes the open file; the name could get a new file between two calls.
            status = os.fstat(file.fileno())
            for what, found in (("the folder", folder.stat()), (f"the file {name}", status)):
                if reason := not_private(found):
                    raise NotPrivateError(f"{what} {reason}")
            if status.st_size > MOST_BYTES:
                raise UnusableError(f"the file {name} has {status.st_size} bytes, more than any of ours")
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        why = error.strerror if isinstance(error, NotRegularError) else f"cannot be read: {error.strerror}"
        raise UnusableError(f"the file {name} {why}") from None


def load_entry(name: str) -> bytes | None:
    """Return the content of an entry of the cache folder, or None if there is no valid entry.

    An entry is not valid if it is missing, unreadable, truncated, stored under another name or in another format, or
    not private (`read_private`). The first entry of a process that is not private is logged as a warning.
    """
    folder = cache_folder()
    try:
        entry = read_private(name)
    except UnusableError as reason:
        if isinstance(reason, NotPrivateError):
            place = folder / name if str(reason).startswith("the file") else folder
            _warn_once(
                folder, f"the cache {folder} is not used, and kernels are compiled again: {reason}. "
                f"Delete {place}, or make it yours and run: chmod go-w {place}",
            )  # fmt: skip
        return None
    if entry is None:
        return None
    header = len(MAGIC) + _DIGEST_BYTES
    content = entry[header:]
    if entry[:header] != _header(name, content):
        return None
    # The time of the last use, by which `trim` chooses.
    with suppress(OSError):
        os.utime(folder / name)
    return content


def store_entry(name: str, content: bytes) -> None:
    """Write an entry that only its owner can read, in place of any older one, and keep the cache within its limit.

    Nothing is written if the folder is not private or cannot be written: the cache saves time and nothing else.
    """
    packed, most = _header(name, content) + content, limit()
    if len(packed) <= most:
        with suppress(OSError):
            store_file(name, packed)
            trim(cache_folder(), most, name)


def store_file(name: str, content: bytes) -> None:
    """Write a file of the cache folder that only its owner can read, in place of any older one.

    Raises:
        OSError: the file cannot be written, or other users may write to the folder.
    """
    prepare_folder()
    write_whole(cache_folder() / name, content, 0o600)


def check_storable(name: str) -> None:
    """Raise the OSError that `store_file` would raise before it writes."""
    prepare_folder()
    with Part(cache_folder() / name, 0o600):
        pass


def prepare_folder() -> None:
    """Make the cache folder if it is missing.

    Raises:
        OSError: it cannot be made, or it is not private.
    """
    folder = cache_folder()
    # mkdir applies the mode to the last folder only; its parents get the usual permissions.
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
    if reason := not_private(folder.stat()):
        raise PermissionError(errno.EPERM, f"the folder {folder} {reason}")


def load_document(name: str, parse: Callable[[dict[str, Any]], T]) -> T | None:
    """Return the document that a JSON file of the cache folder holds, or None if there is no valid one.

    A file that cannot be used is logged as a warning, once in a process.

    Args:
        name: Name of the file.
        parse: Makes the value of a document, and raises a ValueError for a document of another form.
    """
    path = cache_folder() / name
    try:
        content = read_private(name)
        return None if content is None else parse_document(content, parse)
    except UnusableError as reason:
        report_unused(path, reason, "plans are made without it. Delete it, or make it again with onlinesoftmax tune")
        return None


def parse_document(content: bytes, parse: Callable[[dict[str, Any]], T]) -> T:
    """The value of a JSON document with a checksum (`with_checksum`).

    Raises:
        UnusableError: the content is damaged, or `parse` has refused the document.
    """
    try:
        document = json.loads(content)
        if not isinstance(document, dict):
            raise UnusableError("it is no JSON object")
        given = document.pop("sha256", None)
        if given is None:
            raise UnusableError("it has no checksum")
        if given != _digest(document):
            raise UnusableError("its checksum is that of another content")
    except RecursionError:
        raise UnusableError("it is nested too deeply") from None
    except UnusableError:
        raise
    except ValueError as error:
        raise UnusableError(f"it is no JSON: {error}") from None
    try:
        return parse(document)
    except ValueError as error:
        raise UnusableError(str(error)) from None


def with_checksum(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the key "sha256"."""
    return {**document, "sha256": _digest(document)}


def _digest(document: dict[str, Any]) -> str:
    """The SHA-256 digest of a document as JSON with sorted keys and without spaces."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _header(name: str, content: bytes) -> bytes:
    # The name is part of the digest, so an entry that was renamed to another name is not valid.
    return MAGIC + hashlib.sha256(b"\0".join((name.encode(), content))).digest()


def not_private(status: os.stat_result) -> str | None:
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


def report_unused(path: Path, reason: object, consequence: str) -> None:
    """Log, once in a process, that a file of the cache folder is not used."""
    _warn_once(path, f"{path} is not used: {reason}; {consequence}")


def _warn_once(place: Path, message: str) -> None:
    if place not in _reported:
        _reported.add(place)
        logging.getLogger("onlinesoftmax").warning("%s", printable(message))
