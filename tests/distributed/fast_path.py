"""Sharded losses by our kernels alone: against float64 and against the general path, and the launches that are kept.

On a CPU Triton's interpreter runs the kernels, if the calls force them.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import onlinesoftmax as osm
from distributed.processes import (
    COLS,
    EAGER,
    a_gradient_scaler_reaches_float16,
    agrees,
    device,
    inputs,
    kernels_run,
    random,
    same_everywhere,
    sharded,
)
from onlinesoftmax.distributed import collective
from onlinesoftmax.distributed.collective import CollectiveLaunches
from onlinesoftmax.distributed.fast_path import Known
from onlinesoftmax.torch import run as torch_run
from onlinesoftmax.torch.fast_path import PREPARED_CALLS


def how(first: int, end: int) -> dict[str, Any]:
    """Arguments with which a call runs on kernels alone, and is kept."""
    given: dict[str, Any] = {"shards": sharded.Shards(first, end - first, COLS)}
    return given if device().type == "cuda" else {**given, "backend": "triton"}


def prepared_calls() -> list[CollectiveLaunches]:
    """The calls that are prepared for a collective."""
    return [run for run in PREPARED_CALLS.values() if isinstance(run, CollectiveLaunches)]


def only_some() -> bool:
    """True for two processes on a CPU: the tests also start three, one without columns, which run every call."""
    return device().type == "cpu" and dist.get_world_size() == 2


@contextlib.contextmanager
def general_path() -> Iterator[None]:
    """Calls take the general way."""
    from onlinesoftmax.distributed import losses

    unknown = mock.patch.object(sharded, "look_up", lambda *given: Known(given[3]))
    with unknown, mock.patch.object(losses, "run_if_possible", return_value=None):
        yield


LOSSES: tuple[dict[str, Any], ...] = (
    {}, {"z_loss": 0.01}, {"ignore_index": 19}, {"weighted": True, "scale": -0.5}, {"softcap": 5.0, "z_loss": 0.1},
    {"label_smoothing": 0.1}, {"label_smoothing": 0.1, "z_loss": 0.01, "scale": 0.7},
)  # fmt: skip


def losses_are_as_good_as_those_of_one_process(first: int, end: int) -> None:
    """Every reduction meets every option; dtypes take turns.  The launches of a kind of call are prepared once."""
    for i, reduction in enumerate(("mean", "sum", "none")):
        for j, one in enumerate(LOSSES):
            if only_some() and (i + 2 * j) % 3:
                continue
            dtype = (torch.bfloat16, torch.float32, torch.float64)[(i + j) % 3]
            x, target, weights = inputs(dtype)
            options = {name: value for name, value in one.items() if name != "weighted"} | {"reduction": reduction}
            weight = weights if "weighted" in one else None
            if "ignore_index" in one:
                target = target.clamp(min=0)
            before = len(prepared_calls())
            found = agrees(
                "cross_entropy", x, (first, end), (target, weight), options, ours=how(first, end), theirs=EAGER,
                again=True,
            )  # fmt: skip
            assert len(prepared_calls()) == before + 1
            again = sharded.cross_entropy(found.leaf.detach(), target, weight, **options, **how(first, end))
            assert torch.equal(again, found.results[0])
            assert not again.requires_grad
            # The second gradient has the same bits, and takes the launches of the first.
            (dx,) = torch.autograd.grad(found.results, found.leaf, found.dys)
            assert torch.equal(dx, found.gradient)


def hard_rows(first: int, end: int) -> None:
    """Ignored rows with NaN, infinities, rows of only -inf, a target at -inf, targets out of range."""
    x = random(9, COLS, seed=7)
    x[0], x[1, 30], x[2], x[3, 5], x[7, :20], x[8, 20:] = (
        torch.nan, torch.inf, -torch.inf, -torch.inf, -torch.inf, -torch.inf
    )  # fmt: skip
    target = torch.tensor([-100, 1, 2, 5, COLS, -3, 0, 3, 36], device=device())
    for options in ({}, {"z_loss": 0.1}, {"label_smoothing": 0.1}):
        found = []
        for path in (contextlib.nullcontext(), general_path()):
            local = x[:, first:end].clone().requires_grad_()
            with path:
                rows = sharded.cross_entropy(local, target, reduction="none", **options, **how(first, end))
            found.append((rows.detach(), torch.autograd.grad(rows, local, torch.ones_like(rows))[0]))
        torch.testing.assert_close(*found, equal_nan=True)
        assert (found[0][1][[0, 4, 5]] == 0).all()
    rows = sharded.cross_entropy(x[:, first:end], target, reduction="none", **how(first, end))
    assert rows[[7, 8]].tolist() == [torch.inf, torch.inf]


def log_probabilities_have_all_gradients(first: int, end: int) -> None:
    """Each of the three results alone and together, with and without the entropy, with a mask, in any dimension."""
    for dtype, shape, dim in ((torch.bfloat16, (6, COLS), 1), (torch.float32, (2, COLS, 3), 1)):
        x = (3 * random(*shape, seed=21)).to(dtype)
        index = torch.tensor([0, 36, 5, 19, 20, 7], device=device()).view(*shape[:dim], *shape[dim + 1 :])
        mask = (random(*shape, seed=2, normal=False) < 0.7).scatter(dim, index.unsqueeze(dim), True)
        for options, entropy in (
            ({}, True),
            ({}, False),
            ({"mask": mask}, True),
            ({"scale": 0.5, "softcap": 10.0}, False),
        ):
            agrees(
                "token_logprobs", x, (first, end), (index, dim), {**options, "entropy": entropy}, dim=dim,
                ours=how(first, end), theirs=EAGER, alone=True, sizes=(60.0, 16.0),
            )  # fmt: skip


def logsumexps(first: int, end: int) -> None:
    for dtype, keepdim in itertools.product((torch.bfloat16, torch.float32), (False, True)):
        x = (3 * random(6, COLS, seed=22)).to(dtype)
        agrees("logsumexp", x, (first, end), (1, keepdim), ours=how(first, end), sizes=(20.0, 64.0))


class Subclass(torch.Tensor):
    """A tensor of another type, with PyTorch's own functions."""


