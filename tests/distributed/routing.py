"""The losses of a router whose tokens are sharded, against one process that has all tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import onlinesoftmax as osm
from distributed.processes import device

TOKENS, EXPERTS = 12, 6


def mean_of_processes(t: torch.Tensor) -> torch.Tensor:
    t = t.clone()
    dist.all_reduce(t)
    return t / dist.get_world_size()


def everything(*_: int) -> None:
    """The mean of the losses and of the gradients of the processes is that of all tokens; of uneven shards too."""
    rank, size = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(5)
    weight = torch.randn(8, EXPERTS, generator=random, dtype=torch.float64).to(device()).requires_grad_()
    x = torch.randn(3, TOKENS * size, 8, generator=random, dtype=torch.float64).to(device())
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
    sequences = torch.randn(size + 1, TOKENS, 8, generator=random, dtype=torch.float64).to(device())
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
