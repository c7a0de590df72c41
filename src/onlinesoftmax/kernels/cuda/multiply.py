"""The launch of multiply.cuh: a gradient times one number on the device, in place, and nothing where that is 1."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from ...core.task import ITEMSIZE
from . import driver
from .launch import loaded
from .source import CPP_TYPES, text

THREADS = 256
BLOCKS_PER_MULTIPROCESSOR = 8
"""Blocks of THREADS threads that fill a multiprocessor."""


def multiply(x: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply x in place.

    Args:
        x: Contiguous tensor on a GPU whose first element lies on 16 bytes.
        factor: Tensor of one element in float32, or in float64 for an x in float64, on the same GPU.
    """
    index = x.get_device()
    kernel = loaded(source(str(x.dtype).removeprefix("torch.")), "multiply_kernel", index, 0, 1)
    most = BLOCKS_PER_MULTIPROCESSOR * torch.cuda.get_device_properties(index).multi_processor_count
    blocks = max(1, min(most, x.numel() * x.element_size() // (16 * THREADS)))
    config = driver.launch_config(blocks, 1, THREADS, 0, 1, False)
    config.stream = torch._C._cuda_getCurrentRawStream(index)
    values = (ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(factor.data_ptr()), ctypes.c_longlong(x.numel()))
    parameters = (ctypes.c_void_p * 3)(*map(ctypes.addressof, values))
    arguments = (ctypes.addressof(config), kernel, ctypes.addressof(parameters), None)
    status = driver.library().cuLaunchKernelEx(*arguments)
    driver.check(driver.again(status, arguments, index), "launching multiply_kernel")


@cache
def source(dtype: str) -> str:
    """The source of the kernel for a dtype."""
    accumulator = "double" if dtype == "float64" else "float"
    constants = [
        f"using T = {CPP_TYPES.get(dtype, dtype)};",
        f"using ACC = {accumulator};",
        f"constexpr int THREADS = {THREADS}, VECTOR = {16 // ITEMSIZE[dtype]};",
    ]
    return text("numbers.cuh") + '#line 1 "constants"\n' + "\n".join(constants) + "\n" + text("multiply.cuh")