def other_tensors(first: int, end: int) -> None:
    """Targets and weights with gaps, narrow targets, incoming gradients of one element, logits that are negated."""
    x, target, weights = inputs(torch.float32)
    target = target.clamp(min=0)
    want = torch.nn.functional.cross_entropy(x, target, weights)
    given = how(first, end)
    apart = torch.stack([target, target]).t()[:, 0]
    before = len(prepared_calls())
    for kind in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        torch.testing.assert_close(sharded.cross_entropy(x[:, first:end], apart.to(kind), weights, **given), want)
    gaps = torch.stack([weights, weights]).t()[:, 0]
    torch.testing.assert_close(sharded.cross_entropy(x[:, first:end], apart, gaps, **given), want)
    assert len(prepared_calls()) == before + 5
    for kind in (torch.nn.Buffer, Subclass):
        found = sharded.cross_entropy(x[:, first:end], kind(target), kind(weights), **given)
        torch.testing.assert_close(torch.Tensor(found), want)
    assert () not in PREPARED_CALLS
    local, whole = x[:, first:end].clone().requires_grad_(), x.clone().requires_grad_()
    # The gradient of a sum has the stride 0.
    sharded.cross_entropy(local, target, reduction="none", **given).sum().backward()
    torch.nn.functional.cross_entropy(whole, target, reduction="none").sum().backward()
    assert local.grad is not None
    assert whole.grad is not None
    torch.testing.assert_close(local.grad, whole.grad[:, first:end])
    negated = torch._neg_view(-x[:, first:end])
    torch.testing.assert_close(sharded.cross_entropy(negated, target, weights, **given), want)
    # A process without a gradient, and one whose shard has gaps, make the same exchange.
    local = x[:, first:end].clone().requires_grad_() if first else x.t().contiguous().t()[:, first:end]
    found = sharded.cross_entropy(local, target, weights, **given)
    same_everywhere(found)
    torch.testing.assert_close(found.detach(), want)


