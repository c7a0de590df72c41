"""The launch of losses.cuh: a loss of a router, and its derivative."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from ...core.arrays import dtype_name
from ...kernels.cuda.launch import launcher
from ...sampling.kernels.which_kernel import refusal
from ...torch.device import from_torch
from ...torch.fast_path import MOST_ENTRIES
from ...torch.prepare import on_device
from .losses import KERNEL, MOST_READ, Shape, shape_of
from .source import bits_of

Tensor = torch.Tensor


def numbers_of(counts: Tensor, values: Tensor, factor: float) -> tuple[int, ...]:
    """The numbers of a launch, in the order of NUMBERS."""
    experts = counts.shape[-1]
    return counts.numel() // experts, experts, values.numel(), bits_of(factor)


def takes(counts: Tensor, values: Tensor) -> bool:
    """True where the kernel takes contiguous counts and sums of probabilities or lse on a GPU."""
    if refusal(dtype_name(values.dtype), values.numel(), from_torch("cuda", values.get_device())):
        return False
    few = max(counts.numel(), values.numel()) <= MOST_READ and counts.numel() > 0
    return few and values.dtype == torch.float32 and counts.dtype == torch.int32 and not values.data_ptr() % 16


def loss(counts: Tensor, values: Tensor, factor: float, z_loss: bool) -> tuple[Tensor, Tensor]:
    """A loss, and its derivative in the shape of the values.

    Args:
        counts: (..., experts) int32.
        values: Sums of probabilities in the shape of counts, or lse.
        factor: Factor of the loss: of load balancing, experts * k * parts; of the z-loss, k * parts.
        z_loss: True for the z-loss.
    """
    index = values.get_device()
    shape = shape_of(values.numel(), z_loss, from_torch("cuda", index))
    return _bound(shape, numbers_of(counts, values, factor), index)(counts, values)


@lru_cache(MOST_ENTRIES)
def _bound(
    shape: Shape, numbers: tuple[int, ...], index: int
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:  # fmt: skip
    launch = launcher(KERNEL.launch(shape, numbers, 1))

    def run(counts: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        found, slopes = values.new_empty(()), torch.empty_like(values)
        launch(index, [t.data_ptr() for t in (counts, values, found, slopes)])
        return found, slopes

    return on_device(run, torch.device("cuda", index))
