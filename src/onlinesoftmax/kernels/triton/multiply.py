"""A gradient times one number on the device, in place or into another dtype."""

from __future__ import annotations

from collections.abc import Callable
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


def bind(x: Any, factor: Any, out: Any) -> Callable[..., None]:
    """The function multiply(x, factor, out) of tensors like these, which writes x · factor to `out`.

    Args:
        x: Contiguous torch tensor.
        factor: Floating-point tensor of one element on the same device.
        out: x itself, and then nothing is read or written where the factor is 1; or another contiguous tensor of its
            shape.
    """
    count, accumulator = x.numel(), tl.float64 if x.dtype.itemsize == 8 else tl.float32
    blocks, in_place = (triton.cdiv(count, BLOCK),), out.data_ptr() == x.data_ptr()

    def multiply(x: Any, factor: Any, out: Any) -> None:
        if count:
            with LOADING:
                multiply_kernel[blocks](x, out, factor, count, in_place, accumulator, BLOCK, num_warps=8)

    return multiply
