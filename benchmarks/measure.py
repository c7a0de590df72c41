"""Measure the records of benchmarks/results again, each beside the libraries that its page compares.

python benchmarks/measure.py --list                       # the name and the command of every record
python benchmarks/measure.py forward jax-gradients        # two of them
python benchmarks/measure.py --minutes 9 --out FOLDER     # as many as nine minutes allow

A complete record of this commit stays as it is, an incomplete one is continued, and an older one is replaced.  So the
same command, given again, goes on where the last one stopped.  The exit code is 0 if every chosen record is complete.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from onlinesoftmax.bench.naming import device_slug
from onlinesoftmax.bench.record import git_state

RESULTS = Path(__file__).resolve().parent / "results"

LIBRARIES = "torch,compile,liger,quack"

RECORDS: dict[str, str] = {
    "cross-entropy": f"--peers {LIBRARIES}",
    "token-logprobs": "--peers torch,compile",
    "read-only": "--peers torch,compile",
    "forward": f"--peers {LIBRARIES}",
    "rows1024": f"--peers {LIBRARIES}",
    "gradients": f"--peers {LIBRARIES}",
    "lengths": "--peers torch",
    "single-row": "--peers torch",
    "fused": "--peers torch,compile",
    "operations": "--peers torch,compile",
    "host": "--peers torch",
    "cold": "--peers torch,compile",
    "jax-forward": "--peers jax",
    "jax-gradients": "--peers jax",
    "jax-lengths": "--peers jax",
    "jax-cross-entropy": "--peers jax",
    "triton-forward": "--peers torch",
    "triton-gradients": "--peers torch",
    "triton-single-row": "--peers torch",
    "distributed": "--peers dtensor,loss-parallel,all-gather,one-process",
    "cpu": "--peers torch --device cpu",
}
"""The records by their names without the device, in the order of importance, and the options of `bench` for each."""

STOP_SECONDS = 60
"""Time that a command gets to write its record after an interruption."""


def main() -> int:
    """Measure the chosen records within the time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="*", metavar="RECORD", help=f"of: {', '.join(RECORDS)}; by default all that "
                        "one GPU can measure")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the commands, and measure nothing")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the records")
    parser.add_argument("--commit", help="commit to record, where the sources were copied without their history")
    chosen = parser.parse_args()
    if unknown := [name for name in chosen.records if name not in RECORDS]:
        parser.error(f"unknown record {unknown[0]!r}; there are: {', '.join(RECORDS)}")
    if not chosen.out.is_dir():
        parser.error(f"--out {chosen.out} is no folder")
    names = chosen.records or [name for name in RECORDS if name not in ("distributed", "cpu")]
    if not chosen.list and names != ["cpu"] and not torch.cuda.is_available():
        parser.error("torch sees no NVIDIA GPU here; only the record cpu can be measured")
    end = time.monotonic() + 60 * chosen.minutes
    incomplete = []
    for name in names:
        words = command(name, chosen.out, chosen.commit)
        print(shlex.join(["python", *words[1:]]), flush=True)
        if not chosen.list and run(words, end - time.monotonic()) != 0:
            incomplete.append(name)
    if incomplete:
        print(f"incomplete, or with a wrong result: {', '.join(incomplete)}")
    return int(bool(incomplete))


def command(name: str, folder: Path, commit: str | None = None) -> list[str]:
    """The command that measures a record, or continues the one in this folder if that is of the same commit."""
    words = [sys.executable, "-m"]
    if name == "distributed":
        words += ["torch.distributed.run", "--nproc-per-node", "2", "-m"]
    words += ["onlinesoftmax", "bench", *suite(name), *shlex.split(RECORDS[name]), "--out", str(folder)]
    words += ["--commit", commit] if commit else []
    same = commit_of(folder, name) == (commit or git_state()["commit"])
    return [*words, "--resume"] if same else words


def suite(name: str) -> list[str]:
    """The options of `bench` that give a record this name.

    Example:
        >>> suite("jax-forward"), suite("single-row")
        (['--framework', 'jax', '--suite', 'forward'], ['--suite', 'single-row'])
    """
    first, _, rest = name.partition("-")
    option = {"jax": "--framework", "triton": "--backend"}.get(first)
    return [option, first, "--suite", rest] if option else ["--suite", name]


def commit_of(folder: Path, name: str) -> str | None:
    """The commit of the record of this machine; None if there is no such record."""
    path = folder / f"{prefix(name)}{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["git"]["commit"] if path.exists() else None


def prefix(name: str) -> str:
    """The part of a record's file name before the suite: the device of this machine, and the number of GPUs."""
    if name == "cpu":
        return ""
    device = device_slug(torch.cuda.get_device_name()) if torch.cuda.is_available() else "cpu"
    return f"{device}x2-" if name == "distributed" else f"{device}-"


def run(words: Sequence[str], seconds: float) -> int:
    """Run a command for this time at most, and return its exit code; an interruption lets it write its record."""
    if seconds <= 0:
        return 1
    with subprocess.Popen(words) as process:
        try:
            return process.wait(None if seconds == float("inf") else seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                return process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                return 1


if __name__ == "__main__":
    sys.exit(main())
