"""The products of a head: the framework's own, with sums in float32 where a result is added up."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def logits_of(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """The logits x · weightᵀ + bias in the memory of `out`."""
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def without(x: Tensor, skipped: Tensor | None, out: Tensor | None) -> Tensor:
    """The rows of x with zeros for those that are skipped, in the memory of `out` where it is given."""
    if skipped is None:
        return x
    if out is None:
        return x.masked_fill(skipped.unsqueeze(1), 0.0)
    return out.copy_(x).masked_fill_(skipped.unsqueeze(1), 0.0)


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Add a · b to a float32 or float64 `total`, or write it there if it is the first."""
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, beta=0.0 if first else 1.0, out=total)
    elif a.is_cuda:
        # cuBLAS adds 16-bit operands up in float32, and writes the sum without rounding it to 16 bits.
        if first:
            torch.ops.aten.mm.dtype_out(a, b, total.dtype, out=total)
        else:
            torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=0.0 if first else 1.0, out=total)
