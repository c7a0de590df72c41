"""Where the package keeps what it can make again: compiled kernels, and tables of measured plans."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path


@cache
def cache_folder() -> Path:
    """$ONLINESOFTMAX_CACHE, or a folder of ours in the user's cache folder; it need not exist yet."""
    if folder := os.environ.get("ONLINESOFTMAX_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onlinesoftmax"
