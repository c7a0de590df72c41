"""The launch of multiply.cuh: a gradient times one number on the device, in place or into another dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from ...core.task import ITEMSIZE
from . import driver
from .launch import small_kernel
from .source import declarations, program, typed

THREADS, BATCH = 512, 8
"""Threads of a block, and chunks that a thread loads at once.

The loads of one such block keep a multiprocessor busy.  More threads would take longer to launch where nothing is to be
multiplied.
"""

NAME = "multiply_kernel"


def bind(x: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> Callable[..., None]:
    """The function multiply(x, factor, out) of tensors like these, which writes x · factor to `out`.

    Args:
        x: Dense tensor on a GPU whose first element lies on 16 bytes.
        factor: Floating-point tensor of one element on the same GPU.
        out: x itself, and then nothing is read or written where the factor is 1; or another tensor of its shape and
            strides, as aligned.
    """
    index, text = x.get_device(), source(*(str(t.dtype).removeprefix("torch.") for t in (x, out, factor)))
    most = torch.cuda.get_device_properties(index).multi_processor_count
    blocks = max(1, min(most, -(-x.numel() * x.element_size() // (16 * BATCH * THREADS))))
    pool = small_kernel(text, NAME, blocks, THREADS, bytes(24) + x.numel().to_bytes(8, "little"), True)
    take, give_back, stream_of = pool.take, pool.give_back, torch._C._cuda_getCurrentRawStream

    def multiply(x: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> None:
        call = take(index)
        fields = call.fields
        fields[0], fields[1], fields[2] = x.data_ptr(), out.data_ptr(), factor.data_ptr()
        call.config.stream = stream_of(index)
        driver.launch(call, index, "launching multiply_kernel")
        give_back(call)

    return multiply


@cache
def source(dtype: str, out: str, factor: str) -> str:
    """The source of the kernel for the dtypes of a gradient, the result and the factor."""
    types = {"T": dtype, "OUT": out, "ACC": "float64" if dtype == "float64" else "float32", "FACTOR": factor}
    numbers = {"THREADS": THREADS, "BATCH": BATCH, "VECTOR": 16 // max(ITEMSIZE[dtype], ITEMSIZE[out])}
    return program(declarations(types, typed(numbers)), "small/multiply")
