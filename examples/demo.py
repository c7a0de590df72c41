"""Real data from end to end: a classifier of handwritten digits, then every command of the command line.

Run it with `make demo`, or `python examples/demo.py` where onlinesoftmax is installed with the extras torch
and cli, and scikit-learn.  What is claimed is checked: the exit code is 1 when a figure or a command is wrong.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, log_loss
from sklearn.model_selection import train_test_split

import onlinesoftmax as osm
from onlinesoftmax.core import reference

SHARDS = 3
"""Ten digits cut into 4 + 3 + 3 classes, as a vocabulary is cut over GPUs."""

NOISE = 1e-12
"""Two float64 computations of one number in different orders agree at least so far."""

FILE_ROWS, FILE_COLS = 1024, 65536
"""256 MB of float32."""

ROUNDINGS = 8
"""x - max is as low as -10, which rounds exp(x - max) by 4 units; exp, sum and division add less than one each."""


def main() -> int:
    """The exit code: 0 when everything agreed and every command succeeded."""
    began = time.perf_counter()
    wrong = classify_digits()
    wrong += command("What can run here", "doctor")
    wrong += command("Every backend and strategy against float64", "verify", "--quick")
    wrong += command("Speed on this machine, beside a copy of the same size", "bench", "--quick")
    wrong += command("Why this plan? For a GPU that need not be here", "explain", "4096x50257", "--device", "h200")
    wrong += apply_to_a_file()
    heading("Summary")
    for what in wrong:
        print(f"WRONG: {what}")
    print(
        f"{'everything agreed' if not wrong else f'{len(wrong)} wrong'}, {time.perf_counter() - began:.0f} s in total"
    )
    return 1 if wrong else 0


def classify_digits() -> list[str]:
    """Train a linear classifier; compare probabilities with scikit-learn's.  Returns what is wrong."""
    heading("Handwritten digits: probabilities from logits")
    images, digits = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(images / 16, digits, test_size=0.3, random_state=0)
    model = LogisticRegression(max_iter=1000).fit(train_x, train_y)
    logits = model.decision_function(test_x)
    print(f"{len(train_x)} images to learn from, {len(test_x)} to judge by, logits {logits.shape} {logits.dtype}")

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
    print(f"\n{'':32}{'accuracy':>10}{'log-loss':>20}{'its difference':>17}{'a probability differs by':>27}")
    for name, ours in results.items():
        loss, hits = log_loss(test_y, ours), accuracy(test_y, ours)
        apart, largest = abs(loss - log_loss(test_y, theirs)), float(np.max(np.abs(ours - theirs)))
        print(f"{name:32}{hits:>10.6f}{loss:>20.15f}{apart:>17.1e}{largest:>27.1e}")
        if hits != accuracy(test_y, theirs):
            wrong.append(f"{name}: accuracy differs from scikit-learn's")
        if not (apart <= NOISE and largest <= NOISE):
            wrong.append(f"{name}: log-loss or probabilities differ from scikit-learn's by more than {NOISE}")

    # The loss needs no probabilities: logsumexp minus the logit of the true class.
    loss = float(np.mean(state.logsumexp() - logits[np.arange(len(test_y)), test_y]))
    apart = abs(loss - log_loss(test_y, theirs))
    print(f"{'that loss from the logsumexp':32}{'':10}{loss:>20.15f}{apart:>17.1e}")
    if not apart <= NOISE:
        wrong.append("the loss from the logsumexp differs from scikit-learn's")
    return wrong


def accuracy(digits: np.ndarray, probabilities: np.ndarray) -> float:
    """The part of rows whose most probable class is the right one."""
    return float(accuracy_score(digits, probabilities.argmax(axis=1)))


def apply_to_a_file() -> list[str]:
    """Softmax of a file of 256 MB through the command line; some rows are checked.  Returns what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "logits.npy"), Path(folder, "probabilities.npy")
        rng = np.random.default_rng(0)
        np.save(source, rng.standard_normal((FILE_ROWS, FILE_COLS), dtype=np.float32))
        if wrong := command("A file of 256 MB, in little memory", "apply", str(source), str(target), "--op", "softmax"):
            return wrong
        some = slice(None, None, 100)
        logits, ours = np.load(source, mmap_mode="r")[some], np.load(target, mmap_mode="r")
        exact = reference.two_pass(logits)
        largest = float(np.max(np.abs(ours[some] - exact) / exact))
        print(f"{ours.shape} {ours.dtype}; {len(logits)} rows against float64: largest relative error {largest:.1e}")
        return [] if largest <= ROUNDINGS * np.finfo(np.float32).eps else ["apply: rows differ from float64"]


def command(title: str, *arguments: str) -> list[str]:
    """Run `onlinesoftmax` with these arguments, in a process of its own.  Returns what is wrong."""
    heading(title)
    print(f"$ onlinesoftmax {' '.join(arguments)}\n", flush=True)
    code = subprocess.run([sys.executable, "-m", "onlinesoftmax", *arguments], check=False).returncode
    return [f"onlinesoftmax {arguments[0]}: exit code {code}"] if code else []


def heading(title: str) -> None:
    """A line between two parts of the output."""
    print(f"\n== {title}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
