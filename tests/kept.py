"""Folders of pytest's cache for what the tests compile: a later run compiles what has changed."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import pytest

NAMES = ("xla", "kernels", "nvrtc")
"""Programs of JAX, CUDA kernels for the host, and NVRTC's logs, checks and listings."""

SECONDS = 7 * 24 * 3600
"""Age at which a file is removed."""


def folder(config: pytest.Config, name: str) -> Path | None:
    """A folder that the processes of pytest-xdist and later runs share; None where pytest keeps no cache."""
    assert name in NAMES
    if not hasattr(config, "cache"):
        return None
    # A home folder may be shared by machines with other processors.
    try:
        return Path(config.cache.mkdir(f"{name}-{platform.node()}"))
    except OSError:
        # The checkout cannot be written.
        return None


def for_kernels(config: pytest.Config, factory: pytest.TempPathFactory) -> Path:
    """A folder for kernels that g++ compiles for the host, which all processes of pytest-xdist share."""
    if found := folder(config, "kernels"):
        return found
    base = factory.getbasetemp()
    made = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernels"
    made.mkdir(exist_ok=True)
    return made


def remove_old(config: pytest.Config) -> None:
    """Remove old files, before a test of any process uses them."""
    for name in NAMES:
        found = folder(config, name)
        for file in found.iterdir() if found else ():
            if file.stat().st_mtime < time.time() - SECONDS:
                file.unlink(missing_ok=True)
