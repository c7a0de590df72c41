"""Measure the records of benchmarks/results again, each beside the libraries that RECORDS names.

python benchmarks/measure.py --list                       # the name and the command of every record
python benchmarks/measure.py forward jax-gradients        # two of them
python benchmarks/measure.py --gpus 4 distributed         # a record of four GPUs
python benchmarks/measure.py --minutes 9 --out FOLDER     # as many as nine minutes allow

A complete record of this commit stays as it is, and an incomplete one is continued.  A record of another commit is
replaced: its results are gone when the measurement begins.  So the same command, given again, goes on where the last
one stopped.  The exit code is 0 if each chosen record is complete and all its results are right, and 1 otherwise.
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
from typing import Any

import torch

from onlinesoftmax.lab.bench.record_file import device_slug, git_state
from onlinesoftmax.lab.bench.suites import DISTRIBUTED, cases, suite_of

RESULTS = Path(__file__).resolve().parent / "results"

KERNELS = "torch,liger,quack"
"""Libraries whose kernels are compared; torch.compile takes seconds for each shape, and few records have it."""

RECORDS: dict[str, str] = {
    "cross-entropy": f"--peers {KERNELS},flash-attn,transformer-engine,compile",
    "token-logprobs": "--peers torch,compile,trl",
    # All ways, of which each has its own reason to be absent.
    "linear-cross-entropy": "",
    "linear-token-logprobs": "",
    "sampling": "",
    "topk": "",
    "verify": "",
    "route": "",
    "training-step": "",
    "decoding": "",
    "read-only": "--peers torch,compile",
    "forward": f"--peers {KERNELS}",
    "rows1024": f"--peers {KERNELS}",
    "gradients": f"--peers {KERNELS}",
    "short-rows": f"--peers {KERNELS}",
    "lengths": "--peers torch",
    "single-row": "--peers torch",
    "long-rows": "--peers torch",
    "calls": "--peers torch",
    "fused": "--peers torch,compile",
    "operations": "--peers torch,compile",
    "host": "--peers torch",
    "cold": "--peers torch,compile",
    "jax-forward": "--peers jax",
    "jax-gradients": "--peers jax",
    "jax-lengths": "--peers jax",
    "jax-single-row": "--peers jax",
    "jax-long-rows": "--peers jax",
    "jax-calls": "--peers jax",
    "jax-cross-entropy": "--peers jax",
    "jax-cold": "--peers jax",
    "jax-cuda-cold": "--peers jax",
    "jax-pallas-forward": "--peers jax",
    "jax-pallas-lengths": "--peers jax",
    "triton-forward": "--peers torch",
    "triton-gradients": "--peers torch",
    "triton-single-row": "--peers torch",
    # All ways, of which each has its own reason to be absent.
    "distributed": "",
    "distributed-heads": "",
    "cpu": "--peers torch --device cpu",
}
"""The records by their names without the device, in the order of importance, and the options of `bench` for each."""

STOP_SECONDS = 60
"""Time that a command gets to write its record after an interruption."""


def main() -> int:
    """Measure the chosen records within the time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="*", metavar="RECORD", help=f"records to measure.  There are: "
                        f"{', '.join(RECORDS)}.  By default all that one GPU can measure")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the commands, and measure nothing")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument(
        "--gpus", type=int, default=2, help=f"processes of the records of several: {', '.join(DISTRIBUTED)}"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the records")
    parser.add_argument("--commit", help="commit to record, where the sources were copied without their history")
    given = parser.parse_args()
    if unknown := [name for name in given.records if name not in RECORDS]:
        parser.error(f"unknown record {unknown[0]!r}; there are: {', '.join(RECORDS)}")
    if not given.out.is_dir():
        parser.error(f"--out {given.out} is no folder")
    names = given.records or [name for name in RECORDS if name not in (*DISTRIBUTED, "cpu")]
    if not given.list and names != ["cpu"] and not torch.cuda.is_available():
        parser.error("torch sees no NVIDIA GPU here; only the record cpu can be measured")
    end = time.monotonic() + 60 * given.minutes
    failed, not_started = [], []
    for name in names:
        words = command(name, given.out, given.commit, given.gpus)
        if given.list:
            print(shlex.join(["python", *words[1:]]))
        elif not is_complete(name, given.out, given.commit, given.gpus):
            if time.monotonic() >= end:
                not_started.append(name)
                continue
            print(shlex.join(["python", *words[1:]]), flush=True)
            if run(words, end - time.monotonic()) != 0:
                failed.append(name)
    for said, records in (("incomplete, or with a wrong result", failed), ("not started", not_started)):
        if records:
            print(f"{said}: {', '.join(records)}")
    return int(bool(failed or not_started))


def command(name: str, folder: Path, commit: str | None = None, gpus: int = 2) -> list[str]:
    """The command that measures a record, or continues the one in this folder if that is of the same commit."""
    words = [sys.executable, "-m"]
    if name in DISTRIBUTED:
        words += ["torch.distributed.run", "--nproc-per-node", str(gpus), "-m"]
    words += ["onlinesoftmax", "bench", *suite_options(name), *shlex.split(RECORDS[name]), "--out", str(folder)]
    words += ["--commit", commit] if commit else []
    return [*words, "--resume"] if record_of(name, folder, commit, gpus) else words


def suite_options(name: str) -> list[str]:
    """The options of `bench` that give a record this name.

    Example:
        >>> suite_options("jax-pallas-lengths"), suite_options("single-row")
        (['--framework', 'jax', '--backend', 'pallas', '--suite', 'lengths'], ['--suite', 'single-row'])
    """
    first, _, rest = name.partition("-")
    option = {"jax": "--framework", **dict.fromkeys(("triton", "pallas", "cuda"), "--backend")}.get(first)
    return [option, first, *suite_options(rest)] if option else ["--suite", name]


def record_of(name: str, folder: Path, commit: str | None, gpus: int = 2) -> Any:
    """The record of this machine in a folder; None if there is none of this commit, by default that of the checkout."""
    path = folder / f"{prefix(name, gpus)}{name}.json"
    if not path.exists():
        return None
    record = json.loads(path.read_text(encoding="utf-8"))
    # A commit may be given by its first letters.
    there, here = record["git"]["commit"], commit or git_state()["commit"]
    return record if there.startswith(here) or here.startswith(there) else None


def is_complete(name: str, folder: Path, commit: str | None, gpus: int = 2) -> bool:
    """True if the record of this commit has a result for every case of its suite."""
    record = record_of(name, folder, commit, gpus)
    if record is None:
        return False
    options = record["options"]
    todo = cases(suite_of(options["suite"]), dtypes=options.get("dtype") or [])
    return len(record["cases"]) == len(todo) and not any(case["skipped"] for case in record["cases"])


def prefix(name: str, gpus: int = 2) -> str:
    """The beginning of a record's file name, before the name in RECORDS; empty for "cpu"."""
    if name == "cpu":
        return ""
    device = device_slug(torch.cuda.get_device_name()) if torch.cuda.is_available() else "cpu"
    return f"{device}x{gpus}-" if name in DISTRIBUTED else f"{device}-"


def run(words: Sequence[str], seconds: float) -> int:
    """Run a command for this time at most, and return its exit code; an interruption lets it write its record."""
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
