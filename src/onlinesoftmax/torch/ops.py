"""The formulas of the operations in PyTorch's own operations, which have derivatives of every order.

The eager backend and the derivatives of derivatives use them.  A new operation adds its entries to the tables here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor


def result(name: str, z: Tensor, dim: Any, keepdim: bool) -> Tensor:
    """The result of a forward operation for scores z, by PyTorch's function."""
    function = getattr(torch, name)
    y: Tensor = function(z, dim, keepdim) if name == "logsumexp" else function(z, dim)
    return y


def masked_result(name: str) -> float:
    """The result of a row whose scores are all -inf, where zeros are asked for."""
    return -torch.inf if name == "logsumexp" else 0.0


class Saved(NamedTuple):
    """What the derivatives of one call are computed from, all in float32 or float64.

    Attributes:
        y: The result; the scores, where the operation keeps its input.
        z: The scores, where the operation keeps its input; else None.
        counted: True where an element counts, of a shape that broadcasts; None where all do.
        dead: True for a row whose scores are all -inf, where zeros are asked for and z is there; else None.
        zero: True where zeros are asked for.
        dim: The softmax dimension.
    """

    y: Tensor
    z: Tensor | None
    counted: Tensor | None
    dead: Tensor | None
    zero: bool
    dim: int


def _softmax_gradient(saved: Saved, dy: Tensor) -> Tensor:
    y, dim = saved.y, saved.dim
    return y * (dy - (dy * y).sum(dim, keepdim=True))


def _log_softmax_gradient(saved: Saved, dy: Tensor) -> Tensor:
    y, dim = saved.y, saved.dim
    dz = dy - y.exp() * dy.sum(dim, keepdim=True)
    if saved.zero and y.dim() and y.shape[dim] > 1:
        # No two of a row's probabilities are 1: where all logarithms are 0, the row was masked.
        dz = dz.masked_fill((y == 0).all(dim, keepdim=True), 0.0)
    return dz if saved.counted is None else dz.masked_fill(~saved.counted, 0.0)


def _logsumexp_gradient(saved: Saved, dy: Tensor) -> Tensor:
    assert saved.z is not None
    # Computed from the scores: the result may have been rounded to 16 bits.
    dz = dy * (saved.z - saved.z.logsumexp(saved.dim, keepdim=True)).exp()
    return dz if saved.dead is None else torch.where(saved.dead, 0.0, dz)


GRADIENTS: dict[str, Callable[[Saved, Tensor], Tensor]] = {
    "softmax": _softmax_gradient,
    "log_softmax": _log_softmax_gradient,
    "logsumexp": _logsumexp_gradient,
}
"""The gradient in the scores, from that of the result; per-row tensors keep the softmax dimension with size 1."""


def _softmax_tangent(saved: Saved, dz: Tensor) -> Tensor:
    return saved.y * (dz - (dz * saved.y).sum(saved.dim, keepdim=True))


def _log_softmax_tangent(saved: Saved, dz: Tensor) -> Tensor:
    return dz - (dz * saved.y.exp()).sum(saved.dim, keepdim=True)


def _logsumexp_tangent(saved: Saved, dz: Tensor) -> Tensor:
    assert saved.z is not None
    return (dz * torch.softmax(saved.z, saved.dim)).sum(saved.dim, keepdim=True)


TANGENTS: dict[str, Callable[[Saved, Tensor], Tensor]] = {
    "softmax": _softmax_tangent,
    "log_softmax": _log_softmax_tangent,
    "logsumexp": _logsumexp_tangent,
}
"""The change of the result where the scores change by dz: forward mode."""


def of_empty_rows(name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A per-row output for rows without an element: what the identity state gives."""
    lowest = torch.finfo(dtype).min
    values = {"lse": -torch.inf, "m": lowest, "l": 0.0, "entropy": torch.nan}
    return torch.full(shape, values[name], dtype=dtype, device=device)
