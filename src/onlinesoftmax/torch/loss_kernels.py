"""Cross-entropy on torch tensors by our kernels.

    reduced loss with a gradient     the loss kernel reads the logits once, and writes the losses and the gradient
    reduced loss without a gradient  the loss kernel reads the logits once, and writes the losses
                                     (a CUDA kernel writes the scalar itself where `scalar_output` allows it; elsewhere
                                     the kernels of small_kernels.py run before and after the loss kernel)
    losses of each row               forward saves the state (m, l) of each row: the maximum of the scores, and the sum
                                     of exp(score - m); backward reads the logits again

loss_run.py calls this module where our kernels can run, and loss_eager.py elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..core.call import Call
from ..core.options import bits
from ..ops import CROSS_ENTROPY
from . import loss_eager
from .autograd import is_recorded, launch, prepared_launch, prepared_recording, prepared_results, record, results_of
from .formulas import accumulator_of
from .gradients import is_traced
from .loss_arguments import Loss, is_class, scales_weight
from .prepare import backend_of
from .recording import Recording
from .small_kernels import Reducer, reducer, weight_scaler

Tensor = torch.Tensor

# The output "y" is the gradient with respect to the logits.


def loss_call(x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss, dy: Tensor | None = None) -> Call:
    """The call of the operation that computes the loss of each row.

    Args:
        x: Logits.
        target: Target of each row: the shape of x without `loss.settings.dim`.
        weight: Factor of each class, or None.
        loss: The other arguments.
        dy: Derivative of the final scalar with respect to the loss of each row, of a shape that broadcasts to the
            rows; needed if the kernel writes the gradient "y" but not the scalar.
    """
    beside: dict[str, Any] = {"target": target, **loss_numbers(loss)}
    if weight is not None:
        beside["weight"] = weight
        if loss.smoothing:
            beside["weight_sum"] = weight.sum(dtype=accumulator_of(loss.wide(x), weight.dtype))
    if dy is not None:
        beside["dy"] = dy
    return Call(CROSS_ENTROPY, x, loss.settings, loss.options, None, beside)


def loss_numbers(loss: Loss) -> dict[str, int]:
    """ignore_index, and smoothing and z_loss if not 0: each as the integer that has the bits of its float64."""
    numbers = {"ignore_index": bits(float(loss.ignore_index))}
    if loss.smoothing:
        numbers["smoothing"] = bits(loss.smoothing)
    if loss.z_loss:
        numbers["z_loss"] = bits(loss.z_loss)
    return numbers


MOST_ROWS_IN_ONE_LAUNCH = 1 << 14
"""The largest number of rows for which the loss kernel writes the scalar itself.  Do not raise it above 2^31.

One launch instead of three saves host time, but a few of its blocks add the losses of all rows.  On an H200, forward
and backward of 16384 x 4096 bfloat16 are faster with one launch, and those of 65536 x 1024 with three.
"""

MOST_BYTES_IN_ONE_LAUNCH = 128 << 20
"""The largest number of bytes of logits for which a kernel that writes the gradient writes the scalar itself.

