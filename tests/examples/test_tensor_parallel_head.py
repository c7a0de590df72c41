"""examples/tensor_parallel_head.py, as its users start it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

SCRIPT = Path(__file__).parents[2] / "examples" / "tensor_parallel_head.py"


@pytest.mark.early
def test_two_processes_have_the_curve_of_one() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    done = subprocess.run([*command, "--steps", "3", "--words", "101"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "Largest difference" in done.stdout
