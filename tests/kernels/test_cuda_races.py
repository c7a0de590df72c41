"""The CUDA kernels have no data race that ThreadSanitizer finds on the host (tests/cuda_races.py).

The tool racecheck of compute-sanitizer has a similar purpose on a GPU; it checks shared memory only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cuda_machine import COMPILER
from cuda_races import SHARES

TESTS = Path(__file__).parents[1]

REPORT = "WARNING: ThreadSanitizer: data race"


def under_thread_sanitizer(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command with ThreadSanitizer loaded.  It does not work with random addresses: setarch switches them off."""
    assert COMPILER is not None
    find = [COMPILER, "-print-file-name=libtsan.so"]
    library = Path(subprocess.run(find, capture_output=True, text=True, check=True).stdout.strip()).resolve()
    loaded = {"LD_PRELOAD": str(library), "TSAN_OPTIONS": "exitcode=0", "OPENBLAS_NUM_THREADS": "1"}
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = ["setarch", "-R", "env", *(f"{name}={value}" for name, value in loaded.items()), *command]
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(words, capture_output=True, text=True, check=False, env=environment, timeout=600)


def why_not() -> str | None:
    """Why ThreadSanitizer cannot run here; None where it can."""
    if COMPILER is None:
        return "g++ is not installed"
    if shutil.which("setarch") is None:
        return "setarch is not installed"
    done = under_thread_sanitizer(sys.executable, "-IS", "-c", "import ctypes; ctypes.CDLL(None).__tsan_acquire")
    return None if done.returncode == 0 else "ThreadSanitizer does not start here"


@pytest.mark.early
@pytest.mark.parametrize("share", ["few", pytest.param("rest", marks=pytest.mark.exhaustive)])
def test_kernels_have_no_races(share: str, folder: Path) -> None:
    """ThreadSanitizer finds the races of kernels that lack a barrier, and none in the real kernels."""
    if reason := why_not():
        pytest.skip(reason)
    done = under_thread_sanitizer(sys.executable, TESTS / "cuda_races.py", folder, share)
    assert done.returncode == 0, done.stderr[-4000:]
    _, *runs = done.stderr.split("run: ")
    found = {name: text.count(REPORT) for name, _, text in (each.partition("\n") for each in runs)}
    broken = {f"{kernel} without {barrier} of {file}" for kernel, file, barrier in SHARES[share]}
    assert len(found) > len(broken)
    assert {name for name, races in found.items() if races} == broken, done.stderr[:4000]
