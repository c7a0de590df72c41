"""The formulas of the operations in PyTorch's own operations, which have derivatives of every order.

The eager backend, forward mode and derivatives of derivatives use these formulas.  A new operation adds its entries to
the tables in this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor


def by_pytorch(name: str, x: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of PyTorch's function of this name; no mode such as `onlinesoftmax.override` replaces it here."""
    return call_pytorch(getattr(torch, name), x, *args, **kwargs)


def call_pytorch(function: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of a function of PyTorch; no mode such as `onlinesoftmax.override` replaces it here."""
    if torch._C._len_torch_function_stack() and type(x) in PLAIN_TYPES:
        with torch._C.DisableTorchFunction():
            return function(x, *args, **kwargs)
    return function(x, *args, **kwargs)


PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""Types of the tensors whose functions are PyTorch's own; a subclass may bring its own."""


def result(name: str, z: Tensor, dim: Any, keepdim: bool) -> Tensor:
    """The result of a forward operation for scores z, by PyTorch's function."""
    y: Tensor = by_pytorch(name, z, dim, keepdim) if name == "logsumexp" else by_pytorch(name, z, dim)
    return y


def masked_result(name: str) -> float:
    """The result of a row whose scores are all -inf, where zeros are asked for."""
    return -torch.inf if name == "logsumexp" else 0.0


class Saved(NamedTuple):
    """Tensors and settings from which the derivatives of one call are computed; y and z are float32 or float64.

    Attributes:
        y: The result; the scores if the operation keeps its input.
        z: The scores if the operation keeps its input; else None.
        unmasked: True for the elements that are not masked, in a shape that broadcasts to y; None without a mask.
        fully_masked_rows: True for the rows whose scores are all -inf; None unless `zero` is True and z is given.
        zero: True where a row whose scores are all -inf gives zeros.
        dim: The softmax dimension.
    """

    y: Tensor
    z: Tensor | None
    unmasked: Tensor | None
    fully_masked_rows: Tensor | None
    zero: bool
    dim: int


def _softmax_gradient(saved: Saved, dy: Tensor) -> Tensor:
    y, dim = saved.y, saved.dim
    return y * (dy - (dy * y).sum(dim, keepdim=True))


def _log_softmax_gradient(saved: Saved, dy: Tensor) -> Tensor:
    y, dim = saved.y, saved.dim
    dz = dy - y.exp() * dy.sum(dim, keepdim=True)
    if saved.zero and y.dim() and y.shape[dim] > 1:
        # At most one probability of a row is 1.  If all logarithms are 0, the row was fully masked.
        dz = dz.masked_fill((y == 0).all(dim, keepdim=True), 0.0)
    return dz


def _logsumexp_gradient(saved: Saved, dy: Tensor) -> Tensor:
    assert saved.z is not None
    # Computed from the scores: the result may have been rounded to 16 bits.
    dz = dy * (saved.z - saved.z.logsumexp(saved.dim, keepdim=True)).exp()
    return dz if saved.fully_masked_rows is None else torch.where(saved.fully_masked_rows, 0.0, dz)


GRADIENTS: dict[str, Callable[[Saved, Tensor], Tensor]] = {
    "softmax": _softmax_gradient,
    "log_softmax": _log_softmax_gradient,
    "logsumexp": _logsumexp_gradient,
}
"""Gradient with respect to the scores from the gradient dy of the result, before masked elements get 0.

The dy of a per-row operation keeps the softmax dimension with size 1.
"""


def _softmax_tangent(saved: Saved, dz: Tensor) -> Tensor:
    return saved.y * (dz - (dz * saved.y).sum(saved.dim, keepdim=True))


def _log_softmax_tangent(saved: Saved, dz: Tensor) -> Tensor:
    return dz - (dz * saved.y.exp()).sum(saved.dim, keepdim=True)


def _logsumexp_tangent(saved: Saved, dz: Tensor) -> Tensor:
    assert saved.z is not None
    return (dz * result("softmax", saved.z, saved.dim, False)).sum(saved.dim, keepdim=True)


TANGENTS: dict[str, Callable[[Saved, Tensor], Tensor]] = {
    "softmax": _softmax_tangent,
    "log_softmax": _log_softmax_tangent,
    "logsumexp": _logsumexp_tangent,
}
"""Tangent of the result from the tangent dz of the scores, for forward-mode differentiation."""


def of_empty_rows(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A per-row output for rows without an element: what the identity state gives."""
    lowest = torch.finfo(dtype).min
    values = {"lse": -torch.inf, "m": lowest, "l": 0.0, "entropy": torch.nan}
    return torch.full(shape, values[name], dtype=dtype, device=device)
