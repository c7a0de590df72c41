"""Small kernels beside the passes over the logits.

For a loss that becomes a scalar: the factor of the gradient before the loss kernel, and the total after it.
For sharded rows: the merge of their states, and the incoming gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch

from ..kernels import registry
from ..kernels.reduction import Reduction
from ..kernels.sharded import ShardedRows
from .arguments import is_lazy
from .fast_path import PREPARED_CALLS, find, is_compiling, keep
from .formulas import accumulator_of
from .gradients import is_traced
from .loss_arguments import Loss, scaled, scaled_weight
from .prepare import DTYPE_NAMES, aligned, allocator, on_device

Tensor = torch.Tensor

Run = Callable[[Tensor, dict[str, Any]], None]


class Reducer(NamedTuple):
    """The launches that a loss of one kind needs beside its own kernel.

    Attributes:
        factor: The function (target, weight) that returns two numbers, in one tensor if a kernel computes them.  The
            first is the derivative of the scalar with respect to each loss, and the second its reciprocal.  None
            without a gradient.
        total: The function (losses, target, weight, result of `factor`) that returns the scalar in the result's dtype.
    """

    factor: Callable[[Tensor, Tensor | None], Any] | None
    total: Callable[[Tensor, Tensor, Tensor | None, Any], Tensor]


def reducer(
    x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss, with_gradient: bool, classes: int | None = None
) -> Reducer | None:
    """The launches for a loss with the reduction "mean" or "sum"; None where PyTorch's operations must do it.

    Args:
        x, target, weight, loss: The arguments of the call.
        with_gradient: True where the loss kernel writes the gradient, and needs the factor of it.
        classes: Number of classes of whole rows; None if x has all of them.
    """
    backend, mean, result = backend_for(x), loss.reduction == "mean", loss.settings.dtype
    if backend is None or (mean and not may_count(target, weight, loss)):
        return None
    wide = loss.wide(x)
    adds, counts = reductions(x, target, weight, loss, with_gradient, classes)
    # The losses and the factor are new tensors.
    add = _prepared(backend, adds, x.device, () if with_gradient else _alignments(target, weight))
    total = _total(add, result, x.device)
    if not with_gradient:
        return Reducer(None, total)
    if counts is None:
        return Reducer(lambda _target, _weight: _ones(wide, x.device), total)
    count = _prepared(backend, counts, x.device, _alignments(target, weight))
    return Reducer(_factor(count, wide, x.device), total)


def reductions(
    x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss, with_gradient: bool, classes: int | None = None
) -> tuple[Reduction, Reduction | None]:
    """(reduction after the loss kernel, reduction before it) for a loss; arguments as for `reducer`.

    The second is None where no divisor is needed before the loss kernel.
    """
    counts = partial(_reduction, x, target, weight, loss, classes or x.shape[loss.settings.dim])
    if not with_gradient:
        return counts(), None
    mean, wide, result = loss.reduction == "mean", DTYPE_NAMES[loss.wide(x)], DTYPE_NAMES[loss.settings.dtype]
    adds = Reduction(target.numel(), wide, result, divides=mean)
    return adds, counts(adds=False) if mean else None


def _alignments(target: Tensor, weight: Tensor | None) -> tuple[bool, ...]:
    """True for each tensor of the caller that begins on 16 bytes: the target, then the weight if there is one."""
    return (aligned(target),) if weight is None else (aligned(target), aligned(weight))


def _reduction(
    x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss, classes: int, adds: bool = True, keeps: bool = False
) -> Reduction:
    """The sum of the losses, or their mean in one launch.

    Args:
        x, target, weight, loss: The arguments of the call.
        classes: Number of classes of whole rows.
        adds: False for the divisor of the mean alone.
        keeps: Write the divisor of a mean beside the total.
    """
    rows, wide, result = target.numel(), DTYPE_NAMES[loss.wide(x)], DTYPE_NAMES[loss.settings.dtype] if adds else None
    if loss.reduction == "sum":
        return Reduction(rows, wide, result)
    of_target, of_weight = DTYPE_NAMES[target.dtype], None if weight is None else DTYPE_NAMES[weight.dtype]
    return Reduction(rows, wide, result, False, of_target, of_weight, classes, loss.ignore_index, keeps)


def weight_scaler(x: Tensor, target: Tensor, weight: Tensor, loss: Loss) -> Callable[[Tensor, Tensor], Tensor]:
    """The function (target, weight) that returns `scaled_weight`, by two launches where the kernels can count.

    Args:
        x, target, weight, loss: The arguments of a weighted mean with z_loss.
    """
    wide = accumulator_of(loss.wide(x), weight.dtype)
    rows, weights = (reducer(x, target, each, loss, True) for each in (None, weight))
    if rows is None or weights is None or rows.factor is None or weights.factor is None:
        return lambda target, weight: scaled_weight(target, weight, loss, wide)
    count, add = rows.factor, weights.factor
    return lambda target, weight: scaled(weight, count(target, None)[1], add(target, weight)[1])


Total = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""The function (losses, target, weight) that returns the scalar and its (1 / divisor, divisor), or None for a sum."""


