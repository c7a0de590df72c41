"""A gradient times one number on the device, in place or into another dtype."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ..registry import LOADING

BLOCK = 4096


@triton.jit
def multiply_kernel(x_ptr, y_ptr, factor_ptr, count, IN_PLACE: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr):
    # One program: BLOCK elements.
    # Chosen: in the backward pass of a loss whose gradient the forward pass has written.
    # Bytes: in place none where the number is 1, as in `loss.backward()`; else one read, one write.
    # Limits: the elements are neighbours.
    factor = tl.load(factor_ptr).to(ACC)
    if not IN_PLACE or factor != 1:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < count, other=0.0)
        tl.store(y_ptr + at, (x.to(ACC) * factor).to(y_ptr.dtype.element_ty), mask=at < count)


def multiply(x: Any, factor: Any, out: Any) -> None:
    """Write x · factor to `out`, which may be x itself; then nothing is read or written where the factor is 1.

    Args:
        x: Contiguous torch tensor.
        factor: Floating-point tensor of one element on the same device.
        out: x, or another contiguous tensor of its shape.
    """
    if x.numel():
        accumulator = tl.float64 if x.dtype.itemsize == 8 else tl.float32
        with LOADING:
            blocks = (triton.cdiv(x.numel(), BLOCK),)
            multiply_kernel[blocks](
                x, out, factor, x.numel(), out.data_ptr() == x.data_ptr(), accumulator, BLOCK, num_warps=8
            )
