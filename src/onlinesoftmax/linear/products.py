"""The products of a head, which are the framework's own.

cuBLAS has fast products only of matrices whose rows begin at multiples of 16 bytes and whose sizes are such multiples.
With 50257 classes in bfloat16, three products took six times as long as with 50264 on an H200.  So the rows of logits
begin at multiples of 16 bytes, and the last few classes are a product of their own.
"""

from __future__ import annotations

import torch

from .problem import FEWEST_CLASSES, row_bytes

Tensor = torch.Tensor


def has_fast_sizes(t: Tensor) -> bool:
    """True where products of some sizes are faster than others."""
    return t.is_cuda


def logits_memory(tokens: int, classes: int, like: Tensor) -> Tensor:
    """New memory of logits (tokens, classes), uninitialised, in the dtype and on the device of `like`."""
    width = row_bytes(classes, like.itemsize) // like.itemsize if has_fast_sizes(like) else classes
    return like.new_empty(tokens, width)[:, :classes]


def logits_of(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """The logits x · weightᵀ + bias in the memory of `out`."""
    for part in _parts(weight):
        if bias is None:
            torch.mm(x, weight[part].t(), out=out[:, part])
        else:
            torch.addmm(bias[part], x, weight[part].t(), out=out[:, part])
    return out


def input_gradient(dz: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write dz · weight to `out`."""
    whole, *last = _parts(weight)
    if not last:
        torch.mm(dz, weight, out=out)
        return
    # The last few classes come first: their product is rounded once more, and it is the smaller one.
    torch.mm(dz[:, last[0]], weight[last[0]], out=out)
    torch.addmm(out, dz[:, whole], weight[whole], out=out)


def add_input_gradient(total: Tensor, dz: Tensor, weight: Tensor, first: bool) -> None:
    """Add dz · weight to a float32 or float64 `total`; write it there if it is the first."""
    for part in _parts(weight):
        _add_product(total, dz[:, part], weight[part], first)
        first = False


def add_weight_gradient(total: Tensor, dz: Tensor, x: Tensor, first: bool) -> None:
    """Add dzᵀ · x to `total`, in which sums have the dtype of `total`; write it there if it is the first."""
    for part in _parts(dz.t()):
        _add_product(total[part], dz[:, part].t(), x, first)


def zeroed(x: Tensor, skipped: Tensor | None, out: Tensor | None) -> Tensor:
    """X with zeros in the rows that are skipped, in the memory of `out` if given; x itself if `skipped` is None."""
    if skipped is None:
        return x
    skipped = skipped.unsqueeze(1)
    return x.masked_fill(skipped, 0.0) if out is None else torch.where(skipped, x.new_zeros(()), x, out=out)


def _parts(of_classes: Tensor) -> tuple[slice, ...]:
    """The rows of a tensor with a row for each class: as many as are a multiple of 16 bytes, then the others.

    All of them, where other strides than that of the classes would make products slow in any case.
    """
    classes, fill = len(of_classes), 16 // of_classes.itemsize
    whole, slow = classes // fill * fill, any(step != 1 and step % fill for step in of_classes.stride())
    if classes == whole or classes < FEWEST_CLASSES or slow or not has_fast_sizes(of_classes):
        return (slice(0, classes),)
    return slice(0, whole), slice(whole, classes)


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Add a · b to `total`, whose dtype is that of a and b or a wider one; write it there if it is the first."""
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
