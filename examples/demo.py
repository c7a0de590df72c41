"""End-to-end demo on real data: a classifier of handwritten digits, then the commands of the command line.

Run it with `make demo`.  Or run `python examples/demo.py` in an environment with scikit-learn and with onlinesoftmax
and its extras torch and cli.  The demo checks its own results: the exit code is 1 when a figure is wrong or a command
fails.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, log_loss
from sklearn.model_selection import train_test_split

import onlinesoftmax as osm
from onlinesoftmax.ops import reference

SHARDS = 3
"""The ten classes are cut into shards of 4, 3 and 3 classes, as a vocabulary is sharded over GPUs."""

NOISE = 1e-12
"""Largest difference between two float64 computations of the same number in different orders."""

FILE_ROWS, FILE_COLS = 1024, 65536
"""Shape of the file: 256 MB of float32."""

ROUNDINGS = 8
"""Relative error allowed in float32, in units of its epsilon.

x - max is as low as -10, so its rounding changes exp(x - max) by up to 4 units.  The exponential, the sum and the
division add less than one unit each.
"""

TESTS = Path(__file__).parents[1] / "tests"

QUICK_INTERPRETERS = """
import os, fast_xla, triton_interpreter
os.environ |= fast_xla.environment()
triton_interpreter.patch()
from onlinesoftmax.cli import main
main()
"""
"""The command line with the quick interpreters of the tests, in which the kernels compute the same bits."""

VERIFIED_DTYPES = ("bfloat16", "float32")
"""The dtypes that the demo verifies, each in a process of its own.  `make test` checks the other dtypes."""


def main() -> int:
    """Run every part.  Returns the exit code: 0 when all results are right and every command succeeds."""
    began = time.perf_counter()
    wrong = classify_digits()
    wrong += commands(
        ("What this machine can run", "doctor"),
        *(
            (f"Every backend and strategy in {dtype}, compared with float64", "verify", "--quick", "--dtype", dtype)
            for dtype in VERIFIED_DTYPES
        ),
        ("Why this plan? For a GPU that this machine need not have", "explain", "4096x50257", "--device", "h200"),
    )
    # The benchmark runs alone: other processes would slow it down.
    wrong += commands(("Speed on this machine, compared with a copy of the same size", "bench", "--quick"))
    wrong += apply_to_a_file()
    heading("Summary")
    for sentence in wrong:
        print(f"WRONG: {sentence}")
    verdict = f"{len(wrong)} wrong" if wrong else "all results are right"
    print(f"{verdict}, {time.perf_counter() - began:.0f} s in total")
    return 1 if wrong else 0


def classify_digits() -> list[str]:
    """Train a linear classifier and compare its probabilities with scikit-learn's.

    Returns:
        One sentence for each wrong result.
    """
    heading("Handwritten digits: probabilities from logits")
    images, digits = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(images / 16, digits, test_size=0.3, random_state=0)
    model = LogisticRegression(max_iter=1000).fit(train_x, train_y)
    logits = model.decision_function(test_x)
    print(f"{len(train_x)} training images, {len(test_x)} test images, logits {logits.shape} {logits.dtype}")

    theirs = model.predict_proba(test_x)
    shards = np.array_split(logits, SHARDS, axis=1)
    state = osm.State.merge_all(osm.State.of(shard, dim=1) for shard in shards)
    results = {
        "scikit-learn, predict_proba": theirs,
        "onlinesoftmax.softmax, NumPy": osm.softmax(logits, dim=1),
        "onlinesoftmax.softmax, PyTorch": osm.softmax(torch.from_numpy(logits), dim=1).numpy(),
        f"State, merged over {SHARDS} shards": np.concatenate([state.softmax(shard) for shard in shards], axis=1),
    }
    wrong: list[str] = []
    print(f"\n{'':32}{'accuracy':>10}{'log-loss':>20}{'difference':>17}{'largest error of p':>27}")
    for name, ours in results.items():
        loss, hits = log_loss(test_y, ours), accuracy(test_y, ours)
        difference, largest = abs(loss - log_loss(test_y, theirs)), float(np.max(np.abs(ours - theirs)))
        print(f"{name:32}{hits:>10.6f}{loss:>20.15f}{difference:>17.1e}{largest:>27.1e}")
        if hits != accuracy(test_y, theirs):
            wrong.append(f"{name}: accuracy differs from scikit-learn's")
        if not (difference <= NOISE and largest <= NOISE):
            wrong.append(f"{name}: log-loss or probabilities differ from scikit-learn's by more than {NOISE}")

    # The loss needs no probabilities: it is the logsumexp minus the logit of the true class.
    loss = float(np.mean(state.logsumexp() - logits[np.arange(len(test_y)), test_y]))
    difference = abs(loss - log_loss(test_y, theirs))
    print(f"{'log-loss from the logsumexp':32}{'':10}{loss:>20.15f}{difference:>17.1e}")
    if not difference <= NOISE:
        wrong.append("the log-loss from the logsumexp differs from scikit-learn's")
    return wrong


def accuracy(digits: np.ndarray, probabilities: np.ndarray) -> float:
    """Fraction of rows whose most probable class is the true one."""
    return float(accuracy_score(digits, probabilities.argmax(axis=1)))


def apply_to_a_file() -> list[str]:
    """Apply softmax to a file of 256 MB through the command line, and check some rows of the result.

    Returns:
        One sentence for each wrong result.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "logits.npy"), Path(folder, "probabilities.npy")
        rng = np.random.default_rng(0)
        np.save(source, rng.standard_normal((FILE_ROWS, FILE_COLS), dtype=np.float32))
        if wrong := commands(
            ("A file of 256 MB, in bounded memory", "apply", str(source), str(target), "--op", "softmax")
        ):
            return wrong
        some = slice(None, None, 100)
        logits, ours = np.load(source, mmap_mode="r")[some], np.load(target, mmap_mode="r")
        exact = reference.two_pass(logits)
        largest = float(np.max(np.abs(ours[some] - exact) / exact))
        print(f"{ours.shape} {ours.dtype}: the largest relative error in {len(logits)} rows is {largest:.1e}")
        return [] if largest <= ROUNDINGS * np.finfo(np.float32).eps else ["apply: rows differ from float64"]


