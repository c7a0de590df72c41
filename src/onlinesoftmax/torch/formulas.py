"""The formulas of the operations in PyTorch's own operations, which have derivatives of every order.

The eager backend, forward mode and derivatives of derivatives use these formulas.  A new operation adds its entries to
the tables in this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..core.arguments import checked_dim
from ..core.arrays import namespace
from ..ops import OPERATIONS
from ..ops.reference import evaluate
from .fast_path import is_transformed

Tensor = torch.Tensor


def widened(x: Tensor) -> Tensor:
    """Floating-point numbers in float32; float64 as they are."""
    # A comparison of dtypes takes the host less time than torch.promote_types, or than `to` where nothing changes.
    return x if x.dtype == torch.float32 or x.dtype == torch.float64 else x.float()


def by_pytorch(name: str, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Call the function of PyTorch that has this name, as `call_pytorch` does."""
    return call_pytorch(getattr(torch, name), x, *args, **kwargs)


def call_pytorch(function: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Call a function of PyTorch.

    For plain tensors, modes such as `onlinesoftmax.override` are disabled during the call.
    """
    if torch._C._len_torch_function_stack() and type(x) in PLAIN_TYPES:
        with torch._C.DisableTorchFunction():
            return function(x, *args, **kwargs)
    return function(x, *args, **kwargs)


PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""Types of the tensors whose functions are PyTorch's own; a subclass may bring its own."""


def accumulator_of(dtype: torch.dtype, out_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which states are kept for an input and a result of these dtypes."""
    return torch.promote_types(torch.promote_types(dtype, out_dtype), torch.float32)


def result(name: str, z: Tensor, dim: Any, keepdim: bool) -> Tensor:
    """The result of a forward operation for scores z: by PyTorch's function where its sums are right."""
    if not OPERATIONS[name].runs_on("eager"):
        return call_pytorch(_by_formula, z, name, dim, keepdim)
    if name == "logsumexp":
        return call_pytorch(_logsumexp, z, dim, keepdim)
    if is_rounded_early(name, z):
        return call_pytorch(_narrow_log_softmax, z, dim)
    return call_pytorch(_in_passes, z, name, dim) if is_long(z, dim) else by_pytorch(name, z, dim)


MOST_TERMS = {torch.float32: 1 << 12, torch.float16: 1 << 12, torch.bfloat16: 1 << 15}
"""Largest number of terms in one running sum of PyTorch's softmax on a CPU that is taken as right, by dtype.

A running sum of n float32 terms is off by up to n * 2^-24 of itself: 2^-12, or a quarter unit of bfloat16.
"""

LANES = 16
"""Running sums of PyTorch's softmax along the last dimension, with AVX-512; along any other there is one."""


def is_long(x: Tensor, dim: Any, dtype: torch.dtype | None = None) -> bool:
    """True for rows on a CPU that PyTorch's softmax and log_softmax sum too inexactly, in the dtype of x or in `dtype`.

    A trace has PyTorch's own operation, which the compiler replaces by passes of its own.
    """
    most = MOST_TERMS.get(dtype or x.dtype)
    if most is None or type(dim) is not int or torch.compiler.is_dynamo_compiling() or type(x) not in PLAIN_TYPES:
        return False
    # A strided nested tensor has no shape.
    if not x.is_cpu or x.is_nested:
        return False
    shape = x.shape
    if not -len(shape) <= dim < len(shape) or shape[dim] <= most:
        return False
    return dim not in (-1, len(shape) - 1) or shape[dim] > LANES * most


def is_narrow(x: Tensor) -> bool:
    """True for 16-bit logits, whose sums and losses PyTorch on a CPU partly computes in 16 bits."""
    return x.dtype is torch.float16 or x.dtype is torch.bfloat16


def is_rounded_early(name: str, x: Any) -> bool:
    """True for a log_softmax on a CPU that PyTorch rounds to 16 bits before the last subtraction.

    A log-probability of -0.001, and its gradient, are then 0 in bfloat16.  A trace has PyTorch's own operation.
    """
    if name != "log_softmax" or not is_narrow(x) or type(x) not in PLAIN_TYPES or torch.compiler.is_compiling():
        return False
    return x.is_cpu and x.layout is torch.strided and not x.is_nested


ELEMENTS_IN_CACHE = 1 << 19
"""Logits per thread converted at a time: 2 MB in float32, plus 2 MB of log-probabilities.

A loss of 1024 x 50257 bfloat16 without gradient takes 0.6 times PyTorch's time in such parts, and 2.6 times when
converted at once.
"""

LARGEST_SLICE = 8
"""Largest slice that is converted by itself, in units of ELEMENTS_IN_CACHE per thread.

On a CPU with 2 threads, a loss of 8 x 1000 x 64 x 64 bfloat16 takes 0.4 times as long one slice at a time.  With 2^24
logits per slice, or with two classes, one slice at a time was not faster.
"""


def rows_at_a_time(x: Tensor, wide: torch.dtype) -> int:
    """Number of leading slices of x to convert at a time.

    It is 0 to convert all at once, for example where autograd would keep every copy.
    """
    if x.dtype == wide or x.dim() < 2 or not x.is_cpu or type(x) not in PLAIN_TYPES or torch.compiler.is_compiling():
        return 0
    if is_transformed():
        return 0
    if torch.is_grad_enabled() and x.requires_grad:
        return 0
    part, of_slice = ELEMENTS_IN_CACHE * torch.get_num_threads(), max(1, x[:1].numel())
    if of_slice > part * (LARGEST_SLICE if x.shape[1] > 2 else 1):
        return 0
    rows = max(1, part // of_slice)
    return rows if rows < x.shape[0] else 0


def _logsumexp(z: Tensor, dim: Any, keepdim: bool) -> Tensor:
    """Logsumexp by PyTorch, whose sums are pairwise; of 16-bit numbers in float32, rounded once."""
    return z.float().logsumexp(dim, keepdim).to(z.dtype) if is_narrow(z) else z.logsumexp(dim, keepdim)


def _narrow_log_softmax(z: Tensor, dim: int) -> Tensor:
    """Log-softmax of 16-bit logits and its gradient, computed in float32 and rounded once."""
    if is_transformed():
        return result("log_softmax", z.float(), dim, False).to(z.dtype)
    if not (z.requires_grad and torch.is_grad_enabled()):
        return _log_softmax_rounded_once(z, dim)
    y: Tensor = _NarrowLogSoftmax.apply(z, dim)
    return y


def _log_softmax_rounded_once(z: Tensor, dim: int) -> Tensor:
    return _rounded_once(lambda z: result("log_softmax", z, dim, False), dim, z)


class _NarrowLogSoftmax(torch.autograd.Function):
    """`_narrow_log_softmax` for autograd, with the gradient dy - exp(y) * sum(dy)."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, dim: int) -> Tensor:
        y = _log_softmax_rounded_once(z, dim)
        ctx.save_for_backward(y)
        ctx.dim = dim
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        dim = ctx.dim

        def gradient(y: Tensor, dy: Tensor) -> Tensor:
            return dy - y.exp() * dy.sum(dim, keepdim=True)

        return _rounded_once(gradient, dim, *ctx.saved_tensors, dy), None


def _rounded_once(function: Callable[..., Tensor], dim: int, *tensors: Tensor) -> Tensor:
    """A function of 16-bit tensors in float32, rounded to the dtype of the first, in parts that fit the cache."""
    x = tensors[0]
    rows = rows_at_a_time(x, torch.float32) if dim % max(x.dim(), 1) else 0
    if not rows:
        return function(*[t.float() for t in tensors]).to(x.dtype)
    y = torch.empty_like(x)
    for first in range(0, len(x), rows):
        part = slice(first, first + rows)
        y[part] = function(*[t[part].float() for t in tensors])
    return y


def _in_passes(z: Tensor, name: str, dim: int) -> Tensor:
    """Softmax or log-softmax in separate operations: `torch.sum` adds in pairs, with small errors at every length.

    The gradients of these operations add in pairs too.  The derivative with respect to the maximum is 0.
    """
    wide = z.to(torch.promote_types(z.dtype, torch.float32))
    shifted = wide - wide.detach().amax(dim, keepdim=True)
    if name == "log_softmax":
        return (shifted - shifted.exp().sum(dim, keepdim=True).log()).to(z.dtype)
    # Autograd does not keep the difference, so the exponentials may have its memory.
    terms = shifted.exp_()
    kept = terms.requires_grad or torch._C._are_functorch_transforms_active()
    return (torch.div if kept else torch.Tensor.div_)(terms, terms.sum(dim, keepdim=True)).to(z.dtype)


def _by_formula(z: Tensor, name: str, dim: int, keepdim: bool) -> Tensor:
    """The result of an operation of which PyTorch has no function, by the formula of its declaration."""
    per_row, dim = OPERATIONS[name].per_row, checked_dim(name, dim, z.dim())
    if not z.numel() and not per_row:
        return z.clone()
    wide = z.to(torch.promote_types(z.dtype, torch.float32)).reshape(z.shape or (1,))
    y: Tensor = evaluate(name, namespace(wide), {"x": wide}, dim).to(z.dtype)
    return y.squeeze(dim) if not z.dim() or (per_row and not keepdim) else y


def exact_log_softmax(z: Tensor, dim: int) -> Tensor:
    """Log-softmax of float32 or float64 scores with small errors at every length, for the statistics of rows."""
    if z.dtype == torch.float64 or not z.shape[dim]:
        return result("log_softmax", z, dim, False)
    return call_pytorch(_in_passes, z, "log_softmax", dim)


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
"""Gradient with respect to the scores from the gradient dy of the result, where the declared formula does not serve."""


def score_gradient(name: str, saved: Saved, dy: Tensor) -> Tensor:
    """Gradient with respect to the scores from the gradient dy of the result, before masked elements get 0.

    The dy of a per-row operation keeps the softmax dimension with size 1.
    """
    if name in GRADIENTS:
        return GRADIENTS[name](saved, dy)
    values = {"x": saved.y, "dy": dy}
    dz: Tensor = evaluate(OPERATIONS[name].gradient_name, namespace(dy), values, saved.dim)
    return dz


def _log_softmax_tangent(saved: Saved, dz: Tensor) -> Tensor:
    return dz - (dz * saved.y.exp()).sum(saved.dim, keepdim=True)


def _logsumexp_tangent(saved: Saved, dz: Tensor) -> Tensor:
    assert saved.z is not None
    return (dz * result("softmax", saved.z, saved.dim, False)).sum(saved.dim, keepdim=True)


TANGENTS: dict[str, Callable[[Saved, Tensor], Tensor]] = {
    # The Jacobian of softmax is symmetric.
    "softmax": _softmax_gradient,
    "log_softmax": _log_softmax_tangent,
    "logsumexp": _logsumexp_tangent,
}
"""Tangent of the result from the tangent dz of the scores, for forward-mode differentiation."""


def tangent(name: str, saved: Saved, dz: Tensor) -> Tensor:
    """Tangent of the result from the tangent dz of the scores.

    Raises:
        NotImplementedError: the operation has no formula for it.
    """
    if name not in TANGENTS:
        raise NotImplementedError(f"{name}() has no derivative in forward mode")
    return TANGENTS[name](saved, dz)


def of_empty_rows(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A per-row output for rows without an element: that of the empty state; the entropy is the sum over nothing."""
    lowest = torch.finfo(dtype).min
    values = {"lse": -torch.inf, "m": lowest, "l": 0.0, "entropy": 0.0, "largest": -1}
    return torch.full(shape, values[name], dtype=torch.int64 if name == "largest" else dtype, device=device)