For more bytes the GPU takes longer than the host, and three launches, which overlap, are faster: for example, forward
and backward of 8192 x 32000 bfloat16 on an H200.
"""


def scalar_output(call: Call, loss: Loss, with_gradient: bool) -> str:
    """Name of the kernel's scalar output, "mean_loss" or "total_loss".

    It is an empty string if separate kernels reduce the losses.
    Only CUDA's kernels can write a scalar, so they do if the plan for the losses of the rows takes CUDA.
    """
    # Test for a trace before comparing sizes: a comparison would specialise the traced program to these sizes.
    if not call.x.is_cuda or is_traced(call.x):
        return ""
    return scalar_in_one_launch(call, loss, with_gradient, backend_of)


def scalar_in_one_launch(
    call: Call, loss: Loss, with_gradient: bool, backend_of: Callable[[Call, tuple[str, ...]], str]
) -> str:
    """`scalar_output` of a call on a GPU; `backend_of` gives the backend of the plan for a call and its outputs."""
    x = call.x
    most_bytes = MOST_BYTES_IN_ONE_LAUNCH if with_gradient else math.inf
    if call.beside["target"].numel() > MOST_ROWS_IN_ONE_LAUNCH or not 0 < x.numel() * x.element_size() <= most_bytes:
        return ""
    if with_gradient:
        call = call.with_operands(dy=torch.empty((), dtype=loss.wide(x), device=x.device))
    if backend_of(call, ("loss", "y") if with_gradient else ("loss",)) != "cuda":
        return ""
    return f"{'mean' if loss.reduction == 'mean' else 'total'}_loss"


def by_cuda(call: Call) -> Call:
    """The same call with CUDA as its backend, because no other can write a scalar."""
    return call.with_settings(choice=call.settings.choice._replace(backend="cuda"))


def losses(x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss, stats: bool) -> tuple[Tensor, ...]:
    """(loss,), or (loss, lse, entropy, largest) with `stats`, by our kernels; the statistics are detached."""
    weight = loss_eager.weight_of_mean(x, target, weight, loss)
    call, results = loss_call(x, target, weight, loss), ("loss", *(("lse", "entropy", "largest") if stats else ()))
    how = {"by_pytorch": _loss_by_pytorch, "loss": loss}
    if loss.reduction == "none":
        return results_of(call, results, **how)
    if not is_recorded(call):
        return _reduced(call, loss, results)
    if waits_for_scale(call):
        rows, *more = results_of(call, results, by_pytorch=_loss_by_pytorch, loss=loss.per_row())
        return loss_eager.reduced(rows, target, weight, loss), *more
    return record(call, ("loss", "y", *results[1:]), results, forward=_reduced_by_kernels, **how)


def waits_for_scale(call: Call) -> bool:
    """True where the gradient of a reduced loss must not be stored before the factor of a gradient scaler arrives.

    The gradient of a mean over many rows is too small for float16, so backward computes it from the logits.
    """
    return call.x.dtype is torch.float16 and is_recorded(call)


def _reduced_by_kernels(recording: Recording, call: Call) -> tuple[Tensor, ...]:
    assert recording.loss is not None
    return _reduced(call, recording.loss, recording.outputs)


def _reduced(call: Call, loss: Loss, outputs: tuple[str, ...]) -> tuple[Tensor, ...]:
    """The outputs of a cross-entropy that is reduced to the scalar "loss".

    With the output "y", the gradient of the scalar is written, in the memory of the logits with `loss.inplace`.
    """
    x, target, weight = call.x, call.beside["target"], call.beside.get("weight")
    with_gradient = "y" in outputs
    if with_gradient and loss.inplace and not is_traced(x):
        call = call.with_operands(y=x)
    if scalar := scalar_output(call, loss, with_gradient):
        found = launch(by_cuda(call), (scalar, *outputs[1:]))
    else:
        launches = None if is_traced(x) else reducer(x, target, weight, loss, with_gradient)
        factor = None if launches is None or launches.factor is None else launches.factor(target, weight)
        if factor is None and with_gradient:
            factor = (loss_eager.factor(target, weight, loss, loss.wide(x)),)
        rows, *more = launch(call if factor is None else call.with_operands(dy=factor[0]), outputs)
        if launches is None:
            y = loss_eager.reduced(rows, target, weight, loss)
            # Without a change of dtype, `to` returns the tensor itself.  In a trace torch 2.11 takes both names for
            # results of the autograd function, and loses the gradient of the first.
            y = y if y.dtype == loss.settings.dtype else y.to(loss.settings.dtype)
        else:
            y = launches.total(rows, target, weight, factor)
        found = (y, *more)
    if "y" in call.beside:
        # Autograd then raises if another operation needs the logits for its gradient.
        torch.autograd.graph.increment_version(x)
    return found


def _loss_by_pytorch(recording: Recording, call: Call) -> dict[str, Tensor]:
    """{"dy": the loss} by PyTorch's operations: results stand under the names of their gradients.

    PyTorch's operations refuse a target out of range, so such a row gets the loss 0 and no gradient.
    """
    assert recording.loss is not None
    x, target, weight, loss = call.x, call.beside["target"], call.beside.get("weight"), recording.loss
    loss = loss._replace(options=call.options)
    inside = is_class(target, x.shape[loss.settings.dim])
    rows = loss_eager.rows_of(x, target.where(inside, 0), weight, loss).where(inside, 0.0)
    return {"dy": loss_eager.reduced(rows, target, weight, loss)}


def prepared_loss(x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss) -> Callable[..., Any] | None:
    """The function (x, target), or (x, target, weight), of cacheable, checked losses; None for the general path."""
    in_place = loss.inplace and torch.is_grad_enabled() and x.requires_grad
    if loss.settings.choice.batch_invariant or in_place or not target.is_contiguous():
        return None
    if weight is not None and scales_weight(target, weight, loss):
        scale: Callable[..., Tensor] = weight_scaler(x, target, weight, loss)
        of_scaled = _prepared(loss_call(x, target, scale(target, weight), loss), loss)
        return of_scaled and (lambda x, target, weight: of_scaled(x, target, scale(target, weight)))
    return _prepared(loss_call(x, target, weight, loss), loss)


def _prepared(call: Call, loss: Loss) -> Callable[..., Any] | None:
    """The function (x, target), or (x, target, weight), of a cacheable loss; None where it needs the general path."""
    how, wide = {"by_pytorch": _loss_by_pytorch, "loss": loss}, loss.wide(call.x)
    if loss.reduction != "none" and waits_for_scale(call):
        of_rows = _prepared(call, loss.per_row(dtype=wide))
        return of_rows and (
            lambda x, target, *weight: loss_eager.reduced(
                of_rows(x, target, *weight), target, weight[0] if weight else None, loss
            ).to(loss.settings.dtype)
        )
    if loss.reduction == "none":
        run = prepared_results(call, ("loss",), **how)
    else:
        reduced = _prepared_reduced(call, loss, is_recorded(call))
        if reduced is None:
            return None
        run = prepared_recording(call, ("loss", "y"), ("loss",), run=reduced, **how) if is_recorded(call) else reduced
    dtype, weight_sum = loss.settings.dtype, call.beside.get("weight_sum")
    sum_dtype = None if weight_sum is None else weight_sum.dtype
    converts = loss.reduction == "none" and dtype != wide
    if "weight" not in call.beside and not converts:
        return run

    def prepared(x: Tensor, target: Tensor, *weight: Tensor) -> Any:
        y = run(x, target, *weight, *[] if sum_dtype is None else [weight[0].sum(dtype=sum_dtype)])
        return y.to(dtype) if converts else y

    return prepared


def _prepared_reduced(call: Call, loss: Loss, with_gradient: bool) -> Callable[..., Any] | None:
    """The function of the tensors of a loss that launches the kernels for its scalar, and returns it and the gradient.

    None where PyTorch's operations must reduce the losses.
    """
    x, target, weight = call.x, call.beside["target"], call.beside.get("weight")
    if scalar := scalar_output(call, loss, with_gradient):
        return prepared_launch(by_cuda(call), (scalar, "y") if with_gradient else (scalar,))
    small = reducer(x, target, weight, loss, with_gradient)
    if small is None:
        return None
    if not with_gradient:
        rows, total = prepared_launch(call, ("loss",)), small.total
        return lambda x, target, *more: total(rows(x, target, *more), target, more[0] if more else None, None)
    dy = torch.empty((), dtype=loss.wide(x), device=x.device)
    # The kernel that computes dy runs directly before the loss kernel, which can then begin early.  With weight_sum, an
    # early start has not been tried.
    follows_divisor = loss.reduction == "mean" and "weight_sum" not in call.beside
    return reduced_with_gradient(prepared_launch(call.with_operands(dy=dy), ("loss", "y"), follows_divisor), small)


def reduced_with_gradient(rows: Callable[..., Any], small: Reducer) -> Callable[..., tuple[Tensor, Tensor]]:
    """The function of the tensors of a loss that launches small kernels before and after the loss kernel.

    Args:
        rows: The function (x, target, weight, ..., factor) that launches the loss kernel and returns (losses,
            gradient).
        small: The other launches.
    """
    factor_of, total = small
    assert factor_of is not None

    def run(x: Tensor, target: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
        weight = more[0] if more else None
        factor = factor_of(target, weight)
        losses, gradient = rows(x, target, *more, factor)
        return total(losses, target, weight, factor), gradient

    return run
