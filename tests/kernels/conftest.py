"""Fixture shared by the tests of this folder: an empty cache folder for compiled kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from onlinesoftmax.core import cache as disk_cache
from onlinesoftmax.kernels.cuda import compile


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The path of a cache folder that does not exist yet; the counter of compiled kernels is 0."""
    monkeypatch.setenv("ONLINESOFTMAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compile, "compiled", 0)
    monkeypatch.setattr(disk_cache, "_reported", set())
    disk_cache.cache_folder.cache_clear()
    yield tmp_path / "cache"
    disk_cache.cache_folder.cache_clear()
