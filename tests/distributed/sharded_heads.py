"""The head without logits whose classes are sharded, against one process that has all classes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import onlinesoftmax as osm
from distributed.dtensors import cut_tensor, meshes
from distributed.peer_memory import launches
from distributed.processes import COLS, device, kernels_run, random, same_everywhere, sharded
from onlinesoftmax.core.processes import gathered
from onlinesoftmax.core.task import Choice
from onlinesoftmax.distributed import mailboxes
from onlinesoftmax.linear import plans, rows
from onlinesoftmax.linear.problem import problem_of

Tensor = torch.Tensor

TOKENS, HIDDEN = (2, 5), 7

CLASSES = 1001
"""Classes of a larger head."""

SMALL = {"TOKEN_TILE": 7, "COLUMN_TILE": 1, "FEWEST_TOKENS": 7, "FEWEST_COLUMNS": 4, "COLUMN_BYTES": 1}
"""Sizes with which the planner cuts small problems."""


def head(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(input, weight, bias, target) of all classes; one target is ignored, and one class is padding."""
    x, w, b = (
        random(*shape, seed=seed).to(dtype)
        for seed, shape in enumerate(((*TOKENS, HIDDEN), (COLS, HIDDEN), (COLS,)), 20)
    )
    b[30] = -torch.inf
    target = torch.tensor([[0, 36, -100, 19, 20], [7, 6, 21, 5, 8]], device=device())
    return x, w, b, target


def memories(largest: int) -> dict[str, int | None]:
    """Bytes with which heads of `head` take each plan."""
    beside = 2 * HIDDEN  # the gradient of the input, and a copy of the input
    return {"stored": None, "tokens": 7 * 8 * (largest + beside), "columns": 10 * 8 * (4 + beside) + 60}


def agrees(name: str, given: tuple[Any, ...], columns: tuple[int, int], *more: Any, **options: Any) -> Any:
    """Results and gradients on sharded classes, and on one process, to the last digits of float64.

    Args:
        name: Name of the function.
        given: input, weight, bias and target of all classes.
        columns: First class of this process, and the end.
        more, options: Its other arguments; memory counts for ours alone.
    """
    first, end = columns
    memory = options.pop("memory", None)
    leaves = [[t.clone().requires_grad_() for t in given[:3]] for _ in range(2)]
    (x, w, b), theirs = leaves
    own = w[first:end], b[first:end]
    ours = getattr(sharded, name)(x, own[0], given[3], *more, linear_bias=own[1], memory=memory, **options)
    want = getattr(osm, name)(*theirs[:2], given[3], *more, linear_bias=theirs[2], **options)
    found, wanted = ((ys,) if isinstance(ys, Tensor) else tuple(ys) for ys in (ours, want))
    for y, exact in zip(found, wanted, strict=True):
        same_everywhere(y)
        torch.testing.assert_close(y, exact)
    dys = [random(*y.shape, seed=30 + i).to(y) for i, y in enumerate(found)]
    grads, exact = (torch.autograd.grad(ys, ts, dys) for ys, ts in ((found, (x, w, b)), (wanted, theirs)))
    same_everywhere(grads[0])
    torch.testing.assert_close(grads[0], exact[0])
    for mine, all_of_it in zip(grads[1:], exact[1:], strict=True):
        torch.testing.assert_close(mine[first:end], all_of_it[first:end])
    return ours


def losses_without_logits(first: int, end: int) -> None:
    """Every plan and reduction, with each option."""
    given, weight = head(), random(COLS, seed=24, normal=False).double()
    token_weight = random(*TOKENS, seed=25, normal=False).double()
    largest = int(gathered(torch.tensor(end - first, device=device()), dist.group.WORLD).max())
    problem = problem_of("linear_cross_entropy", (10, HIDDEN, largest), "float64", (True, True, True), travels=True)
    for plan, memory in memories(largest).items():
        assert plans.plan_of(problem, memory).name == plan
        for reduction in ("mean", "sum", "none"):
            columns = plan == "columns"
            for options in (
                {}, {"z_loss": 0.01, "softcap": 3.0, "scale": -1.3}, {"token_weight": token_weight, "scale": 0.7},
                *(() if columns else ({"weight": weight}, {"label_smoothing": 0.1, "weight": weight, "softcap": 4.0})),
            ):  # fmt: skip
                if "weight" in options and options.get("label_smoothing") and reduction == "mean":
                    options = options | {"z_loss": 0.01}
                agrees("linear_cross_entropy", given, (first, end), reduction=reduction, memory=memory, **options)


