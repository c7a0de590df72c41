"""Sampling from sharded rows, against one process that has whole rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import onlinesoftmax as osm
from distributed.dtensors import BY_DIMENSIONS, cut_tensor, meshes, near, rows_of, tensor
from distributed.processes import COLS, device, random, same_everywhere, sharded
from onlinesoftmax.core.processes import gathered
from onlinesoftmax.distributed.sampling import leaders, run, thresholds

Tensor = torch.Tensor

ROWS = 8


FILTERS: tuple[dict[str, Any], ...] = (
    {}, {"top_k": 5}, {"top_k": 1}, {"top_k": COLS - 1}, {"top_p": 0.8}, {"top_p": 0.0}, {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02}, {"top_k": [5, 0, -1, 99, 1, 20, 3, 8]},
    {"top_k": [5, 0, -1, 99, 1, 20, 3, 8], "top_p": [0.9, 1.0, 0.5, 0.99, 0.3, 2.0, 0.0, 0.7]},
)  # fmt: skip


def agrees(x: Tensor, columns: tuple[int, int], **options: Any) -> Any:
    """The results, which are those of whole rows (rows, columns) on one process.

    Args:
        x: Whole rows.
        columns: First column of this process, and the end.
        options: Keyword arguments; bias and mask are those of whole rows.
    """
    part = slice(*columns)
    given = {key: tensor(value) if isinstance(value, list) else value for key, value in options.items()}
    own = {key: value[..., part] if key in ("bias", "mask") else value for key, value in given.items()}
    found, whole = sharded.sample(x[..., part], **own), osm.sample(x, **given)
    for name in ("token", "kept", "valid", "top_tokens"):
        ours, want = getattr(found, name), getattr(whole, name)
        assert torch.equal(ours, want) if want is not None else ours is None, (name, options)
    if whole.support is not None:
        assert all(torch.equal(ours, want) for ours, want in zip(found.support, whole.support, strict=True))
    for name in ("logprob", "lse", "top_logprobs"):
        ours, want = getattr(found, name), getattr(whole, name)
        if want is not None:
            same_everywhere(ours.nan_to_num(7.0))
            # Sums of float64 logits depend on their order, and a GPU's kernel rounds a logarithm by itself.
            eps = 4 * torch.finfo(want.dtype).eps
            torch.testing.assert_close(ours, want, rtol=eps, atol=eps, equal_nan=True)
    return found


def tokens_are_those_of_whole_rows(first: int, end: int) -> None:
    """Every filter, with and without ties, warm and greedy rows, seeds of rows."""
    x = 3 * random(ROWS, COLS, seed=40)
    x[4:] = x[4:].round()
    x[6, ::3] = -torch.inf
    given = {"seed": [3, 1, 4, 1, 5, 2**62, 2, 6], "offset": [0, 1, 2, 3, 4, 2**33, 6, 7], "top_logprobs": 9}
    given["temperature"] = [1.0, 0.7, 0.0, 2.0, 1.0, 1e-6, 0.0, 1e6]
    for filters in FILTERS:
        agrees(x, (first, end), **given, **filters, return_support=12)
        agrees(x, (first, end), ties="first", logprobs="raw", **given, **filters)
        for dtype in (torch.float64, torch.bfloat16):
            with mock.patch.object(run, "PIECE", 3 * COLS):
                agrees(x.to(dtype), (first, end), ties="first", **given, **filters)


def long_rows(first: int, end: int) -> None:
    """Bins that are cut again and again, many equal scores, and a top_k that is too large for candidates."""
    scale = 90
    x, columns = 2 * random(3, COLS * scale, seed=41), (first * scale, end * scale)
    narrow = x.bfloat16()
    some = ({"top_k": 1500}, {"top_p": 0.95}, {"top_k": 1100, "top_p": 0.7}, {"top_k": 50, "top_p": 0.9})
    for i, (filters, rows) in enumerate(itertools.product(some, (x, narrow, x.double(), torch.zeros_like(x)))):
        # On a CPU, both kinds of ties meet each filter and each kind of rows.
        for ties in ("keep", "first") if x.is_cuda else (("keep", "first")[(i + i // 4) % 2],):
            agrees(rows, columns, seed=[7, 8, 9], ties=ties, **filters)


def hard_rows(first: int, end: int) -> None:
    """NaN on one process, only -inf on some and on all, +inf, equal scores on several processes, bad parameters."""
    inf, nan = torch.inf, torch.nan
    x = random(ROWS, COLS, seed=42)
    x[0, 36], x[1], x[2, :20], x[3, 20:] = nan, -inf, -inf, -inf
    x[4, 3] = x[4, 30] = inf
    x[5] = 1.0
    temperature = [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, -1.0, nan]
    for filters in FILTERS[:4] + FILTERS[7:]:
        found = agrees(x, (first, end), seed=list(range(ROWS)), temperature=temperature, top_logprobs=COLS, **filters)
        assert found.valid.tolist() == [False, False, True, True, True, True, False, False]
        assert found.token[5] == 0
    for ties in ("keep", "first"):
        for filters in ({"top_k": 4}, {"top_k": [4] * ROWS}, {"top_p": 0.3}):
            found = agrees(torch.ones_like(x), (first, end), seed=list(range(ROWS)), ties=ties, **filters)
            assert (found.kept == (COLS if ties == "keep" else 12 if "top_p" in filters else 4)).all()
    agrees(x[:0], (first, end), top_p=0.5, top_logprobs=3, seed=1)


def options_and_shapes(first: int, end: int) -> None:
    x, bias, mask = 4 * random(2, 4, COLS, seed=43), random(COLS, seed=44), random(2, 4, COLS, seed=45) > -0.5
    given = {"softcap": 3.0, "bias": bias, "mask": mask, "top_p": 0.9, "seed": [[1, 2, 3, 4], [5, 6, 7, 8]]}
    found = agrees(x, (first, end), **given, top_logprobs=2)
    assert found.top_tokens.shape == (2, 4, 2)
    shards = sharded.Shards(first, end - first, COLS)
    across = sharded.sample(x.movedim(2, 0)[first:end], 0, seed=5, top_k=3, shards=shards)
    assert torch.equal(across.token, osm.sample(x, seed=5, top_k=3).token)
    one = sharded.sample(x[0, 0, first:end], temperature=0, shards=shards)
    assert one.token == x[0, 0].argmax()


def largest_log_probabilities(first: int, end: int) -> None:
    """Values, gradients and ranks; ties, masked tokens, targets that are no tokens, rows without a distribution."""
    x = 3 * random(2, 4, COLS, seed=51)
    x[1] = x[1].round() + 50
    mask, target = random(2, 4, COLS, seed=52) > -1, tensor([[0, 36, 19, 20], [5, -1, COLS, 7]])
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for k, options in ((3, {}), (COLS, {"softcap": 9.0, "mask": mask, "scale": 0.7}), (0, {})):
            whole = x.to(dtype).requires_grad_()
            own = options | ({"mask": mask[..., first:end]} if "mask" in options else {})
            local = whole.detach()[..., first:end].requires_grad_()
            found = sharded.topk_logprobs(local, k, target=target, **own)
            want = osm.topk_logprobs(whole, k, target=target, **options)
            for ours, theirs in zip(found, want, strict=True):
                same_everywhere(ours.nan_to_num(7.0))
                torch.testing.assert_close(ours, theirs, equal_nan=True)
            for name in ("values", "logprobs", "target_logprob", "lse"):
                ours, theirs = getattr(found, name), getattr(want, name)
                dy = random(*theirs.shape, seed=53).to(theirs.dtype).where(theirs.isfinite(), 0)
                (dx,) = torch.autograd.grad(ours, local, dy, retain_graph=True, materialize_grads=True)
                (exact,) = torch.autograd.grad(theirs, whole, dy, retain_graph=True, materialize_grads=True)
                torch.testing.assert_close(dx, exact[..., first:end])
    inf, nan = torch.inf, torch.nan
    hard = torch.zeros(5, COLS, device=device())
    hard[0, 36], hard[1], hard[2, 3], hard[3, 20:] = nan, -inf, inf, -inf
    target = tensor([36, 30, 2, 25, 1])
    found = sharded.topk_logprobs(hard[:, first:end].T, COLS, 0, target=target)
    torch.testing.assert_close(found, osm.topk_logprobs(hard.T, COLS, dim=0, target=target), equal_nan=True)
    assert sharded.topk_logprobs(hard[:0, first:end], 2, target=target[:0]).values.shape == (0, 2)


def seeds_are_those_of_the_first_process(first: int, end: int) -> None:
    x = torch.zeros(100, COLS, device=device())
    torch.manual_seed(50 + dist.get_rank())
    found = sharded.sample(x[:, first:end])
    same_everywhere(found.token)
    generator = torch.Generator(device()).manual_seed(50)
    assert torch.equal(osm.sample(x, generator=generator).token, found.token)


def no_logits_travel(first: int, end: int) -> None:
    """The numbers that a process sends for each row."""
    scale = 30
    x = random(2, COLS * scale, seed=46)[:, first * scale : end * scale]
    for options, sent in (({}, (3, 5)), ({"top_k": 20}, (41, 5)), ({"min_p": 0.1, "top_logprobs": 5}, (11, 5))):
        found = mock.Mock(wraps=gathered)
        with mock.patch.object(run, "gathered", found), mock.patch.object(leaders, "gathered", found):
            sharded.sample(x, seed=1, shards=sharded.Shards(first * scale, x.shape[1], COLS * scale), **options)
        assert tuple(call.args[0].shape[1] for call in found.call_args_list) == sent
    with mock.patch.object(thresholds, "start_adding", wraps=thresholds.start_adding) as adding:
        sharded.sample(x, seed=1, top_p=0.9)
    assert [call.args[0].shape[1] for call in adding.call_args_list] == [2048, 2048, 1024]


def mistakes(first: int, end: int) -> None:
    x, rank = torch.zeros(2, end - first, device=device()), dist.get_rank()
    calls: tuple[tuple[type[Exception], str, Callable[[], Any]], ...] = (
        (ValueError, "the processes make different calls", lambda: sharded.sample(x, temperature=1.0 + rank, seed=1)),
        (ValueError, "rank 0: .*rank 1: ", lambda: sharded.sample(x[: 1 + rank], seed=1)),
        (ValueError, "no process has a token", lambda: sharded.sample(x[:, :0])),
        (ValueError, "top_logprobs must be from 0 to the 37 tokens", lambda: sharded.sample(x, top_logprobs=COLS + 1)),
        (ValueError, "top_p must be at least 0, got -1", lambda: sharded.sample(x, top_p=-1.0)),
        (ValueError, "does not fit a local tensor", lambda: sharded.sample(x, shards=sharded.Shards(0, COLS + 1, 99))),
        (RuntimeError, "bias of shape", lambda: sharded.sample(x, bias=torch.zeros(COLS + 1, device=device()))),
        (ValueError, "k must be from 0 to the 37 tokens", lambda: sharded.topk_logprobs(x, COLS + 1)),
        (TypeError, "scale must be a number, not Tensor", lambda: sharded.topk_logprobs(x, 1, scale=torch.ones(()))),
        (TypeError, "argument 'local' must be Tensor", lambda: sharded.sample([0.0])),
    )  # fmt: skip
    for kind, message, call in calls:
        with pytest.raises(kind, match=message):
            call()


def on_meshes(*_: int) -> None:
    """DTensors with every placement of rows and tokens, uneven ones too; seeds that are given and drawn."""
    x, bias, mask = 3 * random(5, 13, seed=47), random(13, seed=48), random(5, 13, seed=49) > -1
    given: dict[str, Any] = {"temperature": tensor([1.0, 0.0, 2.0, 0.5, 1.0]), "top_logprobs": 3, "bias": bias}
    given |= {"softcap": 6.0, "mask": mask, "seed": tensor([5, 6, 7, 8, 9]), "top_k": 6, "top_p": tensor(0.9)}
    torch.manual_seed(dist.get_rank())
    for mesh in meshes():
        for placements in BY_DIMENSIONS[mesh.ndim]:
            cut = cut_tensor(x, mesh, placements)
            found = osm.sample(cut, **{**given, "mask": cut_tensor(mask, mesh, placements)})
            for ours, want in zip(found, osm.sample(x, **given), strict=True):
                if want is not None:
                    near(ours, want, rows_of(placements))
            if placements == (Shard(0), Shard(0)):
                continue  # no process has the rows of another
            drawn = osm.sample(cut).token
            assert all(torch.equal(t, drawn.full_tensor()) for t in gathered(drawn.full_tensor(), dist.group.WORLD))
    mesh = meshes()[0]
    cut = cut_tensor(x, mesh, (Shard(1),))
    calls: tuple[tuple[type[Exception], str, Callable[[], Any]], ...] = (
        (ValueError, "the processes make different calls", lambda: osm.sample(cut, top_p=0.1 * dist.get_rank())),
        (ValueError, "seed must be a number or have one for each row", lambda: osm.sample(cut, seed=tensor([1, 2]))),
        (TypeError, "local is a DTensor: call onlinesoftmax.sample", lambda: sharded.sample(cut)),
        (TypeError, "is a DTensor, which this function does not take", lambda: osm.topk_logprobs(cut, 3)),
    )  # fmt: skip
    for kind, message, call in calls:
        with pytest.raises(kind, match=message):
            call()


def everything(first: int, end: int) -> None:
    """All checks of sampling, but for DTensors."""
    tokens_are_those_of_whole_rows(first, end)
    long_rows(first, end)
    hard_rows(first, end)
    options_and_shapes(first, end)
    largest_log_probabilities(first, end)
    seeds_are_those_of_the_first_process(first, end)
    no_logits_travel(first, end)
    mistakes(first, end)
