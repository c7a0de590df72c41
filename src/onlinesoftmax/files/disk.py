"""Bytes on disk: reads and writes at offsets, and a target file that appears complete or not at all.

Plain read and write calls need no memory beyond their buffer, unlike a memory map. A failing or full disk is an
OSError here; under a memory map it is a SIGBUS that kills the process.
"""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class FileError(ValueError):
    """A file cannot be processed, or a request does not fit the file. The message is one sentence with its path."""


@contextmanager
def naming(path: Path, problem: str) -> Iterator[None]:
    """Turn an OSError into a FileError that names the file."""
    try:
        yield
    except OSError as error:
        raise FileError(f"{path}: {problem}: {error.strerror or error}") from error


@contextmanager
def replacing(target: Path, size: int, ready: Callable[[], object] = lambda: None) -> Iterator[io.FileIO]:
    """Open a new file of `size` bytes that takes the name `target` when the block ends without an error.

    After an error the new file is deleted, and an older file of that name is unchanged.

    Args:
        target: The name.
        size: Bytes of the new file.
        ready: Function called after the block, when the new file is flushed to the disk and before it takes the name.

    Raises:
        FileError: the folder is missing or not writable, `target` is a folder, or the disk is full. A system
            that can reserve space reports a full disk before anything is written.
    """
    if target.is_dir():
        raise FileError(f"{target}: is a folder, not a file")
    if not target.parent.is_dir():
        raise FileError(f"{target}: there is no folder {target.parent}")
    # The module `tempfile` would make a file that only its owner can read.
    temporary = target.parent / f".onlinesoftmax-{uuid.uuid4().hex}.tmp"
    try:
        with naming(target, "cannot be created"):
            file = temporary.open("x+b", buffering=0)
        with file:
            with naming(target, f"no room for {size} bytes"):
                if hasattr(os, "posix_fallocate"):  # macOS lacks it; there a full disk shows at the write
                    os.posix_fallocate(file.fileno(), 0, size)
            yield file
            with naming(target, "cannot be written"):
                os.fsync(file.fileno())
            ready()
        with naming(target, "cannot be replaced"):
            temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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
