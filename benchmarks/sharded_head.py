"""Time a head whose classes are sharded over GPUs beside the whole head on one of them.

    torchrun --nproc-per-node 2 benchmarks/sharded_head.py --tokens 8192 --hidden 4096 --classes 128256

Each process prints the milliseconds of forward and backward: of one GPU, and of all through peer memory and through a
collective, with their ratios to one GPU; and the relative difference of the gradients.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist

import onlinesoftmax as osm
from onlinesoftmax.distributed import mailboxes

WARM_UP, REPEATS = 3, 10


def milliseconds(call: Callable[[], object]) -> float:
    """The median time of a call that all processes begin together."""
    found = []
    for _ in range(WARM_UP + REPEATS):
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(found[WARM_UP:])


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm of the second."""
    return float((a.float() - b.float()).norm() / b.float().norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in (("tokens", 8192), ("hidden", 4096), ("classes", 128256)):
        parser.add_argument(f"--{name}", type=int, default=size)
    given = parser.parse_args()
    device = torch.device("cuda", dist.get_node_local_rank(0))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, processes = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(given.tokens, given.hidden, device=device, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(given.classes, given.hidden, device=device, generator=generator) * 3 / given.hidden**0.5
    weight = weight.bfloat16().requires_grad_()
    target = torch.randint(given.classes, (given.tokens,), device=device, generator=generator)
    each = -(-given.classes // processes)
    first = min(rank * each, given.classes)
    own = weight.detach()[first : first + each].clone().requires_grad_()
    shards = osm.distributed.Shards(first, len(own), given.classes)

    def alone() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(osm.linear_cross_entropy(x, weight, target), (x, weight))

    def sharded() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(osm.distributed.linear_cross_entropy(x, own, target, shards=shards), (x, own))

    one, by_peer_memory = milliseconds(alone), milliseconds(sharded)
    with mock.patch.object(mailboxes, "MOST_PROCESSES", 1):
        by_collective = milliseconds(sharded)
    (dx, dw), (dx_alone, dw_alone) = sharded(), alone()
    ways = {"peer memory": by_peer_memory, "collective": by_collective}
    times = "; ".join(f"{name} {ms:.2f} ms, {ms / one:.3f} of one GPU" for name, ms in ways.items())
    errors = f"{difference(dx, dx_alone):.1e} and {difference(dw, dw_alone[first : first + each]):.1e}"
    print(f"rank {rank}: one GPU {one:.2f} ms; {times}; gradients differ by {errors}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