def log_probabilities_without_logits(first: int, end: int) -> None:
    given = head()
    for memory in (None, memories(COLS)["columns"]):
        for options in ({}, {"scale": 0.9, "softcap": 5.0, "ignore_index": 7}):
            agrees("linear_token_logprobs", (*given[:3], given[3].clamp(min=0)), (first, end), memory=memory, **options)


def clipped(logprob: Tensor, entropy: Tensor, lse: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    """PPO's loss of a token, with an entropy bonus and a penalty of lse."""
    ratio = (logprob - old).exp()
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) - 0.01 * entropy + 1e-3 * lse * lse


def losses_of_tokens(first: int, end: int) -> None:
    given = head()
    per_token = [random(*TOKENS, seed=26 + i).double() for i in range(2)]
    for memory in (None, memories(COLS)["tokens"]):
        for reduction in ("mean", "sum"):
            agrees("linear_token_loss", given, (first, end), clipped, *per_token, reduction=reduction, memory=memory)


def hard_tokens(first: int, end: int) -> None:
    """Targets out of range, NaN in an ignored token, everything ignored, no tokens, and 16 bits."""
    x, w, _, target = head()
    x[0, 2], target[1, 0], target[1, 1] = torch.nan, COLS, -3
    x, local = x.requires_grad_(), w[first:end].clone().requires_grad_()
    rows_found = sharded.linear_cross_entropy(x, local, target, reduction="none", z_loss=0.1)
    assert rows_found[1, :2].isnan().all()
    assert rows_found[0, 2] == 0
    kept = torch.ones(TOKENS, dtype=torch.bool, device=device())
    kept[0, 2] = kept[1, :2] = False
    whole = x.detach().clone().requires_grad_()
    want = osm.linear_cross_entropy(whole, w, target.where(kept, -100), reduction="none", z_loss=0.1)
    torch.testing.assert_close(rows_found[kept], want[kept])
    dx, dw = torch.autograd.grad(rows_found[kept].sum(), (x, local))
    torch.testing.assert_close(dx, torch.autograd.grad(want.sum(), whole)[0])
    assert (dx[~kept] == 0).all()
    assert dw.isfinite().all()
    for empty in (torch.full_like(target, -100), target[:, :0]):
        y = sharded.linear_cross_entropy(x[:, : empty.shape[1]], local, empty)
        assert y.isnan()
        assert all((g == 0).all() for g in torch.autograd.grad(y, (x, local)))
    narrow = [t.bfloat16().requires_grad_() for t in (w[:10, None], w[first:end])]
    labels = target.clamp(0, 36).view(10, 1)
    y = sharded.linear_cross_entropy(*narrow, labels, dtype=torch.float32)
    theirs = [t.detach().double().requires_grad_() for t in (narrow[0], w.bfloat16())]
    exact = osm.linear_cross_entropy(*theirs, labels)
    # Logits are rounded to bfloat16; the sums are not.
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=0)
    dx = torch.autograd.grad(y, narrow)[0]
    torch.testing.assert_close(dx.double(), torch.autograd.grad(exact, theirs)[0], rtol=2**-6, atol=2**-8)


