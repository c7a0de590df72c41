"""First calls of a process from 16 threads at once: imports, compilers, caches and registrations are all new."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import first_calls

SOURCE = Path(first_calls.osm.__file__).parents[1]


def errors_of_process(module: str, cache: Path) -> str:
    """Run first_calls.py in a new process, with an empty folder as its cache; the errors of its threads."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", "ignore", first_calls.__file__, module],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "ONLINESOFTMAX_CACHE": str(cache)},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    return done.stdout.strip() + done.stderr if done.returncode else ""


@pytest.mark.early
@pytest.mark.parametrize(("module", "needs"), [("torch", ("torch", "triton", "cuda.core")), ("jax", ("jaxlib",))])
def test_first_calls_from_many_threads(module: str, needs: tuple[str, ...], tmp_path: Path) -> None:
    for name in needs:
        if importlib.util.find_spec(name.partition(".")[0]) is None or importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}")
    assert errors_of_process(module, tmp_path) == ""


@pytest.mark.gpu
@pytest.mark.early
def test_first_calls_from_many_threads_in_fifty_processes(tmp_path: Path) -> None:
    with ThreadPoolExecutor(5) as pool:
        found = list(pool.map(lambda i: errors_of_process("torch", tmp_path / str(i)), range(50)))
    assert [error for error in found if error] == []
