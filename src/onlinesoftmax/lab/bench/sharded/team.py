"""The processes that measure together, the part of a case that each of them has, and their clock."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from math import ceil
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ....core.processes import gathered
from ....distributed.shards import Shards
from ..cases import Case, Inputs
from ..peers import Peer
from ..timing import MOST_FLUSHES, TRIALS, USUAL, Call, CudaClock, Flush, Samples, elapsed_us, quiet, rounds

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

    def joined(self, case: Case, part: Any, dim: int | None = None) -> Any:
        """The whole tensor, from the columns of every process, which are dimension `dim` of it, or that of the case."""
        cols, dim = case.shape[case.dim], case.dim if dim is None else dim
        each = -(-cols // self.size)
        # Every process sends the same number of columns; some may have fewer.
        padded = part.new_zeros([each if i == dim else n for i, n in enumerate(part.shape)])
        padded.narrow(dim, 0, part.shape[dim]).copy_(part)
        whole = torch.cat(gathered(padded, self.group).unbind(0), dim)
        return whole.narrow(dim, 0, cols)

    def largest(self, *numbers: float) -> list[float]:
        """The largest of each number over all processes; every process gets the same."""
        mine = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        found: list[float] = gathered(mine, self.group).amax(0).tolist()
        return found


class InTeam(Peer):
    """A peer that runs in every process of a team."""

    def __init__(self, team: Team) -> None:
        super().__init__(team.device.type)
        self.team, self.group = team, team.group


FEWEST, MOST = 7, 300
"""Limits of the number of repetitions."""


class GroupClock:
    """Times calls that may exchange data between the processes.

    Before each repetition the processes meet: on a GPU in an all-reduce of one number, which is queued behind flushes
    of the L2 cache, so that all GPUs begin the call together.  The flushes take longer than the host needs to queue the
    all-reduce and the call, so the events around it measure the GPUs alone; the host's time is measured apart.

    Attributes:
        host_us: Microseconds until each call of the last measurement returns to the host, the slowest process's median;
            empty on a CPU.
    """

    def __init__(self, team: Team) -> None:
        self._team, self._one = team, torch.zeros(1, device=team.device)
        self._clock = CudaClock(team.device) if team.device.type == "cuda" else None
        self._flush_us, self._meet_us = 0.0, 0.0
        self.host_us: dict[str, float] = {}
        if self._clock is not None:
            self._flush_us = max(1.0, *team.largest(self._clock.flush_us))
            self._meet_us = self._trial({"meeting": self._meet})[0]["meeting"]

    def measure(self, calls: Mapping[str, Call], budget_ms: float, flush: Flush = USUAL) -> Samples:
        """The times of the slowest process, as many as fit into `budget_ms` milliseconds for each call.

        Every process must pass the same names in the same order.
        """
        host, whole = self._trial(calls)
        flushes = {name: self._flushes(host[name]) for name in calls}
        each = {name: whole[name] + flushes[name] * self._flush_us for name in calls}
        counts = {name: int(max(FEWEST, min(MOST, 1e3 * budget_ms / each[name]))) for name in calls}
        samples = self._rounds(calls, counts, flushes, flush.before or (lambda: None))
        self.host_us = host if self._clock else {}
        return {name: self._team.largest(*found) for name, found in samples.items()}

    def _flushes(self, host_us: float) -> int:
        """Number of flushes that take longer than the host needs to queue the meeting and a call."""
        return min(MOST_FLUSHES, 1 + ceil(1.5 * (self._meet_us + host_us) / self._flush_us)) if self._clock else 0

    def _trial(self, calls: Mapping[str, Call]) -> tuple[dict[str, float], dict[str, float]]:
        """Microseconds until each call returns, and until it is done: the same numbers on every process."""
        host, whole = {}, {}
        for name, call in calls.items():
            pairs = []
            for _ in range(1 + TRIALS):
                self._meet()
                self._synchronize()
                start = perf_counter_ns()
                call()
                returned = perf_counter_ns()
                self._synchronize()
                pairs.append(((returned - start) / 1e3, (perf_counter_ns() - start) / 1e3))
            # The first call compiles.
            medians = [statistics.median(found) for found in zip(*pairs[1:], strict=True)]
            host[name], whole[name] = self._team.largest(*medians)
        return host, whole

    def _rounds(
        self, calls: Mapping[str, Call], counts: Mapping[str, int], flushes: Mapping[str, int],
        before: Call,
    ) -> dict[str, list[float]]:  # fmt: skip
        found: dict[str, list[Any]] = {name: [] for name in calls}
        with quiet():
            for names in rounds(counts):
                for name in names:
                    before()
                    found[name].append(self._timed(calls[name], flushes[name]))
                # A host that runs far ahead, or garbage in cycles, would hold the gradients of many calls.
                self._synchronize()
                gc.collect(0)
        return {name: elapsed_us(pairs) for name, pairs in found.items()} if self._clock else found

    def _timed(self, call: Call, flushes: int) -> Any:
        """Microseconds of a call, or the events before and after it."""
        if self._clock is not None:
            return self._clock.timed(call, flushes, meet=self._meet)
        self._meet()
        began = perf_counter_ns()
        call()
        return (perf_counter_ns() - began) / 1e3

    def _meet(self) -> None:
        """Wait for the other processes: on a GPU its queue waits, not the host."""
        dist.all_reduce(self._one, group=self._team.group)

    def _synchronize(self) -> None:
        if self._clock is not None:
            torch.cuda.synchronize(self._team.device)
