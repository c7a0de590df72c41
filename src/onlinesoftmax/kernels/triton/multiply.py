"""A gradient times one number on the device, in place, and nothing where that number is 1."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ..registry import LOADING

BLOCK = 4096


@triton.jit
def multiply_kernel(x_ptr, factor_ptr, count, ACC: tl.constexpr, BLOCK: tl.constexpr):
    # One program: BLOCK elements.
    # Chosen: in the backward pass of a loss whose gradient the forward pass has written.
    # Bytes: none where the number is 1, as in `loss.backward()`; else one read, one write.
    # Limits: the elements are neighbours.
    factor = tl.load(factor_ptr).to(ACC)
    if factor != 1:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < count, other=0.0)
        tl.store(x_ptr + at, (x.to(ACC) * factor).to(x.dtype), mask=at < count)


def multiply(x: Any, factor: Any) -> None:
    """Multiply x in place.

    Args:
        x: Contiguous torch tensor.
        factor: Floating-point tensor of one element on the same device.
    """
    if x.numel():
        accumulator = tl.float64 if x.dtype.itemsize == 8 else tl.float32
        with LOADING:
            multiply_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, factor, x.numel(), accumulator, BLOCK, num_warps=8)