def arguments_are_checked_in_every_call(first: int, end: int) -> None:
    x, target, _ = inputs(torch.float32)
    given = how(first, end)
    for _ in range(2):
        sharded.cross_entropy(x[:, first:end], target, **given)
        for error, message, arguments, options in (
            (ValueError, "target has shape", (target[:3],), {}),
            (RuntimeError, "weight must have shape", (target, torch.ones(COLS - 1, device=device())), {}),
            (RuntimeError, "label_smoothing must be from 0 to 1", (target,), {"label_smoothing": 2.0}),
            (ValueError, "not a valid value for reduction", (target,), {"reduction": "median"}),
            (RuntimeError, "target must have an integer dtype", (target > 0,), {}),
            (ValueError, "does not fit a local tensor", (target,), {"shards": sharded.Shards(first, COLS + 1, COLS)}),
        ):
            with pytest.raises(error, match=message):
                sharded.cross_entropy(x[:, first:end], *arguments, **{**given, **options})


def repeated_calls_without_shards_find_their_launches(first: int, end: int) -> None:
    """They take the kept launches of calls with `shards=`, whose arguments are checked no more."""
    from onlinesoftmax.distributed import losses

    x, target, _ = inputs(torch.float32)
    x, index, given = x[:, first:end], target.clamp(min=0), how(first, end)

    def results() -> tuple[torch.Tensor, ...]:
        lses = sharded.logsumexp(x, 1, **given), sharded.logsumexp(x, -1, keepdim=True, **given)
        return sharded.cross_entropy(x, target, **given), *sharded.token_logprobs(x, index, **given), *lses

    want = results()
    assert want[-1].shape == (len(x), 1)
    del given["shards"]
    for _ in range(2):
        results()
    with mock.patch.object(losses, "run_if_possible", side_effect=AssertionError("another call is prepared")):
        assert all(map(torch.equal, results(), want))


def autocast_is_followed(first: int, end: int) -> None:
    """Results and gradients have the dtypes of one process, before, under and after autocast."""
    x, target, _ = inputs(torch.bfloat16)
    target = target.clamp(min=0)

    def dtypes(functions: Any, x: torch.Tensor, given: dict[str, Any]) -> list[torch.dtype]:
        leaf = x.clone().requires_grad_()
        results = [functions.cross_entropy(leaf, target, reduction=name, **given) for name in ("mean", "sum", "none")]
        results += [function(leaf, **given) for function in (functions.softmax, functions.log_softmax)]
        results += [functions.logsumexp(leaf, **given), *functions.token_logprobs(leaf, target, **given)]
        return [t.dtype for y in results for t in (y, torch.autograd.grad(y.sum(), leaf, retain_graph=True)[0])]

    for given in ({}, how(first, end)):
        for enabled in (False, True, False):
            with torch.autocast(x.device.type, torch.bfloat16, enabled=enabled):
                want = dtypes(osm, x, {})
                assert dtypes(sharded, x[:, first:end], given) == want
    local = x[:, first:end].clone().requires_grad_()
    with torch.autocast(x.device.type, torch.bfloat16):
        ours = sharded.cross_entropy(local, target, **how(first, end))
    torch.testing.assert_close(ours, osm.cross_entropy(x.float(), target))
    ours.backward()
    whole = x.float().requires_grad_()
    osm.cross_entropy(whole, target).backward()
    assert local.grad is not None
    assert whole.grad is not None
    torch.testing.assert_close(local.grad, whole.grad[:, first:end].bfloat16())


def autocast_on_a_gpu_gives_float32(first: int, end: int) -> None:
    """PyTorch's softmax, log_softmax and logsumexp have float32 results under autocast on a GPU alone."""
    x = inputs(torch.bfloat16)[0]
    before = torch_run._known_autocast_dtype
    torch_run._known_autocast_dtype = lambda *_: torch.float32
    try:
        for given in ({}, how(first, end)):
            for name in ("softmax", "log_softmax", "logsumexp"):
                local, whole = x[:, first:end].clone().requires_grad_(), x.float().requires_grad_()
                with torch.autocast(x.device.type, torch.bfloat16):
                    ours = getattr(sharded, name)(local, **given)
                theirs = getattr(osm, name)(whole)
                cut = (lambda t: t) if name == "logsumexp" else (lambda t: t[:, first:end])
                torch.testing.assert_close(ours, cut(theirs))
                dy = random(*theirs.shape, seed=4)
                (dx,) = torch.autograd.grad(ours, local, cut(dy))
                (want,) = torch.autograd.grad(theirs, whole, dy)
                torch.testing.assert_close(dx, want[:, first:end].bfloat16())
    finally:
        torch_run._known_autocast_dtype = before


