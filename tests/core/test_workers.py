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
import time
from onlinesoftmax.core.workers import worker_pool

if __name__ == "__main__":
    with worker_pool(2) as pool:
        work = [pool.submit(time.sleep, 600) for _ in range(8)]
        print(*pool._processes, flush=True)
        time.sleep(600)
"""


def lives(process: int) -> bool:
    """True for a process that has not ended; a zombie has."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system has no /proc")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_parent(how: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    env = {**os.environ, "PYTHONPATH": str(Path(onlinesoftmax.__file__).parents[1])}
    with subprocess.Popen([sys.executable, str(script)], env=env, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        workers = [int(word) for word in parent.stdout.readline().split()]
        assert len(workers) == 2
        assert all(map(lives, workers))
        parent.send_signal(how)
    for _ in range(300):
        if not any(map(lives, workers)):
            break
        time.sleep(0.1)
    assert not any(map(lives, workers))
