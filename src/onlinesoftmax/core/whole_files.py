"""Regular files as a whole: read at once, and replaced in one step.

New content goes to a *part*, a hidden file in the same folder, which takes the name when it is complete. A killed
process leaves its part behind. A part is locked while its process lives, so the next process that replaces a file in
that folder finds the parts that nobody writes any more, and deletes them.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import stat
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType

if sys.platform != "win32":
    import fcntl

_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
_BINARY = getattr(os, "O_BINARY", 0)

PART = re.compile(r"\.onlinesoftmax-(?P<host>.*)-[0-9a-f]{32}\.part")
"""Name of a part, with the host that writes it."""

ABANDONED_SECONDS = 24 * 3600
"""Seconds without a write after which a part of another host counts as left behind.

Some network file systems keep the locks of each host apart, so a free lock says little about another host.
"""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a fifo",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotRegularError(OSError):
    """A name stands for a folder, device, fifo or socket, as `strerror` says: "is a folder"."""


def check_regular(status: os.stat_result) -> None:
    """Raise a NotRegularError unless a status is that of a regular file."""
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a special file")
        raise NotRegularError(errno.EINVAL, f"is {kind}")


def status_of(path: Path) -> os.stat_result:
    """The status of the file behind a name; an OSError too where no file can have the name."""
    try:
        return path.stat()
    except ValueError as error:  # a NUL, or a character that the file system cannot encode
        raise OSError(errno.EINVAL, f"no file can have this name ({error})") from None


def open_regular(path: Path) -> int:
    """Open a regular file for reading and return its descriptor; opening never waits, as it does for a fifo.

    Raises:
        NotRegularError: (an OSError) `path` is no regular file.
        OSError: it cannot be opened.
    """
    # Opening some devices has effects, so the name is looked at first; the descriptor cannot change any more.
    check_regular(status_of(path))
    descriptor = os.open(path, os.O_RDONLY | _NONBLOCK | _BINARY)
    try:
        check_regular(os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: Path, most: int | None = None) -> bytes:
    """The content of a regular file.

    Args:
        path: The file.
        most: Bytes of the longest file that is read; None for any.

    Raises:
        OSError: the file cannot be read, is not regular, or is longer.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            raise OSError(errno.EFBIG, f"it has {size} bytes, and at most {most} are read")
        return file.read()


def same_file(first: Path, second: Path) -> bool:
    """True if two names stand for one file, which need not exist."""
    if os.path.realpath(first) == os.path.realpath(second):
        return True
    with suppress(OSError):
        return first.samefile(second)
    return False


def destination(path: Path, mode: int | None = None) -> tuple[Path, os.stat_result | None]:
    """The regular file that a name stands for, behind links, and its status; None where there is no file yet.

    Args:
        path: The name.
        mode: As in `Part`.

    Raises:
        NotRegularError: (an OSError) the name stands for something else.
        OSError: the file may not be written, or there is no folder for it.
    """
    try:
        status = status_of(path)
    except FileNotFoundError:
        status = None
    target = Path(os.path.realpath(path))
    if status is None:
        if not target.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, f"there is no folder {path.parent}")
        return target, None
    check_regular(status)
    # /dev/fd/3 may stand for a file that was deleted. Other processes may replace a target at any time.
    if not target.exists() and path.exists():
        raise OSError(errno.ENOENT, "the file behind this name has no name of its own")
    if mode is None:
        # The system decides: permissions, read-only file systems, links of other users in shared folders.
        os.close(os.open(path, os.O_WRONLY | _NONBLOCK))
        _check_sticky(target.parent.stat(), status)
    return target, status


def _check_sticky(folder: os.stat_result, file: os.stat_result) -> None:
    if folder.st_mode & stat.S_ISVTX and hasattr(os, "geteuid") and os.geteuid() not in (0, file.st_uid, folder.st_uid):
        raise PermissionError(errno.EPERM, f"it belongs to user {file.st_uid}, who alone may replace it in its folder")


