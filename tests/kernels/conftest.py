"""Fixtures shared by the tests of this folder: folders for compiled kernels, and what NVRTC says of a source."""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kept
from cuda_machine import COMPILER
from onlinesoftmax.core import cache as disk_cache
from onlinesoftmax.kernels import report
from onlinesoftmax.kernels.cuda import compile, driver
from onlinesoftmax.kernels.cuda import launch as launches

Compiler = Callable[[str, str], str]
"""A function of a source and an architecture."""


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The path of a cache folder that does not exist yet; the counter of compiled kernels is 0."""
    monkeypatch.setenv("ONLINESOFTMAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compile, "compiled", 0)
    monkeypatch.setattr(disk_cache, "_reported", set())
    disk_cache.cache_folder.cache_clear()
    yield tmp_path / "cache"
    disk_cache.cache_folder.cache_clear()


def _kept(config: pytest.Config, ending: str, compiler: Callable[[str, str], str], *used: Any) -> Compiler:
    """A function of a source and an architecture, whose results are kept for later runs; an error is not.

    Args:
        config: The options of this run.
        ending: Ending of the files.
        compiler: The function.
        used: What it uses.  A change of its code, as of that of the function, computes all results again.
    """
    found = kept.folder(config, "nvrtc")
    code = "".join(map(inspect.getsource, (compiler, *used)))
    options = hashlib.sha256(code.encode()).hexdigest()[:8]

    def result_of(source: str, arch: str) -> str:
        file = found and found / f"{compile.key(source, arch)}-{options}.{ending}"
        if file and file.exists():
            return file.read_text()
        result = compiler(source, arch)
        if file:
            part = file.with_suffix(f".{os.getpid()}")
            part.write_text(result)
            part.replace(file)
        return result

    return result_of


@pytest.fixture(scope="session")
def check_in_compiler(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """A function that checks a source, its templates and its static assertions, without machine code."""

    def check(source: str, arch: str) -> str:
        from cuda.core import Program, ProgramOptions

        options = ProgramOptions(arch=arch, std=compile.STANDARD, fdevice_syntax_only=True)
        Program(source, "c++", options).compile("cubin")
        return "no error"

    check_kept = _kept(pytestconfig, "checked", check)

    def check_for_hopper(source: str) -> None:
        assert check_kept(source, "sm_90") == "no error"

    return check_for_hopper


@pytest.fixture(scope="session")
def log_of(pytestconfig: pytest.Config) -> Compiler:
    """A function of a source and an architecture: NVRTC's log with registers and spills."""
    return _kept(pytestconfig, "log", lambda source, arch: compile.build(source, arch)[1], compile.build)


@pytest.fixture(scope="session")
def sass_of(pytestconfig: pytest.Config) -> Compiler:
    """A function of a source and an architecture: the listing of the machine code."""

    def disassemble(source: str, arch: str) -> str:
        return report.cuobjdump("-sass", compile.build(source, arch)[0])

    return _kept(pytestconfig, "sass", disassemble, compile.build, report.cuobjdump)


@pytest.fixture(scope="session")
def folder(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for kernels that g++ compiles for the host, which all processes of pytest-xdist share."""
    if COMPILER is None:
        pytest.skip("g++ is not installed")
    return kept.for_kernels(pytestconfig, tmp_path_factory)


@pytest.fixture
def launch_on_host(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int, int], None]], None]:
    """A function of run(address of the parameter, blocks), which then runs in place of each launch of the driver."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(launches, "loaded", lambda *_: 1)
    monkeypatch.setattr(launches, "may_begin_early", lambda _: True)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)

    def replace(run: Callable[[int, int], None]) -> None:
        def launch(config: Any, _kernel: Any, parameters: Any, _extra: Any) -> int:
            parameter = ctypes.c_void_p.from_address(parameters).value
            assert parameter is not None
            run(parameter, driver.LaunchConfig.from_address(config).grid[0])
            return 0

        of_driver = SimpleNamespace(cuLaunchKernelEx=ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(launch))
        monkeypatch.setattr(driver, "library", lambda: of_driver)

    return replace
