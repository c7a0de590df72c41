"""Where the package keeps what it can make again, compiled kernels and tables of measured plans, and how it writes."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path


@cache
def cache_folder() -> Path:
    """$ONLINESOFTMAX_CACHE, or a folder of ours in the user's cache folder; it need not exist yet."""
    if folder := os.environ.get("ONLINESOFTMAX_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onlinesoftmax"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is the old one or the new one whole, whatever happens meanwhile, in whichever process.

    Raises:
        OSError: it cannot be written; nothing else is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes it private; what is kept is not.
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
