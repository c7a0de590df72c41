"""Training of a model that is wrapped by FSDP, with our loss inside and outside of the wrapped module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import onlinesoftmax as osm
from distributed.processes import device, kernels_run

WORDS, WIDTH, ROWS, STEPS = 1001, 32, 24, 3

Loss = Callable[..., torch.Tensor]


class Model(torch.nn.Module):
    """An embedding and a head; forward returns the loss of a batch."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = torch.nn.Embedding(WORDS, WIDTH), torch.nn.Linear(WIDTH, WORDS)
        self.loss = loss

    def forward(self, words: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss(self.head(self.embedding(words)), target)


def curve(loss: Loss, policy: MixedPrecisionPolicy) -> list[torch.Tensor]:
    """The loss of this process in every step; each process has a batch of its own."""
    model = Model(loss).to(device())
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    fully_shard(model.head, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    generator = torch.Generator().manual_seed(dist.get_rank())
    words, target = torch.randint(WORDS, (2, ROWS), generator=generator).to(device())
    target[::5] = -100
    losses = []
    for _ in range(STEPS):
        found = model(words, target)
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        losses.append(found.detach())
    return losses


def training_follows_pytorch(*_: int) -> None:
    """The same curve as with PyTorch's loss, in float32 and with bfloat16 parameters and activations."""
    how: dict[str, Any] = {"backend": "triton"} if device().type == "cpu" and kernels_run() else {}
    bfloat16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for policy, tolerance in ((MixedPrecisionPolicy(), 1e-5), (bfloat16, 0.02)):
        ours = curve(lambda x, target: osm.cross_entropy(x, target, **how), policy)
        theirs = curve(lambda x, target: torch.nn.functional.cross_entropy(x.float(), target), policy)
        assert ours[0] > ours[-1]
        for mine, want in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.float(), want, rtol=tolerance, atol=0)