def commands(*titled: tuple[str, ...]) -> list[str]:
    """Run `onlinesoftmax` commands side by side, each in its own process, and print their output in order.

    Args:
        titled: For each command, its heading and then its arguments.

    Returns:
        One sentence for each command that failed.
    """
    wrong = []
    # A command keeps one core busy, so two at a time suit a machine with two cores.
    with ThreadPoolExecutor(max_workers=2) as pool:
        runs = [pool.submit(run, *arguments) for _, *arguments in titled]
        for (title, *arguments), started in zip(titled, runs, strict=True):
            heading(title)
            print(f"$ onlinesoftmax {' '.join(arguments)}\n", flush=True)
            finished = started.result()
            print(finished.stdout, end="", flush=True)
            if finished.returncode:
                wrong.append(f"onlinesoftmax {' '.join(arguments)}: exit code {finished.returncode}")
    return wrong


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one `onlinesoftmax` command to its end, and capture its output and its errors together."""
    program, env = ["-m", "onlinesoftmax"], os.environ | {"PYTHONIOENCODING": "utf-8"}
    if arguments[0] == "verify" and interpreters_can_be_quick():
        program = ["-c", QUICK_INTERPRETERS]
        paths = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
        env |= {"PYTHONPATH": paths, "TRITON_INTERPRET": "1"}
    return subprocess.run(
        [sys.executable, *program, *arguments], env=env,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", check=False,
    )  # fmt: skip


def interpreters_can_be_quick() -> bool:
    """True on a machine without a GPU, where interpreters run the kernels, with the folder of the tests beside."""
    return not torch.cuda.is_available() and TESTS.is_dir() and importlib.util.find_spec("triton") is not None


def heading(title: str) -> None:
    """Print a heading between two parts of the output."""
    print(f"\n== {title}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
