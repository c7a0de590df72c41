"""Bytes on disk: reads and writes at offsets, and a target file that appears complete or not at all.

Plain read and write calls need no memory beyond their buffer, unlike a memory map. A failing or full disk is an
OSError here; under a memory map it is a SIGBUS that kills the process.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..core.whole_files import NotRegularError, Part, open_regular


class FileError(ValueError):
    """A file cannot be processed, or a request does not fit the file. The message is one sentence with its path."""


@contextmanager
def naming(path: Path, problem: str) -> Iterator[None]:
    """Turn an OSError into a FileError that names the file."""
    try:
        yield
    except NotRegularError as error:
        raise FileError(f"{path}: {error.strerror}, not a file") from error
    except OSError as error:
        raise FileError(f"{path}: {problem}: {error.strerror or error}") from error


@contextmanager
def reading(path: Path) -> Iterator[io.FileIO]:
    """Open a regular file for reading, without a buffer.

    Raises:
        FileError: the file is missing, unreadable, or a folder, device, fifo or socket.
    """
    with naming(path, "cannot be read"):
        file = os.fdopen(open_regular(path), "rb", buffering=0)
    with file:
        yield file


@contextmanager
def replacing(target: Path, size: int, ready: Callable[[], object] = lambda: None) -> Iterator[Part]:
    """A new file of `size` bytes, open for writing, that takes the name `target` when the block ends without an error.

    After an error the new file is deleted, and an older file of that name is unchanged.

    Args:
        target: The name; `Part` says what becomes of links, permissions and owners.
        size: Bytes of the new file.
        ready: Function called after the block, when the new file is flushed to the disk and before it takes the name.

    Raises:
        FileError: the folder is missing or not writable, `target` is no regular file, or the disk is full. A system
            that can reserve space reports a full disk before anything is written.
    """
    if size > sys.maxsize:
        raise FileError(f"{target}: no room for {size} bytes: no file is that long")
    with naming(target, "cannot be created"):
        part = Part(target)
    with part:
        with naming(target, f"no room for {size} bytes"):
            if hasattr(os, "posix_fallocate"):  # macOS lacks it; there a full disk shows at the write
                os.posix_fallocate(part.file.fileno(), 0, size)
        yield part
        with naming(target, "cannot be written"):
            os.fsync(part.file.fileno())
        ready()
        with naming(target, "cannot be replaced"):
            part.take_name()


def read_into(file: io.FileIO, offset: int, buffer: memoryview, path: Path) -> None:
    """Fill `buffer` from byte `offset` of the file."""
    with naming(path, "cannot be read"):
        file.seek(offset)
        while buffer:
            count = file.readinto(buffer)
            if not count:
                raise FileError(f"{path}: became shorter while it was being read")
            buffer = buffer[count:]


def write_from(file: io.FileIO, offset: int, buffer: memoryview, path: Path) -> None:
    """Write all of `buffer` at byte `offset` of the file."""
    with naming(path, "cannot be written"):
        file.seek(offset)
        while buffer:
            buffer = buffer[file.write(buffer) :]