def chunks_of_rows_give_the_same_results(first: int, end: int) -> None:
    """Rows in chunks: each chunk makes an exchange, and all are started before the first is waited for.

    The plan of a chunk may add the columns of a row in another order, so the last bits of a result may differ.  The
    interpreter takes most of its time for each row, so on a CPU there are as many short chunks.
    """
    started: list[str] = []

    def start_gathering(*arguments: Any) -> Callable[[], Any]:
        finish = begin(*arguments)
        started.append("started")
        return lambda: (started.append("ended"), finish())[1]

    real = collective.CHUNK_STEP
    weight = random(COLS, seed=25, normal=False) + 0.1
    limit, begin = collective.CHUNK_BYTES, collective.start_gathering
    collective.start_gathering = start_gathering
    try:
        log_probabilities = (
            {"entropy": True},
            {"entropy": False, "mask": "of rows"},
            {"entropy": True, "mask": "of one"},
        )
        for i, options in enumerate((*LOSSES, *log_probabilities)):
            if device().type == "cpu" and dist.get_world_size() > 2 and i % 3:
                # Two processes have run all of them.
                continue
            collective.CHUNK_STEP, rows = (real, 53) if device().type == "cuda" else (2, 7)
            x = (3 * random(rows, 2, COLS, seed=23)).transpose(1, 2).bfloat16()
            target = (random(rows, 2, seed=24, normal=False) * COLS).long()
            target[0], target[-1] = -100, COLS
            mask = random(rows, COLS, 2, seed=26, normal=False) < 0.9
            mask = mask.scatter(1, target.clamp(0, COLS - 1).unsqueeze(1), True)
            found = []
            for collective.CHUNK_BYTES in (limit, 1):
                PREPARED_CALLS.clear()
                started.clear()
                local = x[:, first:end].clone().requires_grad_()
                given = {**options, **how(first, end)}
                cuts = {}
                if kind := given.pop("mask", ""):
                    cuts = {"mask": mask if kind == "of rows" else mask[0]}
                if "entropy" in options:
                    cuts = {name: t.narrow(t.dim() - 2, first, end - first) for name, t in cuts.items()}
                    results = sharded.token_logprobs(local, target.clamp(0, COLS - 1), 1, **given, **cuts)
                    ys = [y for y in results if y is not None]
                else:
                    given["reduction"] = ("mean", "sum", "none")[i % 3]
                    some = weight if given.pop("weighted", False) else None
                    ys = [sharded.cross_entropy(local, target, some, **given)]
                total = sum((0.5 + j) * y.nan_to_num().sum() for j, y in enumerate(ys))
                dx = torch.autograd.grad(total, local)[0]
                found.append([*(y.detach() for y in ys), dx])
            assert started == ["started"] * 4 + ["ended"] * 4
            torch.testing.assert_close(*found, equal_nan=True)
    finally:
        collective.CHUNK_BYTES, collective.CHUNK_STEP, collective.start_gathering = limit, real, begin


def float16_waits_for_a_gradient_scaler(first: int, end: int) -> None:
    a_gradient_scaler_reaches_float16(first, end, how(first, end))


def no_tensor_is_kept(first: int, end: int) -> None:
    x, target, weight = (t.clone() for t in inputs(torch.float32))
    local = x[:, first:end].clone().requires_grad_()
    loss = sharded.cross_entropy(local, target, weight, **how(first, end))
    loss.backward()
    kept = [weakref.ref(t) for t in (local, target, weight, loss)]
    del x, target, weight, local, loss
    gc.collect()
    assert [t() for t in kept] == [None] * 4


def everything(first: int, end: int) -> None:
    if not kernels_run():
        return
    for check in (
        losses_are_as_good_as_those_of_one_process, hard_rows, log_probabilities_have_all_gradients, logsumexps,
        other_tensors, arguments_are_checked_in_every_call, repeated_calls_without_shards_find_their_launches,
        autocast_is_followed, autocast_on_a_gpu_gives_float32, float16_waits_for_a_gradient_scaler,
        no_tensor_is_kept, chunks_of_rows_give_the_same_results,
    ):  # fmt: skip
        if only_some() and check is autocast_is_followed:
            continue
        PREPARED_CALLS.clear()
        check(first, end)