def total_after_losses(x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss, classes: int) -> Total:
    """The launch that reduces the losses of rows whose gradient is computed later.

    Args:
        x, target, weight, loss: The arguments of the call, for which there is a backend, and `may_count` holds.
        classes: Number of classes of whole rows; a shard x has only some of them.
    """
    backend, result, wide = backend_for(x), loss.settings.dtype, loss.wide(x)
    assert backend is not None
    assert result is not None
    reduction = _reduction(x, target, weight, loss, classes, keeps=True)
    keeps = reduction.keeps
    run = _prepared(backend, reduction, x.device, _alignments(target, weight))
    new = allocator(x.device)

    def total(losses: Tensor, target: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
        out, divisor = new((), (), result), new((2,), (1,), wide) if keeps else None
        run(out, {"losses": losses, "target": target, "weight": weight, "divisor": divisor})
        return out, divisor

    return on_device(total, x.device)


def backend_for(t: Tensor) -> str | None:
    """The backend whose small kernels take a tensor; None where there is none."""
    if not t.is_cuda:
        runs = t.is_cpu and registry.unavailable("triton") is None and registry.load("triton").interpreted()
        return "triton" if runs else None
    return next((name for name in ("cuda", "triton") if registry.unavailable(name) is None), None)


def scale_gradient(
    gradient: Tensor, factor: Tensor, dtype: torch.dtype | None = None, in_place: bool = True
) -> Tensor:  # fmt: skip
    """Multiply a gradient by a tensor of one element: in place, except in a trace or under vmap or into another dtype.

    In place, our kernel reads and writes nothing where the factor is 1; PyTorch's `mul_` always does.  Into another
    dtype, PyTorch takes twice as long as one read and one write.

    Args:
        gradient, factor: The tensors.
        dtype: Dtype of the product; None for that of the gradient.
        in_place: False to write a new tensor.
    """
    key, run = ((), None) if is_compiling() else find((_scaler, dtype, in_place), (gradient, factor))
    if run is None:
        if is_traced(factor) or is_lazy(factor) or is_lazy(gradient):
            return (gradient * factor).to(dtype or gradient.dtype)
        run = _scaler(gradient, factor, dtype or gradient.dtype, in_place)
        if key:
            keep(PREPARED_CALLS, key, run)
    scaled: Tensor = run(gradient, factor)
    return scaled


def _scaler(
    gradient: Tensor, factor: Tensor, dtype: torch.dtype, in_place: bool
) -> Callable[[Tensor, Tensor], Tensor]:  # fmt: skip
    """The function (gradient, factor) that does what `scale_gradient` does with tensors like these."""
    in_place = in_place and dtype == gradient.dtype
    out = gradient if in_place else torch.empty_like(gradient, dtype=dtype)
    # The kernel takes the elements in their order in memory, so the gradient may have any dense layout.
    dense = torch.ops.aten.is_non_overlapping_and_dense(gradient)
    # Triton's interpreter truncates where it should round.
    rounds = in_place or gradient.is_cuda
    backend = backend_for(gradient) if dense and rounds and aligned(gradient) else None
    multiply = registry.small_kernels(backend, "multiply").bind(gradient, factor, out) if backend else None

    def run(gradient: Tensor, factor: Tensor) -> Tensor:
        out = gradient if in_place else torch.empty_like(gradient, dtype=dtype)
        if multiply is None:
            return torch.mul(gradient, factor, out=out)
        multiply(gradient, factor, out)
        return out

    return on_device(run, gradient.device)


def may_count(target: Tensor, weight: Tensor | None, loss: Loss) -> bool:
    """True where the kernel can read the targets and the weight."""
    return (
        target.is_contiguous()
        and (weight is None or weight.is_contiguous())
        and type(loss.ignore_index) is int
        and -(2**63) <= loss.ignore_index < 2**63
    )


def _total(run: Run, dtype: torch.dtype, device: torch.device) -> Callable[..., Tensor]:
    new = allocator(device)

    def total(losses: Tensor, target: Tensor, weight: Tensor | None, factor: Tensor | None) -> Tensor:
        out = new((), (), dtype)
        run(out, {"losses": losses, "target": target, "weight": weight, "count": factor})
        return out

    return on_device(total, device)


def _factor(run: Run, dtype: torch.dtype, device: torch.device) -> Callable[..., Tensor]:
    new = allocator(device)

    def factor(target: Tensor, weight: Tensor | None) -> Tensor:
        out = new((2,), (1,), dtype)
        run(out, {"target": target, "weight": weight})
        return out

    return on_device(factor, device)


@lru_cache(maxsize=4096)
def _prepared(backend: str, reduction: Reduction, _device: torch.device, _alignments: tuple[bool, ...]) -> Run:
    """The launch of a reduction for tensors of these alignments on a device, which is then the current one.

    The first call specialises the kernel.
    """
    run: Run = registry.small_kernels(backend, "reduction").bind(reduction)
    return run


def prepared_sharded(kernel: str, rows: ShardedRows, device: torch.device) -> Callable[[dict[str, Any]], None]:
    """The launch run(tensors) of the kernel "merge" or "incoming" of sharded rows, for tensors on a device."""
    backend = backend_for(torch.empty(0, device=device))
    assert backend is not None
    run: Callable[[dict[str, Any]], None] = registry.small_kernels(backend, "merge").bind(kernel, rows)
    return on_device(run, device)


def _ones(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Two ones, filled once for each stream; other streams would not wait for the fill."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        # A graph that is captured fills its own tensor in each replay; nobody else may keep that.
        return torch.ones(2, dtype=dtype, device=device)
    return _ones_of_stream(dtype, device, torch._C._cuda_getCurrentRawStream(device.index))


@cache
def _ones_of_stream(dtype: torch.dtype, device: torch.device, _stream: int) -> Tensor:
    return torch.ones(2, dtype=dtype, device=device)
