"""What every test needs before the first import: the interpreter where there is no GPU, markers, Hypothesis."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

import fast_xla
import kept

# Imports and the collection of tests make many objects that all stay; pytest_collection_finish enables it again.
gc.disable()

# Some tests interrupt a command.  A shell that starts the tests in the background, or nohup, makes all commands ignore
# these signals.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

if "PYTEST_XDIST_WORKER" in os.environ:
    # There is one worker per processor.  With more threads, PyTorch's operations wait for threads that do not run.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@cache
def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


# Plans must not depend on tables that were made on this machine.
os.environ.setdefault("ONLINESOFTMAX_CACHE", str(Path(tempfile.gettempdir()) / "onlinesoftmax-tests"))

# JAX shares the GPU with PyTorch, and with the other processes of pytest-xdist: it takes what it needs, not most of it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# --doctest-modules would import the files named conftest a second time, all under one name, and a file that needs two
# devices of JAX, which test_jax_sharded.py runs in a process of its own.
collect_ignore_glob = ["*/conftest.py", "*/typed/*", "*/two_simulated_gpus.py"]
# --doctest-modules imports every file, and these two import Triton.
WITH_TRITON = ["triton_algebra.py", "sparsemax/kernels/triton.py"]
collect_ignore = ["conftest.py", *([] if importlib.util.find_spec("triton") else WITH_TRITON)]

# A deadline measures the machine, not the code: the first example compiles, the others do not.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture
def device_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The device's memory for one test at a time, whichever of pytest-xdist's processes runs it."""
    import torch
    from filelock import FileLock

    with FileLock(tmp_path_factory.getbasetemp().parent / "device_memory.lock"):
        yield
        torch.cuda.empty_cache()


def pytest_configure(config: pytest.Config) -> None:
    early = "takes several seconds and cannot be split: begins first, so that no process waits for it at the end"
    config.addinivalue_line("markers", f"early: {early}")
    # The process that hands out tests to those of pytest-xdist runs none, and they begin after it: it imports no torch.
    if config.getoption("dist", "no") == "no" and not _has_gpu():
        _interpret_kernels()
        if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
            kept.remove_old(config)
        if folder := kept.folder(config, "xla"):
            # A program is compiled again where it or JAX changed.
            os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
            # JAX compiles a smaller program as fast as it finds one in the folder.
            os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.04")
            os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def _interpret_kernels() -> None:
    # Triton reads it when a kernel is defined, so it must be set before a test imports one.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if importlib.util.find_spec("triton"):
        import triton_interpreter

        triton_interpreter.patch()
    for name, value in fast_xla.environment().items():
        os.environ.setdefault(name, value)


def pytest_collection_finish() -> None:
    """Prepare what was imported: a benchmark collects garbage before each measurement, and each test catches logs."""
    if "jax" in sys.modules and not _has_gpu():
        fast_xla.share_context()
    # PyTorch's loggers pass nothing on to the root, so pytest would give each of sixty its handlers, six times a test.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.enable()
    _leave_out_of_collections()
    # Traces of JAX and kernels in the interpreter make many objects, and few of them are cycles.
    gc.set_threshold(100000, 20, 20)


def _leave_out_of_collections() -> None:
    """Collect what is garbage now; all else is taken to stay."""
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After the last test of a file, leave out what stays: JAX keeps every program, and each collection passes all."""
    if nextitem and nextitem.path != item.path:
        _leave_out_of_collections()


def _turn(item: pytest.Item) -> int:
    """0 for a test that begins early, 1 for the last of these, 2 for the others."""
    early = item.get_closest_marker("early")
    return 2 if early is None else int(early.kwargs.get("last", False))


EXHAUSTIVE: dict[str, list[bool]] = {}
"""For each function of a test, whether each of its cells is `exhaustive`."""


@pytest.fixture
def exhaustive() -> dict[str, list[bool]]:
    return EXHAUSTIVE


# Before the option -m deselects items.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        cells = EXHAUSTIVE.setdefault(item.nodeid.partition("[")[0], [])
        cells.append(item.get_closest_marker("exhaustive") is not None)
    items.sort(key=_turn)
    if _has_gpu():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU: torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """What was compiled before counts against the limit of recompilations."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens and columns of a head fill a chunk."""
    from onlinesoftmax.linear import plans

    small = {"TOKEN_TILE": 7, "COLUMN_TILE": 4, "FEWEST_TOKENS": 7, "FEWEST_COLUMNS": 4, "COLUMN_BYTES": 1}
    for name, value in small.items():
        monkeypatch.setattr(plans, name, value)
