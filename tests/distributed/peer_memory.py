"""Sharded rows whose GPUs exchange states through peer memory, in real processes on GPUs.

tests/kernels/test_cuda_shards.py runs the same kernels without a GPU.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import onlinesoftmax as osm
from distributed.processes import (
    COLS,
    EAGER,
    a_gradient_scaler_reaches_float16,
    agrees,
    device,
    random,
    same_everywhere,
)
from onlinesoftmax.distributed import mailboxes
from onlinesoftmax.kernels.cuda.process_mailboxes import MAIL

sharded = osm.distributed

PEER = {"exchange": "peer_memory"}


def shard_of(cols: int, *, empty: bool = False) -> sharded.Shards:
    """The columns of this process: uneven shares, or all columns on the last process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    cuts = [0] * size + [cols] if empty else [cols * i * (i + 3) // (size * (size + 3)) for i in range(size + 1)]
    return sharded.Shards(cuts[rank], cuts[rank + 1] - cuts[rank], cols)


def columns(shards: sharded.Shards) -> tuple[int, int]:
    """First column of this process, and the end."""
    return shards.first, shards.first + shards.cols


def launches() -> int:
    """Launches that have exchanged states through peer memory."""
    return sum(mail.launches for mail in MAIL.values())


LOSSES: tuple[dict[str, Any], ...] = (
    {}, {"weighted": True}, {"label_smoothing": 0.1, "weighted": True, "z_loss": 0.01}, {"softcap": 5.0},
    {"label_smoothing": 0.1, "softcap": 5.0, "scale": -0.5}, {"z_loss": 0.01, "scale": 0.7, "ignore_index": 3},
)  # fmt: skip

SHAPES = ((48, 37), (7, 1001), (300, 4099), (20, 70001))
"""Rows and columns: rows of less than a warp, of a group, of a block, and of a cluster."""


def some_logits(rows: int, cols: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logits, targets, weights); some columns have large logits, one row is ignored, and one has a large offset."""
    x = random(rows, cols, seed=rows)
    x[:, ::50] *= 20
    x[1] += 50
    target = (random(rows, seed=1, normal=False) * cols).long()
    target[0], target[1], target[2], target[3] = 0, cols - 1, cols // 2, -100
    return x.to(dtype), target, random(cols, seed=2, normal=False).to(dtype)


def losses() -> None:
    """Every option and reduction with its gradient, on uneven and empty shards; shapes and dtypes take turns."""
    for i, (rows, cols) in enumerate(SHAPES):
        for j, (one, reduction) in enumerate(itertools.product(LOSSES, ("mean", "sum", "none"))):
            if (i - j) % 2:
                continue
            dtype = (torch.bfloat16, torch.float32, torch.float64)[(i + j) % 3]
            x, target, weights = some_logits(rows, cols, dtype)
            options = {name: value for name, value in one.items() if name != "weighted"} | {"reduction": reduction}
            if "ignore_index" in one:
                target = target.clamp(min=0)
            weight = weights if "weighted" in one else None
            shards, before = shard_of(cols, empty=j % 5 == 3), launches()
            found = agrees(
                "cross_entropy", x, columns(shards), (target, weight), options, ours={"shards": shards, **PEER},
                theirs=EAGER, sizes=(None, 16.0),
            )  # fmt: skip
            assert launches() == before + 1
            # Without a gradient another kernel may run, which adds the columns in another order.
            again = sharded.cross_entropy(found.leaf.detach(), target, weight, **options, shards=shards, **PEER)
            same_everywhere(again)
            torch.testing.assert_close(again, found.results[0].detach())
            assert launches() == before + 2


def log_probabilities() -> None:
    """The three statistics and their gradients, with a mask and score options."""
    for (rows, cols), (i, options) in itertools.product(
        SHAPES, enumerate(({}, {"masked": True}, {"scale": 0.5, "softcap": 10.0, "entropy": False}))
    ):
        dtype = (torch.bfloat16, torch.float32)[i % 2]
        x, target, _ = some_logits(rows, cols, dtype)
        target = target.clamp(min=0)
        options, shards = dict(options), shard_of(cols, empty=i == 2)
        if options.pop("masked", False):
            options["mask"] = (random(rows, cols, seed=5, normal=False) < 0.7).scatter(1, target[:, None], True)
        agrees(
            "token_logprobs", x, columns(shards), (target, 1), options, ours={"shards": shards, **PEER}, theirs=EAGER,
            sizes=(None, 64.0),
        )  # fmt: skip


def softmax_and_its_like() -> None:
    """Softmax, log-softmax and logsumexp with options and gradients, by every strategy."""
    strategies = (None, "row", "cluster", "looped", "grid")
    for (rows, cols), (i, name), strategy in itertools.product(
        (*SHAPES[:3], (6, 3000001)), enumerate(("softmax", "log_softmax", "logsumexp")), strategies
    ):
        dtype = (torch.bfloat16, torch.float32, torch.float64)[(i + len(str(strategy))) % 3]
        shards = shard_of(cols, empty=strategy is None)
        if strategy in ("row", "cluster") and cols > 10000:
            continue
        x, _, _ = some_logits(rows, cols, dtype)
        options = {"scale": 0.5, "softcap": 30.0} if i == strategies.index(strategy) % 3 else {}
        # One process by the same kernels: the gradient of 16-bit logits is computed from a result of 16 bits.
        agrees(
            name, x, columns(shards), (1,), options, ours={"shards": shards, "strategy": strategy, **PEER},
            sizes=(None, 64.0),
        )  # fmt: skip


def calls_follow_each_other_closely() -> None:
    """Many calls of different sizes without a wait between them have the bits of calls that are waited for."""
    calls: list[Callable[[], torch.Tensor]] = []
    for rows, cols in ((64, 500), (3000, 70), (1, 40001), (700, 4096)):
        shards = shard_of(cols)
        x = random(rows, cols, seed=rows)[:, shards.first : shards.first + shards.cols].bfloat16().contiguous()
        target = (random(rows, seed=6, normal=False) * cols).long()
        given = {"shards": shards, **PEER}
        calls.append(lambda x=x, given=given: sharded.softmax(x, 1, **given))
        calls.append(lambda x=x, t=target, given=given: sharded.cross_entropy(x, t, reduction="none", **given))
    want = []
    for call in calls:
        want.append(call())
        torch.cuda.synchronize()
        dist.barrier()
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    found = []
    for i in range(400):
        # Every tenth call is made on another stream; the processes get ahead of each other by turns.
        with torch.cuda.stream(streams[i // 10 % 3]):
            if i % 50 == 7 * dist.get_rank():
                torch.cuda._sleep(2_000_000)
            found.append((i % len(calls), calls[i % len(calls)]()))
    torch.cuda.synchronize()
    for which, y in found:
        assert torch.equal(y, want[which])


def graphs() -> None:
    """Replays of captured calls, forward and backward, have the bits of calls, between which they stand."""
    shards = shard_of(70001)
    x = torch.empty(6, shards.cols, device=device(), dtype=torch.bfloat16).requires_grad_()
    target, given = (random(6, seed=6, normal=False) * 70001).long(), {"shards": shards, **PEER}

    def softmaxes() -> list[torch.Tensor]:
        strategies = (None, "cluster", "looped", "grid") if shards.cols > 1 else (None,)
        return [sharded.softmax(x.detach(), 1, strategy=strategy, **given) for strategy in strategies]

    def losses() -> list[torch.Tensor]:
        found = []
        for reduction in ("mean", "none"):
            loss = sharded.cross_entropy(x, target, reduction=reduction, **given)
            found += [loss.detach(), *torch.autograd.grad(loss.sum(), x)]
        logprobs = sharded.token_logprobs(x, target, **given)
        return [*found, logprobs.entropy.detach(), *torch.autograd.grad(logprobs.logprob.sum(), x)]

    def on_two_streams() -> list[torch.Tensor]:
        here, other = torch.cuda.current_stream(), torch.cuda.Stream()
        other.wait_stream(here)
        with torch.cuda.stream(other):
            found = sharded.logsumexp(x.detach(), 1, **given)
        again = sharded.log_softmax(x.detach(), 1, **given)
        here.wait_stream(other)
        return [found, again]

    captured = []
    for calls in (softmaxes, losses, on_two_streams):
        with torch.no_grad():
            x.copy_(random(6, shards.cols, seed=7))
        calls()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = calls()
        captured.append((calls, graph, results))
    before = launches()
    for i in range(30):
        calls, graph, results = captured[i * 7 % 3]
        with torch.no_grad():
            x.copy_(random(6, shards.cols, seed=100 + i))
        if i % 5 == dist.get_rank():
            torch.cuda._sleep(2_000_000)
        for _ in range(1 + i % 2):
            graph.replay()
        for found, want in zip(results, calls(), strict=True):
            assert torch.equal(found, want)
    # The calls, not the replays.
    assert launches() - before == 10 * (4 + 3 + 2)


def calls_that_cannot_use_peer_memory() -> None:
    """A forced exchange that cannot run is an error with the reason; others use a collective."""
    shards = shard_of(40)
    x = random(8, 40, seed=1)[:, shards.first : shards.first + shards.cols]
    want = torch.softmax(random(8, 40, seed=1), 1)[:, shards.first : shards.first + shards.cols]
    for arguments, reason in (
        ({"backend": "triton"}, "only CUDA kernels exchange states"), ({"exchange": "letters"}, "exchange must be"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=reason):
            sharded.softmax(x, 1, shards=shards, **{**PEER, **arguments})
    before = launches()
    for more in ({"exchange": "collective"}, {"backend": "triton"}, {"backend": "eager"}):
        torch.testing.assert_close(sharded.softmax(x, 1, shards=shards, **more), want)
    many = x.new_zeros(100_000, shards.cols)
    with (
        torch.cuda.graph(torch.cuda.CUDAGraph()),
        pytest.raises(ValueError, match="a CUDA graph is captured; make a call"),
    ):
        sharded.softmax(many, 1, shards=shards, **PEER)
    assert launches() == before
    torch.testing.assert_close(sharded.softmax(x, 1, shards=shards), want)
    assert launches() == before + 1
    leaf = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(sharded.softmax(leaf, 1, shards=shards)[0].sum(), leaf, retain_graph=True)
    assert dx.shape == leaf.shape
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(sharded.softmax(leaf, 1, shards=shards)[0].sum(), leaf, create_graph=True)


def calls_without_shards_wait_for_no_gpu() -> None:
    """The processes compare a repeated call while their GPUs are still busy, and it has the bits of one with shards."""
    shards = shard_of(500)
    x = random(64, 500, seed=8)[:, shards.first : shards.first + shards.cols].bfloat16().contiguous().requires_grad_()
    target = (random(64, seed=6, normal=False) * 500).long()
    want = sharded.cross_entropy(x, target, shards=shards, **PEER)
    for _ in range(3):
        sharded.cross_entropy(x, target, **PEER)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    before = launches()
    torch.cuda._sleep(2_000_000_000)
    found = sharded.cross_entropy(x, target, **PEER)
    assert not torch.cuda.current_stream().query(), "the call has waited for the GPU"
    assert launches() == before + 1
    assert torch.equal(found, want)


def dtensors() -> None:
    """Calls on DTensors exchange their states in the same way."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    x, target, _ = some_logits(48, 1001, torch.float32)
    calls: tuple[Callable[[Any], Any], ...] = (
        lambda t: osm.cross_entropy(t, target), lambda t: osm.token_logprobs(t, target.clamp(min=0)).logprob,
        lambda t: osm.softmax(t, 1), lambda t: osm.log_softmax(t, 1), lambda t: osm.logsumexp(t, 1),
    )  # fmt: skip
    cut, whole = distribute_tensor(x, mesh, [Shard(1)], src_data_rank=None).requires_grad_(), x.clone().requires_grad_()
    for call in calls:
        before = launches()
        found, want = call(cut), call(whole)
        assert launches() > before
        torch.testing.assert_close(found.full_tensor(), want, rtol=1e-5, atol=1e-5)
        (dx,) = torch.autograd.grad(found.sum(), cut)
        (expected,) = torch.autograd.grad(want.sum(), whole)
        torch.testing.assert_close(dx.full_tensor(), expected, rtol=1e-5, atol=1e-5)


def another_group() -> None:
    """Groups have mailboxes of their own; those of a group that grows are replaced."""
    group = dist.new_group()
    shards = shard_of(64)
    for rows in (5, 5000, 100_000, 7):
        x = random(rows, 64, seed=rows)
        local = x[:, shards.first : shards.first + shards.cols]
        found = sharded.softmax(local, 1, group, shards=shards, **PEER)
        torch.testing.assert_close(found, x.softmax(1)[:, shards.first : shards.first + shards.cols])
    assert mailboxes.known_exchange(group) not in ("", mailboxes.COLLECTIVE, mailboxes.known_exchange(dist.group.WORLD))


def float16_waits_for_a_gradient_scaler() -> None:
    shards, before = shard_of(COLS), launches()
    a_gradient_scaler_reaches_float16(*columns(shards), {"shards": shards, **PEER})
    assert launches() == before + 2


CHECKS: tuple[Callable[[], None], ...] = (
    losses, log_probabilities, softmax_and_its_like, calls_follow_each_other_closely, graphs,
    calls_that_cannot_use_peer_memory, calls_without_shards_wait_for_no_gpu, dtensors, another_group,
    float16_waits_for_a_gradient_scaler,
)  # fmt: skip


def one_check(name: str, *_: int) -> None:
    """One of CHECKS by its name."""
    next(check for check in CHECKS if check.__name__ == name)()


def a_process_is_late(*_: int) -> None:
    """A kernel that waits longer than the timeout ends its process with an error."""
    shards = shard_of(64)
    x = torch.zeros(5, shards.cols, device=device())
    sharded.softmax(x[:4], 1, shards=shards, **PEER)
    torch.cuda.synchronize()
    # Launches of another shape are prepared with this timeout.
    (mail,) = MAIL.values()
    mail.timeout_ns = int(2e9)
    if dist.get_rank():
        time.sleep(8)
        os._exit(0)
    start = time.monotonic()
    try:
        sharded.softmax(x, 1, shards=shards, **PEER)
        torch.cuda.synchronize()
    except RuntimeError as error:
        # This process can use its GPU no more, so it cannot end in an orderly way.
        os._exit(not ("device-side assert" in str(error) and 1 < time.monotonic() - start < 6))
    os._exit(2)