class Part:
    """A new file that can take the name of a target; a context that deletes the file unless it has done so.

    An existing target keeps its permissions, and its owner and group as far as the system allows; if it is a link,
    the file behind the link is replaced. Other hard links of the old file keep the old content. A new file has the
    permissions that the umask leaves.

    Args:
        path: The target.
        mode: Permissions of the file instead, whatever an older file has.

    Attributes:
        file: The open part, without a buffer.

    Raises:
        OSError: the target may not be written or is no regular file, or its folder is missing or read-only.
    """

    def __init__(self, path: Path, mode: int | None = None) -> None:
        self.target, self.old = destination(path, mode)
        self.mode = mode
        remove_leftovers(self.target.parent)
        # While it is written, a part of private content is as private as the file that it replaces.
        descriptor, self.name = _create(self.target.parent, 0o666 if mode is None and self.old is None else 0o600)
        self.file = os.fdopen(descriptor, "r+b", buffering=0)

    def write(self, content: bytes) -> None:
        """Write the whole content."""
        left = memoryview(content)
        while left:
            left = left[self.file.write(left) :]

    def take_name(self) -> None:
        """Give the file the name of the target, in one step."""
        if self.mode is not None:
            self.name.chmod(self.mode)
        elif self.old is not None:
            self.name.chmod(self._inherit(self.old))
        if sys.platform == "win32":
            self.file.close()  # Windows renames no open file
        self.name.replace(self.target)

    def _inherit(self, old: os.stat_result) -> int:
        """Take over the owner and the group of the old file; return the permissions."""
        mode = stat.S_IMODE(old.st_mode) & 0o777
        if sys.platform == "win32":
            return mode
        descriptor = self.file.fileno()
        # A user namespace has no number for some owners and groups, which is EINVAL.
        with suppress(OSError):
            os.fchown(descriptor, old.st_uid, old.st_gid)
            return mode
        with suppress(OSError):
            os.fchown(descriptor, -1, old.st_gid)
            return mode
        # The permissions of another group are not given to this one.
        return mode & ~0o070

    def __enter__(self) -> Part:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The part is deleted under its lock; after `take_name` nothing has its name.
        if sys.platform == "win32":
            self.file.close()
        self.name.unlink(missing_ok=True)
        self.file.close()


def write_whole(path: Path, content: bytes, mode: int | None = None) -> None:
    """Write a file so that every reader sees the old content or the new content, never a part of it.

    Args:
        path: The file, as in `Part`; its folder exists.
        content: Its content.
        mode: As in `Part`.

    Raises:
        OSError: the file cannot be written; no other file is left behind.
    """
    with Part(path, mode) as part:
        part.write(content)
        os.fsync(part.file.fileno())
        part.take_name()


def check_writable(path: Path) -> None:
    """Raise the OSError that `write_whole` would raise before it writes, so that it is known before the work begins."""
    with Part(path):
        pass


def remove_leftovers(folder: Path) -> None:
    """Delete the parts in a folder that killed processes of this user have left."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if found := PART.fullmatch(entry.name):
                with suppress(OSError):
                    _remove_abandoned(Path(entry.path), found["host"])


def _remove_abandoned(part: Path, host: str) -> None:
    """Delete a part that no process writes any more."""
    if sys.platform == "win32":
        part.unlink()  # fails while a process has the part open
        return
    descriptor = os.open(part, os.O_RDWR | os.O_NOFOLLOW | _NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return
        locked = _lock(descriptor)
        near = host == _host() and locked is not None
        if locked is not False and (near or time.time() - status.st_mtime > ABANDONED_SECONDS):
            part.unlink()
    finally:
        os.close(descriptor)


def _create(folder: Path, mode: int) -> tuple[int, Path]:
    """(descriptor, path) of a new part, which is locked where the file system has locks."""
    while True:
        part = folder / f".onlinesoftmax-{_host()}-{uuid.uuid4().hex}.part"
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | _BINARY, mode)
        # Another process may have taken the part for a left-over before it was locked.
        if _lock(descriptor) is not False and part.exists():
            return descriptor, part
        os.close(descriptor)
        part.unlink(missing_ok=True)


def _lock(descriptor: int) -> bool | None:
    """Lock a file until it is closed: True if it is locked now, False if another has it, None without locks."""
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.]", "_", platform.node())[:64]
