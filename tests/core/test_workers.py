"""Workers end with the process that started them, even if it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import onlinesoftmax

PARENT = """
import sys, time
from concurrent.futures import wait
from contextlib import nullcontext
from onlinesoftmax.cli.boundary import guarded
from onlinesoftmax.cli.signals import interrupted_by_signals
from onlinesoftmax.core.workers import WorkerPool

def work():
    with interrupted_by_signals() if sys.argv[1:] else nullcontext(), WorkerPool(2) as pool:
        tasks = [pool.submit(time.sleep, 600) for _ in range(8)]
        print(*pool._processes, flush=True)
        # Python may miss a signal that comes just before a wait without end, until the wait is over.
        while not wait(tasks[:1], timeout=1).done:
            pass

if __name__ == "__main__":
    sys.exit(guarded(work))
"""


def lives(process: int) -> bool:
    """True for a process that has not ended; a zombie has."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system has no /proc")
@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL", "SIGTERM, interrupts"])
def test_workers_end_with_their_parent(how: str, tmp_path: Path) -> None:
    """A command that a signal interrupts says no more than that: it leaves no semaphores to Python's tracker."""
    script, (name, *interrupts) = tmp_path / "parent.py", how.split(", ")
    script.write_text(PARENT)
    env = {**os.environ, "PYTHONPATH": str(Path(onlinesoftmax.__file__).parents[1])}
    command, pipe = [sys.executable, str(script), *interrupts], subprocess.PIPE
    with subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        workers = [int(word) for word in parent.stdout.readline().split()]
        assert len(workers) == 2
        assert all(map(lives, workers))
        parent.send_signal(signal.Signals[name])
        said = parent.stderr.read()
    assert said == "Error: interrupted\n" or not interrupts
    assert parent.returncode == (130 if interrupts else -signal.Signals[name])
    for _ in range(300):
        if not any(map(lives, workers)):
            break
        time.sleep(0.1)
    assert not any(map(lives, workers))
