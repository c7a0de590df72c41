"""Run CUDA kernels on the host under ThreadSanitizer, which reports data races.

Two threads race if both access one address, at least one of them writes, and no barrier, message or atomic operation
lies between the two accesses.

python tests/cuda_races.py FOLDER few     # one call of each kernel; FOLDER keeps the compiled kernels
python tests/cuda_races.py FOLDER rest    # what `few` leaves out

tests/kernels/test_cuda_races.py starts this program with ThreadSanitizer loaded.  Before each run, the program writes a
line "run: NAME" to stderr; the reports of the run follow.  The last runs leave out a barrier, and must have a report.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import cuda_simulator
from cuda_targets import (
    ASKED,
    KERNELS,
    PACKED,
    PIPELINE,
    STRATEGY_COLS,
    STREAM,
    Ask,
    a_task,
    check,
    run,
    small_plan,
    some_values,
)
from onlinesoftmax.core.device import KNOWN
from onlinesoftmax.kernels.cuda import reduction, source
from onlinesoftmax.kernels.reduction import Reduction
from onlinesoftmax.kernels.request import Request
from onlinesoftmax.routing.kernels import gradient, losses
from onlinesoftmax.routing.kernels import source as routing
from onlinesoftmax.routing.rules import Rule, checked_rule
from onlinesoftmax.sampling.kernels import source as sampling
from onlinesoftmax.sampling.kernels import support, topk, unfiltered, verify

ROWS = {PIPELINE: 8, STREAM: 8}
"""Rows of a call, elsewhere 20.  A block of row, packed, pipeline and stream gets several."""

CLASSES = 16
"""Classes of the losses that are reduced."""

ASKS = [
    ask for ask in ASKED if "weight" in ask.given and "z_loss" in ask.given and "y" in ask.outputs and not ask.options
]
ASKS += [ask for ask in ASKED if "mean_loss" in ask.outputs and "entropy" in ask.outputs]
"""The loss of every row with all operands, and a mean with statistics: both write a gradient."""

REMOVED_BARRIERS = (
    ("cluster", "row/block_reduce.cuh", "__syncthreads();"),
    (PACKED, "strategy/row/packed.cuh", "__syncthreads();"),
    (PIPELINE, "strategy/grid/ring.cuh", "__syncwarp();"),
    ("reduction", "small/reduction.cuh", "__syncthreads();"),
    ("unfiltered", "parts.cuh", "__syncthreads();"),
    ("sample", "exchange.cuh", "__syncthreads();"),
    ("topk", "topk.cuh", "__syncthreads();"),
    ("route", "groups.cuh", "sync_team();"),
    ("gradient of route", "lanes.cuh", "else __syncwarp();"),
)
"""Kernels, and barriers that they need: the first such statement of a file."""


ROUTING = "route", "route by long lists", "route by a network", "gradient of route", "z-loss of route"
"""Kernels of routing."""

SAMPLING = "sample", "unfiltered", "topk", "verify", "support"
"""Kernels of sampling."""


SHARES = {"few": REMOVED_BARRIERS[::4], "rest": [one for i, one in enumerate(REMOVED_BARRIERS) if i % 4]}
"""The barriers that a share of the runs leaves out; those of `few` are of a strategy, of sampling and of routing."""


def main(folder: Path, share: str) -> None:
    """Run each CUDA strategy with one of two losses, and the other kernels; then some of them without a barrier."""
    if not hasattr(ctypes.CDLL(None), "__tsan_acquire"):
        sys.exit("ThreadSanitizer is not loaded; run: python -m pytest tests/kernels/test_cuda_races.py")
    # g++ must not load ThreadSanitizer.
    os.environ.pop("LD_PRELOAD", None)
    for i, kernel in enumerate(KERNELS):
        run_kernel(kernel, kernel, folder, ASKS[(i + (share == "few")) % 2])
    for kernel in (
        ("reduction", "sample", "unfiltered", "topk", "verify", "support", *ROUTING) if share == "few" else ()
    ):
        run_kernel(kernel, kernel, folder)
    text = source.text
    for kernel, file, barrier in SHARES[share]:

        def changed(name: str, *package: str, file: str = file, barrier: str = barrier) -> Any:
            return text(name, *package).replace(barrier, "", 1) if name == file else text(name, *package)

        cuda_simulator._replaced.cache_clear()
        # The results may be wrong: the reports of the race count.
        with mock.patch.object(source, "text", changed), contextlib.suppress(AssertionError):
            run_kernel(kernel, f"{kernel} without {barrier} of {file}", folder)


def run_kernel(kernel: str, name: str, folder: Path, ask: Ask = ASKS[0]) -> None:
    """Run a kernel; `ask` is the call of a strategy."""
    sys.stderr.write(f"run: {name}\n")
    if kernel == "reduction":
        # A whole block and a part of a second: ThreadSanitizer takes long to begin a thread, and a block has 512.
        return reduce_losses(5000, folder)
    if kernel == "sample":
        return sample(folder)
    if kernel == "unfiltered":
        return sample_unfiltered(folder)
    if kernel == "topk":
        return list_largest(folder)
    if kernel == "verify":
        return verify_drafts(folder)
    if kernel == "support":
        return gather_support(folder)
    if kernel == "route":
        return choose_experts(RULE, folder)
    if kernel == "route by long lists":
        return choose_experts(LONG_LISTS, folder)
    if kernel == "route by a network":
        return choose_experts(SORTED_KEYS, folder)
    if kernel == "z-loss of route":
        return add_squares(folder)
    if kernel == "gradient of route":
        return differentiate_routing(folder)
    return call(kernel, ask, folder)


def call(kernel: str, ask: Ask, folder: Path) -> None:
    """Run a kernel that writes its gradient over the logits."""
    cols, dtype = STRATEGY_COLS[kernel][0], "float32"
    rows = ROWS.get(kernel, 20)
    task = a_task(ask, rows, cols, dtype, cols + 1 - cols % 2)
    request = Request(task, small_plan(kernel, rows, cols, dtype, peel=True, terms=True))
    values = some_values(ask, task, np.arange(rows))
    check(ask, request, values, run(ask, request, values, folder, in_place=True))


def reduce_losses(rows: int, folder: Path) -> None:
    """Run the kernel that reduces the losses of all rows to their mean."""
    one = Reduction(rows, "float32", "float32", False, "int64", None, CLASSES, -100)
    arrays = {"losses": np.ones(rows, np.float32), "target": np.zeros(rows, np.int64), "out": np.zeros(1, np.float32)}
    cuda_simulator.simulate_reduction(one, arrays, np.full(reduction.MAIL_WORDS, -1).view(np.uint64), folder)
    assert arrays["out"] == 1


def sample(folder: Path) -> None:
    """Run the kernel that samples, with and without top_k, on rising rows of two blocks, whose lists are cut.

    A block has a fourth of its threads, which ThreadSanitizer takes longest for, and lists of a fourth.
    """
    rows, cols, top = 2, 4500, 3
    arrays: dict[str, Any] = {
        "x": np.linspace(-3, 3, rows * cols, dtype=np.float32), "temperature": np.ones(rows, np.float32),
        "top_k": np.array([40, 0]), "top_p": np.full(rows, 0.5), "min_p": np.full(rows, 0.01),
        "seed": np.arange(rows), "offset": np.zeros(rows, np.int64), "token": np.zeros(rows, np.int64),
        "logprob": np.zeros(rows, np.float32), "lse": np.zeros(rows, np.float32), "kept": np.zeros(rows, np.int64),
        "valid": np.zeros(rows, np.uint8), "top_tokens": np.zeros(rows * top, np.int64),
        "top_logprobs": np.zeros(rows * top, np.float32),
    }  # fmt: skip
    numbers = (cols, cols, sampling.slice_of(cols, 2), 0, 0, top, *sampling.NEUTRAL)
    shape = sampling.Shape("float32", 2, 512, 2, True, 1)
    cuda_simulator.simulate_own(sampling.KERNEL, shape, arrays, numbers, rows, folder, divisor=4)
    assert arrays["top_tokens"].tolist() == [cols - 1, cols - 2, cols - 3] * rows


def sample_unfiltered(folder: Path) -> None:
    """Run the kernel that samples without a filter, on rows of two blocks; one row is read twice."""
    rows, cols = 2, 3000
    x = np.tile(np.linspace(-3, 3, cols, dtype=np.float32), (rows, 1))
    x[1, 5] = np.inf
    arrays: dict[str, Any] = {
        "x": x, "temperature": np.ones(rows, np.float32), "seed": np.arange(rows), "offset": np.zeros(rows, np.int64),
        "token": np.zeros(rows, np.int64), "logprob": np.zeros(rows, np.float32), "lse": np.zeros(rows, np.float32),
        "kept": np.zeros(rows, np.int64), "valid": np.zeros(rows, np.uint8),
    }  # fmt: skip
    numbers = cols, cols, sampling.slice_of(cols, 2), 0, 0, 0
    shape = unfiltered.Shape("float32", 2, 64, True, False)
    cuda_simulator.simulate_own(unfiltered.KERNEL, shape, arrays, numbers, rows, folder)


def list_largest(folder: Path) -> None:
    """Run the kernel that lists the largest scores on a rising row of two blocks, whose lists are cut."""
    cols, k = 9000, 100
    arrays: dict[str, Any] = {
        "x": np.linspace(-3, 3, cols, dtype=np.float32), "target": np.array([7]), "values": np.zeros(k, np.float32),
        "indices": np.zeros(k, np.int64), "logprobs": np.zeros(k, np.float32), "lse": np.zeros(1, np.float32),
        "target_logprob": np.zeros(1, np.float32), "target_rank": np.zeros(1, np.int64),
    }  # fmt: skip
    numbers = cols, cols, sampling.slice_of(cols, 2), k
    shape = topk.Shape("float32", 2, 128, True, True, topk.SHORT_LIST)
    cuda_simulator.simulate_own(topk.KERNEL, shape, arrays, numbers, 1, folder)
    assert arrays["indices"].tolist() == [*range(cols - 1, cols - 1 - k, -1)]


def verify_drafts(folder: Path) -> None:
    """Run the kernel that verifies drafts, on rows of two blocks; the second draft of each is replaced."""
    rows, n, cols = 2, 2, 1500
    x = np.tile(np.linspace(-3, 3, cols, dtype=np.float32), (rows * (n + 1), 1))
    total = np.exp(x.astype(np.float64) - 3).sum(1)
    last = np.full(rows * (n + 1), cols - 1)
    zeros, valid = np.zeros(rows * (n + 1), np.int64), np.ones(rows * (n + 1), np.uint8)
    arrays: dict[str, Any] = {"target_x": x, "draft_x": x[:, ::-1].copy(), "sampled": last}
    for model, largest in (("target", last), ("draft", zeros)):
        fields = {"largest": largest, "key": zeros, "sum": total, "valid": valid}
        arrays |= {f"{model}_{name}": array for name, array in fields.items()}
    arrays |= {
        "drafts": np.array([cols - 1, 0] * rows), "accepted": np.zeros(rows, np.int64),
        "valid": np.zeros(rows, np.uint8), "tokens": np.zeros(rows * (n + 1), np.int64),
        "logprobs": np.zeros(rows * (n + 1), np.float32),
    }  # fmt: skip
    numbers = cols, cols, cols, sampling.slice_of(cols, 2), n, 0, sampling.bits_of(1.0, "<f"), 0, 5, 0
    cuda_simulator.simulate_own(
        verify.KERNEL, verify.Shape("float32", 2, 64, True, True), arrays, numbers, rows, folder
    )
    assert arrays["accepted"].tolist() == [1] * rows


def gather_support(folder: Path) -> None:
    """Run the kernel that gathers the tokens of rows, of which the second keeps more than are wanted."""
    rows, most = 3, 100
    ids = np.zeros(rows * most, np.int64)
    arrays = {
        "listed": np.tile(np.arange(most)[::-1], rows), "kept": np.array([most, most + 1, 3]), "token_ids": ids,
        "offsets": np.zeros(rows + 1, np.int64),
    }  # fmt: skip
    cuda_simulator.simulate_own(support.KERNEL, support.Shape(64), arrays, (rows, most, most), rows, folder)
    assert ids.tolist() == [*range(most), 97, 98, 99, *[-1] * (2 * most - 3)]


RULE = checked_rule("route", 48, 4, "softmax", "score_first", (4, 2, "top2_sum"), True, 1.0)
"""A rule with groups of experts."""

LONG_LISTS = checked_rule("route", 96, 12, "softmax", "score_first", (None, None, "top2_sum"), True, 1.0)
"""A rule for which a lane ranks five keys, so that lists are not packed."""

SORTED_KEYS = checked_rule("route", 64, 6, "softmax", "score_first", (None, None, "top2_sum"), True, 1.0)
"""A rule for which a network sorts keys."""


def choose_experts(rule: Rule, folder: Path) -> None:
    """Run the kernel that routes, on several tokens of each team, of two blocks of a sequence."""
    tokens, experts, k = 80, rule.experts, rule.k
    flags = frozenset({"COUNTS", "PROB_SUMS", *({"GROUPED", "SCORED_GROUPS"} if rule.groups > 1 else {"LOSSES"})})
    shape = routing.shape_of(rule, "float32", 4, flags, 1 << 20, 1, KNOWN["h100"])
    assert shape is not None
    shape = shape._replace(threads=64)
    arrays: dict[str, Any] = {
        "x": np.tile(np.linspace(-3, 3, experts, dtype=np.float32), (tokens, 1)),
        "weights": np.zeros((tokens, k), np.float32), "indices": np.zeros((tokens, k), np.int32),
        "lse": np.zeros(tokens, np.float32), "counts": np.zeros(experts, np.int32),
        "prob_sums": np.zeros(experts, np.float32), "balance": np.zeros(1, np.float32),
        "z_loss": np.zeros(1, np.float32), "slopes": np.zeros(experts + 1, np.float32),
        "words": np.zeros(routing.words_of(shape, rule, 1, 2), np.int64),
    }  # fmt: skip
    numbers = routing.numbers_of(shape, rule, experts, tokens, 2)
    cuda_simulator.simulate_own(routing.KERNEL, shape, arrays, numbers, 2, folder)
    assert arrays["counts"].tolist() == [0] * (experts - k) + [tokens] * k


def differentiate_routing(folder: Path) -> None:
    """Run the kernel of the gradient of a routing, on several tokens of each team."""
    tokens, experts = 40, RULE.experts
    shape = gradient.shape_of(RULE, "float32", 4, frozenset({"HAS_DWEIGHTS", "HAS_DPROB_SUMS", "HAS_DLSE"}))
    shape = shape._replace(threads=64)
    arrays: dict[str, Any] = {
        "x": np.zeros((tokens, experts), np.float32), "indices": np.tile(np.arange(4, dtype=np.int32), (tokens, 1)),
        "lse": np.full(tokens, np.log(experts), np.float32), "dweights": np.ones((tokens, 4), np.float32),
        "dprob_sums": np.ones(experts, np.float32), "dlse": np.ones(tokens, np.float32),
        "dx": np.zeros((tokens, experts), np.float32),
    }  # fmt: skip
    numbers = gradient.numbers_of(RULE, experts, tokens, 2)
    cuda_simulator.simulate_own(gradient.KERNEL, shape, arrays, numbers, 2, folder)
    assert np.allclose(arrays["dx"], 1 / experts, atol=1e-6)


def add_squares(folder: Path) -> None:
    """Run the kernel of the z-loss, on two blocks of a cluster."""
    tokens = 300
    arrays: dict[str, Any] = {
        "counts": np.ones(20, np.int32), "values": np.full(tokens, 2, np.float32),
        "loss": np.zeros(1, np.float32), "slopes": np.zeros(tokens, np.float32),
    }  # fmt: skip
    numbers = 1, 20, tokens, routing.bits_of(1)
    cuda_simulator.simulate_own(losses.KERNEL, losses.Shape(True, 64, 2), arrays, numbers, 1, folder)
    assert arrays["loss"] == 4 * tokens / 20


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
