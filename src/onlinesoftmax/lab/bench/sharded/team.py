"""The processes that measure together, and the part of a case that each of them has."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ....core.processes import gathered
from ....distributed.shards import Shards
from ..cases import Case
from ..exact import Inputs

TIMEOUT = timedelta(minutes=5)
"""Longest wait for another process, which may compile kernels or compute a float64 reference in the meantime."""


class Team(NamedTuple):
    """A process group and the device of this process.

    Attributes:
        group: The process group: all processes.
        device: The torch device of this process.
    """

    group: Any
    device: Any

    @classmethod
    def begin(cls, device_type: str) -> Team:
        """Make the process group from torchrun's variables: NCCL for GPUs, gloo for CPUs."""
        if device_type == "cpu":
            dist.init_process_group("gloo", timeout=TIMEOUT)
            return cls(dist.group.WORLD, torch.device("cpu"))
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=TIMEOUT, device_id=device)
        return cls(dist.group.WORLD, device)

    @property
    def rank(self) -> int:
        """Number of this process."""
        return int(self.group.rank())

    @property
    def size(self) -> int:
        """Number of processes."""
        return int(self.group.size())

    def shards(self, case: Case) -> Shards:
        """The columns of this process, as torch.chunk and `Shard` of DTensor cut them."""
        cols = case.shape[case.dim]
        first = min(cols, -(-cols // self.size) * self.rank)
        return Shards(first, min(cols, -(-cols // self.size) * (self.rank + 1)) - first, cols)

    def local(self, case: Case) -> Case:
        """The case with the columns of this process."""
        shape = list(case.shape)
        shape[case.dim] = self.shards(case).cols
        return replace(case, shape=tuple(shape))

    def cut(self, case: Case, inputs: Inputs) -> Inputs:
        """The tensors of this process: its columns of each tensor with one value per element, the others whole."""
        return tuple(self.part(case, t) if tuple(t.shape) == case.shape else t for t in inputs)

    def part(self, case: Case, t: Any) -> Any:
        """The columns of this process, in memory of their own."""
        shards = self.shards(case)
        return t.narrow(case.dim, shards.first, shards.cols).contiguous()

    def joined(self, case: Case, part: Any) -> Any:
        """The whole tensor, from the columns of every process."""
        cols = case.shape[case.dim]
        each = -(-cols // self.size)
        # Every process sends the same number of columns; some may have fewer.
        padded = part.new_zeros([each if i == case.dim else n for i, n in enumerate(part.shape)])
        padded.narrow(case.dim, 0, part.shape[case.dim]).copy_(part)
        whole = torch.cat(gathered(padded, self.group).unbind(0), case.dim)
        return whole.narrow(case.dim, 0, cols)

    def largest(self, *numbers: float) -> list[float]:
        """The largest of each number over all processes; every process gets the same."""
        mine = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        found: list[float] = gathered(mine, self.group).amax(0).tolist()
        return found
