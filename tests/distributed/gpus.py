"""A short list of checks of two processes, on rows that take the kernels of real calls: over NCCL on GPUs, or gloo.

processes.py and dtensors.py check every combination of the options, which compiles many more kernels.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import onlinesoftmax as osm
from distributed.processes import EAGER, agrees, close, device, kernels_run, random, same_everywhere

sharded = osm.distributed

ROWS, COLS = 48, 1001

CUTS = ((0, 600, COLS), (0, COLS, COLS), (0, 0, COLS))
"""First columns of the two processes, and the end: uneven shards, and an empty shard on each process."""

DTYPES = (torch.bfloat16, torch.float32)

LOSSES: tuple[dict[str, Any], ...] = (
    {}, {"reduction": "none"}, {"label_smoothing": 0.1}, {"z_loss": 0.01, "reduction": "sum"}, {"weighted": True},
    {"weighted": True, "label_smoothing": 0.1, "z_loss": 0.01},
)  # fmt: skip


def logits(dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers, one column in fifty times 20, and one row with a large offset."""
    x = random(ROWS, COLS, seed=1)
    x[:, ::50] *= 20
    x[1] += 50
    return x.to(dtype)


def targets() -> torch.Tensor:
    """Targets on both processes; two rows are ignored."""
    target = torch.arange(ROWS) * 20 + 3
    target[[5, 6]] = -100
    return target.to(device())


def shards_of(first: int, end: int) -> dict[str, Any]:
    """The keyword arguments that say where the columns are."""
    return {"shards": sharded.Shards(first, end - first, COLS)}


def gradient_of(outputs: Any, leaf: torch.Tensor, dys: Any = None) -> torch.Tensor:
    (dx,) = torch.autograd.grad(outputs, leaf, dys)
    return dx


def largest(exact: torch.Tensor) -> float:
    """Size of the largest terms of a result, for `close`: scores and logarithms of the same size are added."""
    return 4 * float(exact.detach().abs().max().clamp(min=15))


def losses(first: int, end: int) -> None:
    """Every reduction and option with its gradient, on logits with and without the argument `shards`."""
    target, weights = targets(), random(COLS, seed=2, normal=False)
    for dtype, one, given in itertools.product(DTYPES, LOSSES, ({}, shards_of(first, end))):
        options = {name: value for name, value in one.items() if name != "weighted"}
        weight = weights.to(dtype) if "weighted" in one else None
        agrees(
            "cross_entropy", logits(dtype), (first, end), (target, weight), options, ours=given, theirs=EAGER,
            sizes=(None, 16.0),
        )  # fmt: skip


def log_probabilities(first: int, end: int) -> None:
    """All three statistics with their gradients, and the log-probability alone."""
    tensors = (targets().clamp(min=0),)
    for dtype, entropy in ((torch.bfloat16, True), (torch.float32, True), (torch.bfloat16, False)):
        agrees(
            "token_logprobs", logits(dtype), (first, end), tensors, {"entropy": entropy}, ours=shards_of(first, end),
            theirs=EAGER, sizes=(None, 64.0),
        )  # fmt: skip


def softmax_and_its_like(first: int, end: int) -> None:
    """Softmax, log-softmax and logsumexp with their gradients."""
    for dtype, name in itertools.product(DTYPES, ("softmax", "log_softmax", "logsumexp")):
        agrees(name, logits(dtype), (first, end), (1,), ours=shards_of(first, end), theirs=EAGER, sizes=(None, 64.0))


def repeated_calls_have_the_same_bits(first: int, end: int) -> None:
    x, target, given = logits(torch.bfloat16)[:, first:end].clone().requires_grad_(), targets(), shards_of(first, end)

    def results() -> list[torch.Tensor]:
        loss = sharded.cross_entropy(x, target, **given)
        y = sharded.softmax(x, 1, **given)
        tokens = sharded.token_logprobs(x, target.clamp(min=0), **given)
        return [
            loss, gradient_of(loss, x), y, gradient_of(y, x, y.detach()), *tokens, gradient_of(tokens.entropy.sum(), x)
        ]  # fmt: skip

    want = results()
    for _ in range(3):
        for found, before in zip(results(), want, strict=True):
            assert torch.equal(found, before)


def calls_of(target: torch.Tensor) -> tuple[Any, ...]:
    """The ordinary functions, as calls of logits."""
    return (
        lambda t, **kw: osm.cross_entropy(t, target, **kw),
        lambda t, **kw: osm.cross_entropy(t, target, label_smoothing=0.1, reduction="none", **kw),
        lambda t, **kw: osm.token_logprobs(t, target.clamp(min=0), **kw).logprob,
        lambda t, **kw: osm.softmax(t, 1, **kw),
        lambda t, **kw: osm.log_softmax(t, 1, **kw),
        lambda t, **kw: osm.logsumexp(t, 1, **kw),
    )


def dtensors() -> None:
    """DTensors of a mesh of one dimension: uneven shards, and a process without columns."""
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for cols in (COLS, 1):
        x = logits(torch.float32)[:, :cols].contiguous()
        cut = distribute_tensor(x, mesh, [Shard(1)], src_data_rank=None).requires_grad_()
        whole, wide = x.clone().requires_grad_(), x.double().requires_grad_()
        for call in calls_of(targets().clamp(max=cols - 1)):
            found, theirs, exact = call(cut), call(whole, backend="eager"), call(wide, backend="eager")
            assert type(found) is DTensor
            assert found.placements == ((Shard(1),) if exact.shape == x.shape else (Replicate(),))
            close(found.full_tensor().detach(), theirs.detach(), exact.detach(), largest(exact))
            dy = random(*exact.shape, seed=5, normal=False)
            aligned = distribute_tensor(dy, mesh, found.placements, src_data_rank=None)
            dx = gradient_of(found, cut, aligned)
            assert isinstance(dx, DTensor)
            assert dx.placements == (Shard(1),)
            close(dx.full_tensor(), gradient_of(theirs, whole, dy), gradient_of(exact, wide, dy.double()), 64.0)


def compiled_losses(first: int, end: int, compiler: str = "aot_eager") -> None:
    """One graph of a loss with its collective, and one of its gradient."""
    x, target, given = logits(torch.bfloat16)[:, first:end].clone().requires_grad_(), targets(), shards_of(first, end)
    if device().type == "cpu" and kernels_run():
        given["backend"] = "triton"

    given["group"] = dist.group.WORLD

    def loss(t: torch.Tensor) -> torch.Tensor:
        return sharded.cross_entropy(t * 0.5, target, **given)

    torch._dynamo.reset()
    want, found = loss(x), torch.compile(loss, fullgraph=True, backend=compiler)(x)
    same_everywhere(found)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(gradient_of(found, x), gradient_of(want, x))


def everything(*_: int) -> None:
    rank = dist.get_rank()
    for cuts in CUTS:
        here = cuts[rank], cuts[rank + 1]
        for check in (losses, log_probabilities, softmax_and_its_like, repeated_calls_have_the_same_bits):
            try:
                check(*here)
            except BaseException as error:
                raise AssertionError(f"{check.__name__} with cuts {cuts}") from error
    dtensors()
    compiled_losses(*CUTS[0][rank : rank + 2])


def compiled_by_inductor(*_: int) -> None:
    rank = dist.get_rank()
    compiled_losses(*CUTS[0][rank : rank + 2], compiler="inductor")