def by_kernels(first: int, end: int) -> None:
    """Kernels read a chunk of logits and write the gradient over it."""
    if not kernels_run():
        return
    given = tuple(t.float() if t.is_floating_point() else t for t in head())
    weight = random(COLS, seed=24, normal=False)
    forced = {} if device().type == "cuda" else {"CHOICE": Choice("triton"), "why_not_kernels": lambda *_: None}
    with mock.patch.multiple(rows, **forced) if forced else nullcontext():
        for options in ({}, {"label_smoothing": 0.1}, {"label_smoothing": 0.1, "weight": weight}, {"softcap": 3.0}):
            agrees("linear_cross_entropy", given, (first, end), **options)
        agrees("linear_cross_entropy", given, (first, end), reduction="none", weight=weight)


def larger_heads(*_: int) -> None:
    """As near to float64 as one process in each dtype, on uneven and empty shards.

    Where GPUs exchange states through peer memory, one launch does it for each chunk.
    """
    options: tuple[dict[str, Any], ...] = (
        {}, {"label_smoothing": 0.1, "z_loss": 0.01}, {"softcap": 5.0, "reduction": "sum"},
        {"label_smoothing": 0.1, "weight": random(CLASSES, seed=43, normal=False)},
    )  # fmt: skip
    rank, size = dist.get_rank(), dist.get_world_size()
    by_peers = device().type == "cuda" and mailboxes.MOST_PROCESSES > 1
    cuts = [CLASSES * i * (i + 3) // (size * (size + 3)) for i in range(size + 1)]
    target = (random(48, seed=42, normal=False) * CLASSES).long()
    target[3] = -100
    for i, (dtype, given) in enumerate(itertools.product((torch.float32, torch.bfloat16, torch.float16), options)):
        given = {"dtype": torch.float32, **given}
        own = slice(*(cuts if i % 3 else [0] * size + [CLASSES])[rank : rank + 2])
        x, w = random(48, 24, seed=40).to(dtype), (0.6 * random(CLASSES, 24, seed=41)).to(dtype)
        before = launches()
        mine = with_gradients(sharded.linear_cross_entropy, x, w[own], target, **given)
        assert launches() == before + by_peers
        same_everywhere(mine[0])
        whole = with_gradients(osm.linear_cross_entropy, x, w, target, **given)
        exact = with_gradients(osm.linear_cross_entropy, x.double(), w.double(), target, **given | {"dtype": None})
        # The loss may be off by a unit in the last place; the roundings of a gradient's elements differ.  A product of
        # some classes, and the sum over processes, add float32 numbers up in another order than the product of all.
        eps = torch.finfo(dtype).eps
        for j, unit in enumerate((eps, eps / 4 + torch.finfo(torch.float32).eps, eps / 4)):
            found, one, right = (mine[j], whole[j], exact[j]) if j < 2 else (mine[j], whole[j][own], exact[j][own])
            assert not right.numel() or error_of(found, right) <= error_of(one, right) + unit


def with_gradients(function: Callable[..., Tensor], x: Tensor, w: Tensor, *more: Any, **options: Any) -> Any:
    """(loss, gradient of the input, gradient of the weight)."""
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    y = function(*leaves, *more, **options)
    return y.detach(), *torch.autograd.grad(y, leaves)


def error_of(found: Tensor, exact: Tensor) -> float:
    """Norm of the error over that of the exact values."""
    return float((found.double() - exact).norm() / exact.norm())


def mistakes(first: int, end: int) -> None:
    """Different calls are an error on every process; the others name the argument."""
    x, w, _, target = head()
    rank, local = dist.get_rank(), w[first:end]
    with pytest.raises(ValueError, match=r"linear_cross_entropy\(\): the processes make different calls"):
        sharded.linear_cross_entropy(x, local, target, scale=1.0 + rank)
    with pytest.raises(ValueError, match=r"linear_token_logprobs\(\): the processes make different calls"):
        sharded.linear_token_logprobs(x[:, rank:], local, target[:, rank:])
    with pytest.raises(ValueError, match=r"linear_cross_entropy\(\): the processes make different calls"):
        sharded.linear_cross_entropy(x, local, target, linear_bias=w[first : end + (rank == 0), 0])
    with pytest.raises(ValueError, match="linear_weight has no classes on any process"):
        sharded.linear_cross_entropy(x, w[:0], target)
    with pytest.raises(RuntimeError, match="target must have an integer dtype"):
        sharded.linear_cross_entropy(x, local, target.double())
    with pytest.raises(RuntimeError, match="weight must have shape"):
        sharded.linear_cross_entropy(x, local, target, weight=w[: COLS - 1, 0])
    with pytest.raises(ValueError, match="does not fit a local tensor"):
        sharded.linear_cross_entropy(x, local, target, shards=sharded.Shards(first, len(local) + 1, COLS))
    shards = sharded.Shards(first, len(local), COLS)
    found, want = (sharded.linear_cross_entropy(x, local, target, shards=given) for given in (shards, None))
    assert torch.equal(found, want)


CHECKS: tuple[Callable[..., None], ...] = (
    losses_without_logits, log_probabilities_without_logits, losses_of_tokens, hard_tokens, larger_heads, mistakes,
)  # fmt: skip


def everything(first: int, end: int) -> None:
    with mock.patch.multiple(plans, **SMALL):
        for check in CHECKS:
            check(first, end)
    by_kernels(first, end)


DTENSORS: dict[int, tuple[tuple[Any, Any], ...]] = {
    1: (
        ((Replicate(),), (Shard(0),)), ((Shard(1),), (Replicate(),)), ((Shard(0),), (Shard(0),)),
        ((Partial(),), (Shard(0),)), ((Replicate(),), (Replicate(),)),
    ),
    2: (
        ((Shard(1), Replicate()), (Replicate(), Shard(0))), ((Replicate(), Replicate()), (Shard(0), Shard(0))),
        ((Shard(1), Shard(0)), (Replicate(), Replicate())), ((Shard(0), Shard(1)), (Shard(0), Replicate())),
    ),
}  # fmt: skip
"""Placements of input and linear_weight on a mesh with so many dimensions."""


def agrees_on(mesh: Any, placements: tuple[Any, Any], name: str, *more: Any, **options: Any) -> None:
    """Results and gradients of DTensors, and of one process, to the last digits of float64."""
    x, w, b, target = head()
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    of_input, of_weight = placements
    partial = of_input == (Partial(),)
    parts = [DTensor.from_local(x / mesh.size(), mesh, of_input) if partial else cut_tensor(x, mesh, of_input)]
    parts += [cut_tensor(t, mesh, of_weight) for t in (w, b)]
    cuts = [t.requires_grad_() for t in parts]
    ours = getattr(osm, name)(cuts[0], cuts[1], target, *more, linear_bias=cuts[2], **options)
    options.pop("memory", None)
    want = getattr(osm, name)(*leaves[:2], target, *more, linear_bias=leaves[2], **options)
    found, wanted = ((ys,) if isinstance(ys, Tensor) else tuple(ys) for ys in (ours, want))
    # Where the classes are sharded, the tokens are not, and an input with partial sums is added up.
    tokens = [
        Replicate() if shared == Shard(0) or not own.is_shard() else own
        for own, shared in zip(of_input, of_weight, strict=True)
    ]
    for y, exact in zip(found, wanted, strict=True):
        assert list(y.placements) == (tokens if y.dim() else [Replicate()] * mesh.ndim)
        torch.testing.assert_close(y.full_tensor(), exact)
    dys = [random(*y.shape, seed=30 + i).double() for i, y in enumerate(wanted)]
    grads = torch.autograd.grad(
        found, cuts, [cut_tensor(dy, mesh, y.placements) for dy, y in zip(dys, found, strict=True)]
    )
    assert [p.is_partial() for p in grads[1].placements] == [p.is_shard() for p in tokens]
    assert list(grads[0].placements) == [Replicate() if p.is_partial() else p for p in of_input]
    for mine, exact in zip(grads, torch.autograd.grad(wanted, leaves, dys), strict=True):
        torch.testing.assert_close(mine.full_tensor(), exact)


def on_meshes(*_: int) -> None:
    """Every function with each placement; the tokens of a process may be none."""
    per_token = [random(*TOKENS, seed=26 + i).double() for i in range(2)]
    options: dict[str, Any] = {
        "weight": random(COLS, seed=24, normal=False).double(), "token_weight": per_token[0].abs(), "z_loss": 0.01
    }  # fmt: skip
    for mesh in meshes():
        for placements in DTENSORS[mesh.ndim]:
            try:
                for reduction in ("mean", "sum", "none"):
                    agrees_on(mesh, placements, "linear_cross_entropy", reduction=reduction, **options)
                with mock.patch.multiple(plans, **SMALL):
                    agrees_on(mesh, placements, "linear_cross_entropy", memory=5 * 8 * (COLS + HIDDEN))
                scale = random(*TOKENS, seed=28, normal=False).double()
                agrees_on(mesh, placements, "linear_token_logprobs", ignore_index=-100, scale=scale)
                agrees_on(mesh, placements, "linear_token_loss", clipped, *per_token)
            except BaseException as error:
                raise AssertionError(f"{placements} on {mesh}") from error
    other_calls_on(meshes()[0])


def other_calls_on(mesh: Any) -> None:
    """Class probabilities and statistics of whole classes, plain tensors beside DTensors, and errors."""
    x, w, _, target = head()
    whole, tokens = [Replicate()], cut_tensor(x, mesh, [Shard(1)])
    probabilities = random(*TOKENS, COLS, seed=27).double().softmax(-1)
    for labels in (target, probabilities):
        y, stats = osm.linear_cross_entropy(tokens, w, labels, return_stats=True)
        want, exact = osm.linear_cross_entropy(x, w, labels, return_stats=True)
        torch.testing.assert_close(y.full_tensor(), want)
        torch.testing.assert_close(stats.lse.full_tensor(), exact.lse)
    leaf, own = x.clone().requires_grad_(), x.clone().requires_grad_()
    classes = cut_tensor(w, mesh, [Shard(0)])
    osm.linear_cross_entropy(leaf, classes, target).backward()
    osm.linear_cross_entropy(own, w, target).backward()
    torch.testing.assert_close(leaf.grad, own.grad)
    nothing = osm.linear_cross_entropy(tokens, classes, torch.full_like(target, -100))
    assert nothing.full_tensor().isnan()
    rank = dist.get_rank()
    calls: tuple[tuple[type[Exception], str, Callable[[], Any]], ...] = (
        (NotImplementedError, "input is sharded along its last dimension",
         lambda: osm.linear_cross_entropy(cut_tensor(x, mesh, [Shard(2)]), w, target)),
        (NotImplementedError, "linear_weight is sharded along its last dimension",
         lambda: osm.linear_cross_entropy(x, cut_tensor(w, mesh, [Shard(1)]), target)),
        (NotImplementedError, "return_stats is not available",
         lambda: osm.linear_cross_entropy(x, classes, target, return_stats=True)),
        (NotImplementedError, "target with class probabilities is not available",
         lambda: osm.linear_cross_entropy(x, classes, probabilities)),
        (ValueError, "target has shape", lambda: osm.linear_token_logprobs(x, classes, target[:1])),
        (ValueError, "token_weight has shape",
         lambda: osm.linear_cross_entropy(tokens, w, target, token_weight=x[0, 0])),
        (TypeError, "target is a DTensor here",
         lambda: osm.linear_cross_entropy(x, w, cut_tensor(target, mesh, whole))),
        (TypeError, "linear_weight is a DTensor here", lambda: sharded.linear_cross_entropy(x, classes, target)),
        (ValueError, "the processes make different calls",
         lambda: osm.linear_cross_entropy(x, classes, target, scale=1.0 + rank)),
        (ValueError, "the processes make different calls",
         lambda: osm.linear_token_loss(tokens, w, target, clipped, reduction="sum" if rank else "mean")),
    )  # fmt: skip
    for kind, message, call in calls:
        with pytest.raises(kind, match=message):
            call()
