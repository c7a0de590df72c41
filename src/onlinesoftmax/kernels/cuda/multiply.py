"""The launch of multiply.cuh: a gradient times one number on the device, in place or into another dtype."""

from __future__ import annotations

from functools import cache

import torch

from ...core.task import ITEMSIZE
from . import driver
from .launch import small_kernel
from .source import declarations, program, typed

THREADS, BATCH = 512, 8
"""Threads of a block, and chunks that a thread loads at once.

One such block fills a multiprocessor.  More threads would take longer to launch where nothing is to be multiplied.
"""

NAME = "multiply_kernel"


def multiply(x: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> None:
    """Write x · factor to `out`, which may be x itself; then nothing is read or written where the factor is 1.

    Args:
        x: Contiguous tensor on a GPU whose first element lies on 16 bytes.
        factor: Floating-point tensor of one element on the same GPU.
        out: x, or another tensor of its shape, as contiguous and aligned.
    """
    index = x.get_device()
    most, pool = _prepared(x.dtype, out.dtype, factor.dtype, index)
    call = pool.take(index)
    call.fields[0], call.fields[1] = x.data_ptr(), out.data_ptr()
    call.fields[2], call.fields[3] = factor.data_ptr(), x.numel()
    call.config.grid[0] = max(1, min(most, -(-x.numel() * x.element_size() // (16 * BATCH * THREADS))))
    call.config.stream = torch._C._cuda_getCurrentRawStream(index)
    driver.launch(call, index, "launching multiply_kernel")
    pool.give_back(call)


@cache
def _prepared(dtype: torch.dtype, out: torch.dtype, factor: torch.dtype, index: int) -> tuple[int, driver.ArgumentPool]:
    """(blocks that fill the device, arguments of launches)."""
    text = source(*(str(name).removeprefix("torch.") for name in (dtype, out, factor)))
    count = torch.cuda.get_device_properties(index).multi_processor_count
    return count, small_kernel(text, NAME, 1, THREADS, bytes(32), True)


@cache
def source(dtype: str, out: str, factor: str) -> str:
    """The source of the kernel for the dtypes of a gradient, the result and the factor."""
    types = {"T": dtype, "OUT": out, "ACC": "float64" if dtype == "float64" else "float32", "FACTOR": factor}
    numbers = {"THREADS": THREADS, "BATCH": BATCH, "VECTOR": 16 // max(ITEMSIZE[dtype], ITEMSIZE[out])}
    return program(declarations(types, typed(numbers)), "pass/multiply")
