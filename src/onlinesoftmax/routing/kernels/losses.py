"""The source and the launch of losses.cuh: a loss of a router, and its derivative."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from ...kernels import cuda
from ...kernels.cuda import driver
from ...kernels.cuda.launch import argument_pool
from ...kernels.cuda.source import program
from ...sampling.kernels.choice import refusal
from ...sampling.kernels.source import constants_of
from ...torch.device import from_torch
from ...torch.fast_path import MOST_ENTRIES
from .source import bits_of

Tensor = torch.Tensor

NAME = "router_loss_kernel"

FILES = (("row/warp_shuffle", cuda.__name__), ("losses", str(__package__)))
"""Files of the kernel, in the order of inclusion."""

POINTERS = ("counts", "values", "loss", "slopes")
"""Fields of the kernel's parameter, in the order of the struct; then come NUMBERS."""

NUMBERS = ("sequences", "experts", "tokens", "factor_bits")

MOST_READ = 1 << 17
"""Most numbers that one block reads: of more, several blocks are faster."""


class Shape(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        z_loss: True for the z-loss.
        threads: Threads of the block.
        cluster: Blocks of a cluster.
    """

    z_loss: bool
    threads: int = 1024
    cluster: int = 1


@cache
def source(shape: Shape) -> str:
    """The source of a kernel."""
    return program(prologue(shape), *FILES)


def prologue(shape: Shape) -> str:
    """Types and constants of a kernel."""
    return constants_of("float32", {"Z_LOSS": shape.z_loss, "THREADS": shape.threads})


def numbers_of(counts: Tensor, values: Tensor, factor: float) -> tuple[int, ...]:
    """The numbers of a launch, in the order of NUMBERS."""
    experts = counts.shape[-1]
    return counts.numel() // experts, experts, values.numel(), bits_of(factor)


def takes(counts: Tensor, values: Tensor) -> bool:
    """True where the kernel takes contiguous counts and sums of probabilities or lse on a GPU."""
    if refusal(str(values.dtype).removeprefix("torch."), values.numel(), True, from_torch("cuda", values.get_device())):
        return False
    few = max(counts.numel(), values.numel()) <= MOST_READ and counts.numel() > 0
    return few and values.dtype == torch.float32 and counts.dtype == torch.int32 and not values.data_ptr() % 16


def loss(counts: Tensor, values: Tensor, factor: float, z_loss: bool) -> tuple[Tensor, Tensor]:
    """A loss, and its derivative: of the sums, or the number by which lse is multiplied.

    Args:
        counts: (..., experts) int32.
        values: Sums of probabilities in the shape of counts, or lse.
        factor: Factor of the loss: of load balancing, experts * k * parts; of the z-loss, k * parts.
        z_loss: True for the z-loss.
    """
    shape = (1,) if z_loss else tuple(values.shape)
    return _bound(z_loss, shape, numbers_of(counts, values, factor), values.get_device())(counts, values)


@lru_cache(MOST_ENTRIES)
def _bound(
    z_loss: bool, shape: tuple[int, ...], numbers: tuple[int, ...], index: int
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:  # fmt: skip
    kernel_shape = Shape(z_loss)

    pool = argument_pool(source(kernel_shape), NAME, len(POINTERS), numbers, 1, kernel_shape.threads, 0)

    def run(counts: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if torch.cuda.current_device() != index:
            # The default stream is that of the current device.
            with torch.cuda.device(index):
                return run(counts, values)
        found, slopes = values.new_empty(()), values.new_empty(shape)
        call = pool.take(index)
        call.fields[: len(POINTERS)] = [t.data_ptr() for t in (counts, values, found, slopes)]
        call.config.stream = torch._C._cuda_getCurrentRawStream(index)
        driver.launch(call, index, "launching router_loss_kernel")
        pool.give_back(call)
        return found, slopes

    return run
