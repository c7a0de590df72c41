"""Errors of processes that make different calls, or whose group loses a process."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import onlinesoftmax as osm
from distributed.processes import COLS, device, random
from onlinesoftmax.core import agreement
from onlinesoftmax.core.accumulators import Argmax, PlainSum

sharded = osm.distributed


def different_rows_are_an_error(first: int, end: int) -> None:
    """Every process gets the same error, with the shape of each, also where calls of both shapes have been made."""
    odd = dist.get_rank() % 2
    for _ in range(2):
        with pytest.raises(ValueError, match=r"rank 0: \(4, .*rank 1: \(5, "):
            sharded.logsumexp(torch.zeros(4 + odd, end - first, device=device()))
        for rows in (4, 5):
            sharded.logsumexp(torch.zeros(rows, end - first, device=device()))


def other_columns_are_no_error(first: int, end: int) -> None:
    """A repeated call finds the columns of the other processes anew."""
    x, target, last = random(4, COLS, seed=3), torch.tensor([0, 35, 9, 5], device=device()), dist.get_world_size() - 1
    for cols in (COLS, COLS - 1, COLS):
        local = x[:, first : end - (dist.get_rank() == last) * (COLS - cols)]
        want = torch.nn.functional.cross_entropy(x[:, :cols], target)
        for _ in range(2):
            torch.testing.assert_close(sharded.cross_entropy(local, target), want)
            torch.testing.assert_close(
                sharded.softmax(local), x[:, :cols].softmax(1)[:, first : first + local.shape[1]]
            )


def different_dtypes_are_an_error(first: int, end: int) -> None:
    """States of different dtypes have different sizes: their exchange would end the process."""
    x = torch.zeros(4, end - first, device=device(), dtype=torch.float64 if dist.get_rank() else torch.float32)
    with pytest.raises(ValueError, match=r"float32 with dim 1, rank 1: \(4, .*float64 with dim 1"):
        sharded.softmax(x)


def different_calls_are_an_error(first: int, end: int) -> None:
    """Exchanges of the states of different calls would have different sizes or meanings.

    After the error, the processes go on together.
    """
    x, rank = torch.zeros(4, end - first, device=device()), dist.get_rank()
    target = torch.zeros(4, dtype=torch.long, device=device())
    calls: tuple[tuple[Callable[[int], object], str], ...] = (
        (lambda odd: (sharded.logsumexp if odd else sharded.softmax)(x), r"rank 0: softmax\(.*; rank 1: logsumexp\("),
        (
            lambda odd: sharded.softmax(x, scale=1 + odd),
            r"rank 0: softmax\(scale=1\.0, .*1: softmax\(scale=2\.0, ",
        ),
        (lambda odd: sharded.logsumexp(x, softcap=9 if odd else None), "softcap=None, .*softcap=9.0, "),
        (lambda odd: sharded.token_logprobs(x, target, entropy=not odd), "entropy=True, .*entropy=False, "),
        (
            lambda odd: sharded.cross_entropy(x, target, label_smoothing=odd / 4),
            "smoothing=0.0, .*smoothing=0.25, ",
        ),
        (lambda odd: sharded.cross_entropy(x, target, reduction=("mean", "sum")[odd]), "reduction='mean', .*='sum', "),
        (
            lambda odd: sharded.cross_entropy(x, target, exchange=(None, "collective")[odd]),
            "exchange=.*exchange='collective'",
        ),
        (lambda odd: sharded.softmax(x, backend="eager" if odd else None), r"backend=None.*backend='eager'"),
        (lambda odd: sharded.cross_entropy(x, target[: 4 - odd]), r"target='\(4,\) int64'.*target='\(3,\) int64'"),
        (
            lambda odd: sharded.cross_entropy(x, target, torch.ones(COLS, device=device()) if odd else None),
            r"weight='NoneType'.*weight='\(37,\) float32'",
        ),
    )
    for call, message in calls:
        for _ in range(2):
            with pytest.raises(ValueError, match=r"the processes make different calls; .*" + message):
                call(rank % 2)
            # A repeated call is compared with what the other processes call now.
            for alike in (0, 1, 0):
                with contextlib.suppress(ValueError):
                    call(alike)
    sharded.cross_entropy(x, target, label_smoothing=0)
    sharded.token_logprobs(x, target, entropy=bool(rank % 2) or 1)


def different_states_are_an_error(first: int, end: int) -> None:
    """States of other shapes, dtypes, dimensions or accumulators have no merged state; nothing is sent."""
    x, odd = random(4, 4, seed=9), dist.get_rank() % 2
    of = osm.State.of
    states: tuple[tuple[Callable[[int], osm.State], str], ...] = (
        (lambda odd: of(x[: 4 - odd], 1), r"rank 0: .*m='\(4, 1\) float32'.*; rank 1: .*m='\(3, 1\) float32'"),
        (lambda odd: of(x[:1, :1], 1 - odd), r"dim=-1.*dim=-2"),
        (lambda odd: of(x.double() if odd else x, 1), r"\(4, 1\) float32.*\(4, 1\) float64"),
        (lambda odd: of(x, 1, weights={"ab"[odd]: x}), r"sums=\{'a'.*sums=\{'b'"),
        (lambda odd: of(x, 1, weights={"a": x} if odd else None), r"sums=\{\}.*sums=\{'a'"),
        (lambda odd: of(x, 1, more={"a": PlainSum(x)} if odd else None), r"sums=\{\}.*more=\{'a': 'PlainSum'"),
        (lambda odd: osm.State(x[:, :1], x[: 4 - 2 * odd, :1] + 5, -1), r"l='\(4, 1\) .*l='\(2, 1\)"),
    )
    for state, message in states:
        with pytest.raises(ValueError, match=r"State.all_reduce\(\): the processes make different calls; .*" + message):
            state(odd).all_reduce()
    with pytest.raises(ValueError, match=r"rank 0: State.all_reduce\(.*rank 1: logsumexp\("):
        (lambda: sharded.logsumexp(x) if odd else of(x, 1).all_reduce())()
    columns = torch.arange(4, device=x.device)
    parts = [
        of(key := random(4, 4, seed=rank), 1, weights={"b": x, "a": x}, more={"c": Argmax(key, columns + 4 * rank)})
        for rank in range(dist.get_world_size())
    ]
    found, want = parts[dist.get_rank()].all_reduce(), osm.State.merge_all(parts)
    for name in ("a", "b", "c"):
        torch.testing.assert_close(found.finish(name), want.finish(name))


def a_process_outside_of_the_group(first: int, end: int) -> None:
    """PyTorch gives a number instead of a group to the processes that are not part of it."""
    group = dist.new_group([0])
    x, target = torch.zeros(4, end - first, device=device()), torch.zeros(4, dtype=torch.long, device=device())
    calls: tuple[Callable[[], object], ...] = (
        lambda: sharded.softmax(x, group=group),
        lambda: sharded.cross_entropy(x, target, group=group, shards=sharded.Shards(first, end - first, COLS)),
        lambda: osm.State.of(x, 1).all_reduce(group),
    )
    for call in calls:
        outside = pytest.raises(RuntimeError, match="this process is not part of the group")
        with outside if dist.get_rank() else contextlib.nullcontext():
            call()


def a_process_is_late(first: int, end: int) -> None:
    """A process that raises an error of its own and lives on ends the calls of the others within the timeout."""
    x = torch.zeros(4, end - first)
    for called_before in (False, True):
        group = dist.new_group(timeout=timedelta(seconds=1))
        if called_before:
            sharded.logsumexp(x, group=group)
        if dist.get_rank() == 1:
            time.sleep(2)
            continue
        start = time.monotonic()
        # The second call does not take the late answer to the first one for its own.
        for _ in range(2):
            with pytest.raises(RuntimeError, match="did not make the same call within the group's timeout"):
                sharded.logsumexp(x, group=group)
        assert time.monotonic() - start < 2


def a_process_dies(first: int, end: int) -> None:
    """The others end with an error before the group's timeout, and do not wait forever."""
    x = torch.zeros(4, end - first)
    sharded.logsumexp(x)
    if dist.get_rank() == 1:
        os._exit(0)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="another process has ended"):  # noqa: PT012  the process ends meanwhile
        for _ in range(100):
            sharded.logsumexp(x)
    assert time.monotonic() - start < 30
    # A group with a dead process cannot be taken down in an orderly way.
    os._exit(0)


def without_sockets(first: int, end: int) -> None:
    """Processes on several hosts compare their calls by a collective."""
    with mock.patch.object(agreement, "_connections", return_value=None if dist.get_rank() else []):
        sharded.logsumexp(torch.zeros(1, 1, device=device()))
    assert not agreement.connected_by_sockets((dist.group.WORLD,), device())
    different_rows_are_an_error(first, end)
    different_calls_are_an_error(first, end)
    different_states_are_an_error(first, end)


def everything(first: int, end: int) -> None:
    """All mistakes after which the processes go on together."""
    different_rows_are_an_error(first, end)
    other_columns_are_no_error(first, end)
    assert agreement.connected_by_sockets((dist.group.WORLD,), device())
    different_dtypes_are_an_error(first, end)
    different_calls_are_an_error(first, end)
    different_states_are_an_error(first, end)
    a_process_outside_of_the_group(first, end)
