"""The `cuda` backend: the strategies `row`, `cluster`, `grid` and `looped` in CUDA C++.

Reading order: numbers.cuh (element types, loads and stores), state.cuh (the recurrence), operands.cuh (operands and
scores), ops.cuh (the formulas of the operations), warp_shuffle.cuh and block_reduce.cuh (merges of the states of lanes
and warps), slice.cuh (the part of a row that a group of threads holds), then any strategy.

`row` and `looped` are one file each.  `cluster` has the messages between its blocks in peers.cuh.  `grid` has three
kernels: grid.cuh, pipeline.cuh for several rows, and stream.cuh for rows that do not fit on chip.  team.cuh has the
messages between the blocks of a team, which the first kernel exchanges through mailboxes.cuh.  The other two load
through the ring of ring.cuh, and exchange states through team_board.cuh, by the warp of exchange_states.cuh.
barrier.cuh has the barriers of peers.cuh and ring.cuh.

shards.cuh exchanges the states of rows with the GPUs of other processes, after a strategy has merged the states of its
own blocks; shard_mail.py has the addresses of the mailboxes.  message.cuh writes a state into the words of a message.
docs/protocols.md has the proofs of all messages.

scalar_loss.cuh reduces the losses to a scalar, by the messages of mail.cuh and loss_mail.cuh.  reduction.cuh, merge.cuh
and multiply.cuh are kernels of their own, before and after those of the strategies.  source.py, messages.py and
params.py generate the constants and the parameters of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...core.device import Device
from ..reduction import Reduction
from ..registry import module_missing
from ..report import Kernel
from ..request import Request
from ..sharded import ShardedRows

COMPILER = "cuda.core"


def unavailable() -> str | None:
    """The reason why these kernels cannot run on this machine; None when they can."""
    if reason := module_missing("torch", "cuda") or module_missing(COMPILER, "cuda"):
        return reason
    import torch

    if not torch.cuda.is_available():
        return "no NVIDIA GPU"
    return _why_not_compiled()


def _why_not_compiled() -> str | None:
    """The reason why NVRTC cannot compile, or the driver cannot load the machine code; None when both can."""
    from . import driver
    from .compile import nvrtc_version

    try:
        version = nvrtc_version()
    except Exception as error:  # cuda.bindings raises its own types for a missing library
        return f"NVRTC cannot be loaded ({error}): pip install 'onlinesoftmax[cuda]'"
    major, supported = int(version.partition(".")[0]), driver.version()
    if major > supported[0]:
        has = "{}.{}".format(*supported)
        return f"NVRTC {version} compiles for drivers of CUDA {major}, and this one supports {has}: update the driver"
    return None


def prepare(request: Request) -> Callable[[Any, Any, dict[str, Any]], None]:
    """The function run(x, y, more) that runs a request on torch tensors."""
    from .launch import bind

    return bind(request)


def multiply_in_place(x: Any, factor: Any) -> None:
    """Multiply a contiguous tensor in place by a tensor of one element; nothing is moved where that is 1."""
    from .multiply import multiply

    multiply(x, factor)


def prepare_reduction(reduction: Reduction) -> Callable[[Any, dict[str, Any]], None]:
    """The function run(out, tensors) that reduces the rows of a loss on torch tensors of one device."""
    from .reduction import bind

    return bind(reduction)


def prepare_sharded(kernel: str, rows: ShardedRows) -> Callable[[dict[str, Any]], None]:
    """The function run(tensors) of the kernel "merge" or "incoming" of sharded rows on torch tensors of one device."""
    from .merge import bind

    return bind(kernel, rows)


def compile_request(request: Request, device: Device) -> list[Kernel]:
    """The kernel of a request, compiled for a device that this machine need not have.

    Raises:
        RuntimeError: cuda.core, which finds NVRTC, is missing.
    """
    if reason := module_missing(COMPILER, "cuda"):
        raise RuntimeError(reason)
    from .compile import compile_kernel

    return [compile_kernel(request, device)]
