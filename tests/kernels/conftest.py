"""Fixtures shared by the tests of this folder: folders for compiled kernels, and NVRTC without machine code."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kept
from cuda_machine import COMPILER
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


@pytest.fixture
def check_in_compiler() -> Callable[[str], None]:
    """A function that checks a source, its templates and its static assertions, without machine code."""

    def check(source: str) -> None:
        from cuda.core import Program, ProgramOptions

        options = ProgramOptions(arch="sm_90", std=compile.STANDARD, fdevice_syntax_only=True)
        Program(source, "c++", options).compile("cubin")

    return check


@pytest.fixture(scope="session")
def log_of(pytestconfig: pytest.Config) -> Callable[[str, str], str]:
    """A function of a source and an architecture: NVRTC's log with registers and spills, kept for later runs."""
    found = kept.folder(pytestconfig, "nvrtc")
    options = hashlib.sha256(inspect.getsource(compile.build).encode()).hexdigest()[:8]

    def log_of(source: str, arch: str) -> str:
        file = found and found / f"{compile.key(source, arch)}-{options}.log"
        if file and file.exists():
            return file.read_text()
        _, log, _ = compile.build(source, arch)
        if file:
            part = file.with_suffix(f".{os.getpid()}")
            part.write_text(log)
            part.replace(file)
        return log

    return log_of


@pytest.fixture(scope="session")
def folder(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for kernels that g++ compiles for the host, which all processes of pytest-xdist share."""
    if COMPILER is None:
        pytest.skip("g++ is not installed")
    if found := kept.folder(pytestconfig, "kernels"):
        return found
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernels"
    folder.mkdir(exist_ok=True)
    return folder
