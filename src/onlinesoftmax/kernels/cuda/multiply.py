"""The launch of multiply.cuh: a gradient times one number on the device, in place or into another dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from ...core.arrays import dtype_name
from ...core.task import ITEMSIZE
from .arguments import OwnLaunch
from .launch import launcher
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
    index, text = x.get_device(), source(*(dtype_name(t.dtype) for t in (x, out, factor)))
    most = torch.cuda.get_device_properties(index).multi_processor_count
    blocks = max(1, min(most, -(-x.numel() * x.element_size() // (16 * BATCH * THREADS))))
    launch = launcher(OwnLaunch(text, NAME, ("x", "out", "factor"), (x.numel(),), blocks, THREADS, waits=True))

    def multiply(x: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> None:
        launch(index, [x.data_ptr(), out.data_ptr(), factor.data_ptr()])

    return multiply


@cache
def source(dtype: str, out: str, factor: str) -> str:
    """The source of the kernel for the dtypes of a gradient, the result and the factor."""
    types = {"T": dtype, "OUT": out, "ACC": "float64" if dtype == "float64" else "float32", "FACTOR": factor}
    numbers = {"THREADS": THREADS, "BATCH": BATCH, "VECTOR": 16 // max(ITEMSIZE[dtype], ITEMSIZE[out])}
    return program(declarations(types, typed(numbers)), "small/multiply")
