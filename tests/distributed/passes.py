"""The passes over a shard that do not run by default on a CPU: by kernels, in pieces, and in a compiled graph."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from distributed.processes import (
    COLS,
    EAGER,
    KERNELS,
    agrees,
    device,
    inputs,
    kernels_run,
    random,
    same_everywhere,
    sharded,
)


def softmax_by_kernels(first: int, end: int) -> None:
    """The kernels write the softmax along any dimension, and that of rows with infinities and NaN."""
    if not kernels_run():
        return
    for shape, dim in (((5, COLS), 1), ((COLS, 5), 0), ((2, COLS, 3), 1)):
        x = 5 * random(*shape, seed=11)
        if dim == len(shape) - 1:
            x[0], x[1, 30], x[2], x[3, 5] = torch.nan, torch.inf, -torch.inf, -torch.inf
        local, whole = x.narrow(dim, first, end - first).clone().requires_grad_(), x.clone().requires_grad_()
        ours, want = sharded.softmax(local, dim, backend="triton"), whole.softmax(dim)
        torch.testing.assert_close(ours, want.narrow(dim, first, end - first), equal_nan=True)
        dy = random(*shape, seed=12)
        (found,) = torch.autograd.grad(ours, local, dy.narrow(dim, first, end - first))
        (dx,) = torch.autograd.grad(want, whole, dy)
        torch.testing.assert_close(found, dx.narrow(dim, first, end - first), equal_nan=True)


def label_smoothing_by_kernels(first: int, end: int) -> None:
    """The kernels compute all of a smoothed loss but the sum of the scores and its gradient."""
    if not kernels_run():
        return
    x, target, weights = inputs(torch.float32)
    weights[[3, 30]] = 0
    for weight, options in (
        (None, {}), (weights, {"reduction": "none"}), (None, {"scale": -0.5, "z_loss": 0.01}),
        (weights, {"softcap": 5.0}),
    ):  # fmt: skip
        agrees(
            "cross_entropy", x, (first, end), (target, weight), {"label_smoothing": 0.1, **options}, ours=KERNELS,
            theirs=EAGER,
        )  # fmt: skip


def long_rows_are_cut_into_pieces(first: int, end: int) -> None:
    """PyTorch's operations compute a long row in pieces, forward and backward."""
    # The function of this name hides the module.
    module = sys.modules["onlinesoftmax.distributed.softmax"]
    whole, piece = 3 * random(2, COLS, seed=14), module.PIECE
    want = whole.log_softmax(1)
    dy = random(2, COLS, seed=15)
    try:
        module.PIECE = 7
        local = whole[:, first:end].clone().requires_grad_()
        y = sharded.log_softmax(local, 1)
        (dx,) = torch.autograd.grad(y, local, dy[:, first:end])
    finally:
        module.PIECE = piece
    torch.testing.assert_close(y, want[:, first:end])
    torch.testing.assert_close(dx, (dy - want.exp() * dy.sum(1, keepdim=True))[:, first:end])


def a_compiled_loss(first: int, end: int, compiler: str = "aot_eager") -> None:
    """One graph of a loss with its collective, and one of its gradient."""
    x, target, _ = inputs(torch.bfloat16)
    local = x[:, first:end].clone().requires_grad_()
    given: dict[str, Any] = {"shards": sharded.Shards(first, end - first, COLS), "group": dist.group.WORLD}
    if device().type == "cpu" and kernels_run():
        given["backend"] = "triton"

    def loss(t: torch.Tensor) -> torch.Tensor:
        return sharded.cross_entropy(t * 0.5, target, **given)

    torch._dynamo.reset()
    want, found = loss(local), torch.compile(loss, fullgraph=True, backend=compiler)(local)
    same_everywhere(found)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(torch.autograd.grad(found, local), torch.autograd.grad(want, local))


def compiled_by_inductor(first: int, end: int) -> None:
    a_compiled_loss(first, end, "inductor")


def everything(first: int, end: int) -> None:
    for check in (softmax_by_kernels, label_smoothing_by_kernels, long_rows_are_cut_into_pieces):
        check(first, end)
    if device().type == "cuda" or dist.get_world_size() > 2:
        # On a CPU, three processes trace it, one of them without columns.
        a_compiled_loss(first, end)
