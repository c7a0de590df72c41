"""The edge of the command line: standard streams that are closed or full, and every error as one sentence."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..core.printable import printable

WRONG, FAILED = 2, 1
"""Exit codes: WRONG for an unusable file or folder name, FAILED for any other error."""


class StdoutError(Exception):
    """The results cannot be written to stdout.  It is no OSError, so nobody takes it for the error of a file."""


class _Stdout(io.FileIO):
    """Standard output whose errors are StdoutErrors."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise StdoutError(f"stdout cannot be written: {error.strerror}") from None


def guarded(command: Callable[[], object]) -> int:
    """Run a command, write out what it has printed, and return its exit code; an error is a sentence on stderr.

    In Python's development mode (`python -X dev`) an error that nobody foresaw keeps its traceback.
    """
    try:
        _open_streams()
        try:
            command()
        except SystemExit as left:
            if not isinstance(left.code, int | None):
                return _end(str(left.code), FAILED)
            code = left.code or 0
        else:
            code = 0
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _end("interrupted", 130)
    except Exception as error:  # the user reads sentences; each kind that is foreseen has one of its own
        if sys.flags.dev_mode and not isinstance(error, (StdoutError, OSError, MemoryError)):
            raise
        return _end(*sentence(error))


def _open_streams() -> None:
    """Open the null device for closed standard streams, so that files opened later do not get descriptors 0 to 2.

    Raises:
        StdoutError: stdout is closed.
    """
    for number in (0, 2):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
    if sys.stderr is None:
        sys.stderr = open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115  it stays open
    if sys.stdout is None:
        # Until the end, so that writing the message flushes nothing.
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  it stays open
        raise StdoutError("stdout is closed, and the results are written to it")
    if not isinstance(sys.stdout, io.TextIOWrapper):
        return
    # The name of a file may have characters that the encoding of stdout does not have.
    sys.stdout.reconfigure(errors="backslashreplace")
    if not sys.stdout.isatty():
        raw = _Stdout(sys.stdout.fileno(), "w", closefd=False)
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), sys.stdout.encoding, "backslashreplace")


def _end(text: str, code: int) -> int:
    """Print an error as one sentence and flush both streams.

    A stream that cannot be flushed is pointed at the null device.
    """
    with suppress(OSError):
        print(f"Error: {printable(text)}", file=sys.stderr)
    # Python flushes both streams once more when it ends, and would report the error again.
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, StdoutError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code


def sentence(error: BaseException) -> tuple[str, int]:
    """(one line about an error, the exit code)."""
    if isinstance(error, StdoutError):
        return str(error), FAILED
    if lacks_memory(error):
        return f"there is too little memory: {_first_line(_origin(error))}", FAILED
    if isinstance(error, OSError):
        named = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, (str, bytes)) else ""
        return f"{named}{error.strerror or error}", WRONG if named else FAILED
    if isinstance(error, ImportError):
        return f"a package cannot be imported: {_first_line(_origin(error))}", FAILED
    if isinstance(error, ValueError) and "null byte" in str(error):
        return "no file can have a name with a NUL in it", WRONG
    return (
        f"{type(error).__name__}: {_first_line(error)}.  This is a fault of onlinesoftmax.  Please report it with the "
        "traceback that `python -X dev -m onlinesoftmax` prints for this command",
        FAILED,
    )


MEMORY_WORDS = ("allocate memory", "failed to map segment", "not enough memory", "out of memory", "start new thread")
"""Words in the errors of the loader, of threads and of frameworks when memory runs out."""


def lacks_memory(error: BaseException) -> bool:
    """True if the error, or the first error of its `__cause__` chain, reports that memory ran out."""
    return any(_reports_memory(each) for each in (error, _origin(error)))


def _reports_memory(error: BaseException) -> bool:
    # The text of an OSError may contain a file name, and the number says enough.
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in MEMORY_WORDS)


def _origin(error: BaseException) -> BaseException:
    """The first error of the `__cause__` chain."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
