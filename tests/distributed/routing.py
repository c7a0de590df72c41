"""The routing of sharded tokens and its losses, against one process that has all tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module

import onlinesoftmax as osm
from distributed.dtensors import cut_tensor, meshes
from distributed.processes import device, random

TOKENS, EXPERTS = 12, 6


def mean_of_processes(t: torch.Tensor) -> torch.Tensor:
    t = t.clone()
    dist.all_reduce(t)
    return t / dist.get_world_size()


def everything(*_: int) -> None:
    """The mean of the losses and of the gradients of the processes is that of all tokens; of uneven shards too."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(8, EXPERTS, generator=generator, dtype=torch.float64).to(device()).requires_grad_()
    x = torch.randn(3, TOKENS * size, 8, generator=generator, dtype=torch.float64).to(device())
    # The first process has a token of each sequence less, and the last one more.
    begin, end = TOKENS * rank - (rank > 0), TOKENS * (rank + 1) - 1 + (rank == size - 1)

    def losses(x: torch.Tensor, kinds: Any = ("switch", "sequence"), **group: Any) -> tuple[torch.Tensor, ...]:
        found = osm.route(x @ weight, 2, score="sigmoid", prob_sums=True)
        return *(osm.load_balancing_loss(found, kind, **group) for kind in kinds), osm.router_z_loss(found, **group)

    for part, whole in zip(losses(x[:, begin:end], group=dist.group.WORLD), losses(x), strict=True):
        torch.testing.assert_close(mean_of_processes(part.detach()), whole.detach())
        ours, wanted = (torch.autograd.grad(loss, weight, retain_graph=True)[0] for loss in (part, whole))
        torch.testing.assert_close(mean_of_processes(ours), wanted)

    # The last process has two sequences, and the others one.
    sequences = torch.randn(size + 1, TOKENS, 8, generator=generator, dtype=torch.float64).to(device())
    own = losses(sequences[rank : rank + 1 + (rank == size - 1)], kinds=("switch",), group=dist.group.WORLD)
    for part, whole in zip(own, losses(sequences, kinds=("switch",)), strict=True):
        torch.testing.assert_close(mean_of_processes(part.detach()), whole.detach())

    router = osm.nn.Router(8, EXPERTS, 2, correction=True, dtype=torch.float64, device=device())
    router.weight.data.copy_(weight.detach().T)
    alone = osm.nn.Router(8, EXPERTS, 2, correction=True, dtype=torch.float64, device=device())
    alone.load_state_dict(router.state_dict())
    router.balance(router(x[:, begin:end]).counts, group=dist.group.WORLD)
    alone.balance(alone(x).counts)
    assert torch.equal(router.e_score_correction_bias, alone.e_score_correction_bias)


def on_meshes(*_: int) -> None:
    """DTensors whose tokens, sequences or experts are sharded, and uneven ones; a router whose weight is sharded."""
    x, bias, mask = random(3, 5, 8, seed=51).double(), random(8, seed=52).double(), random(3, 5, seed=53) > -0.5

    def results(x: Any, mask: Any) -> tuple[Any, torch.Tensor]:
        found = osm.route(x, 3, score="sigmoid", bias=bias, mask=mask, prob_sums=True, dense=True)
        again = osm.route(x, 3, indices=found.indices).weights
        losses = osm.load_balancing_loss(found) + osm.load_balancing_loss(found, "sequence") + osm.router_z_loss(found)
        return found, losses + (found.weights * found.dense.amax(-1, keepdim=True) * again).sum()

    for mesh in meshes():
        for first in (Shard(0), Shard(1), Shard(2), Replicate())[:: mesh.ndim]:
            placements = (first, Shard(1))[: mesh.ndim]
            tokens = tuple(Replicate() if placement == Shard(2) else placement for placement in placements)
            sums = tuple(Partial() if placement == Shard(1) else placement for placement in tokens)
            whole, cut = x.clone().requires_grad_(), cut_tensor(x, mesh, placements).requires_grad_()
            wants, want = results(whole, mask)
            founds, total = results(cut, mask if first == Shard(2) else cut_tensor(mask, mesh, placements))
            for found, each in zip(founds, wants, strict=True):
                torch.testing.assert_close(found.full_tensor(), each)
            assert [t.placements for t in founds] == [tokens, tokens, sums, sums, tokens, tokens]
            torch.testing.assert_close(total.full_tensor(), want)
            (ours,), (theirs,) = torch.autograd.grad(total, cut), torch.autograd.grad(want, whole)
            torch.testing.assert_close(ours.full_tensor(), theirs)
    with pytest.raises(ValueError, match="group: the counts are a DTensor"):
        osm.router_z_loss(founds, group=dist.group.WORLD)
    a_router_on_a_mesh(meshes()[0])


def a_router_on_a_mesh(mesh: DeviceMesh) -> None:
    """The gradient of the weight and the balance under FSDP2, and of DTensors, are those of one process."""
    x, weight = random(8, 6, seed=54).double(), random(EXPERTS, 6, seed=55).double()

    def step(prepare: Callable[[osm.nn.Router], Any], x: torch.Tensor, **group: Any) -> tuple[Any, Any]:
        router = osm.nn.Router(6, EXPERTS, 2, score="sigmoid", correction=True, dtype=torch.float64, device=device())
        router.weight.data.copy_(weight)
        prepare(router)
        found = router(x)
        loss = (found.weights**2).sum() / len(x) + osm.load_balancing_loss(found, **group)
        (loss + osm.router_z_loss(found, **group)).backward()
        router.balance(found.counts, **group)
        return router.weight.grad, router.e_score_correction_bias

    wanted, own = step(lambda router: router, x), x.chunk(dist.get_world_size())[dist.get_rank()]
    sharded = functools.partial(fully_shard, mesh=mesh)
    for grad, correction in (
        step(sharded, own, group=dist.group.WORLD),
        step(lambda router: distribute_module(router, mesh), cut_tensor(x, mesh, (Shard(0),))),
    ):
        torch.testing.assert_close(grad.full_tensor(), wanted[0])
        correction = correction.full_tensor() if isinstance(correction, DTensor) else correction
        assert torch.equal(correction, wanted[1])
