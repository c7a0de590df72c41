"""Calls of the operations with a target column per row on torch tensors: cross-entropy and token log-probabilities.

    reduced loss with a gradient     one kernel reads the logits once, and writes the scalar and its gradient
    reduced loss without a gradient  one kernel reads the logits once, and writes the scalar
                                     (Triton's kernels write the losses; reductions.py has small kernels beside them)
    losses or log-probabilities of   forward saves the state (m, l) of each row: the maximum of the scores, and the sum
    each row                         of exp(score - m); backward reads the logits again

losses.py calls this module where our kernels can run, and targets_eager.py elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..core.call import Call
from ..core.options import bits
from ..kernels import registry
from ..ops import OPERATIONS
from . import targets_eager
from .autograd import with_tensors
from .check import TRACED_TYPES, is_batched
from .gradients import accumulator_of, outputs_of
from .loss import Loss, count_of, is_class
from .prepare import aligned, backend_of
from .reductions import backend_for, reducer

Tensor = torch.Tensor

_LOSS, _LOGPROBS = OPERATIONS["cross_entropy"], OPERATIONS["token_logprobs"]


class Rows(NamedTuple):
    """Results of one kernel for the rows of a cross-entropy; None where a result was not asked for.

    Attributes:
        loss: Loss of each row in float32 (float64 in float64), or the scalar to which the kernel reduced them.
        gradient: dy times the derivative of the loss of each row with respect to the logits.
        lse, m, l, entropy: Statistics of each row in float32 (float64 in float64).
    """

    loss: Tensor
    gradient: Tensor | None = None
    lse: Tensor | None = None
    m: Tensor | None = None
    l: Tensor | None = None
    entropy: Tensor | None = None


def loss_rows(
    x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss, outputs: tuple[str, ...], dy: Tensor | None = None,
    result: str = "loss",
) -> Rows:  # fmt: skip
    """The losses of all rows or their scalar, and what else is asked for, by one kernel.

    Args:
        x: Logits.
        target: Target of each row: the shape of x without `loss.dim`.
        weight: Factor of each class, or None.
        loss: The other arguments.
        outputs: Names of the outputs besides "loss", in the order in which the operation declares them: "y", "lse",
            "m", "l", "entropy".
        dy: Derivative of the final scalar with respect to the loss of each row, of a shape that broadcasts to the
            rows; given where "y" is asked for, except with a scalar.
        result: "loss", "mean_loss" or "total_loss".
    """
    call = loss_call(x, target, weight, loss, dy)
    overwrites = loss.inplace and "y" in outputs and not _traced(x)
    if overwrites:
        call = call._replace(beside={**call.beside, "y": x})
    if result != "loss":
        call = by_cuda(call)
    tensors = launch(call, (result, *outputs))
    if overwrites:
        # Autograd then raises if another operation needs the logits for its gradient.
        torch.autograd.graph.increment_version(x)
    named = dict(zip((result, *outputs), tensors, strict=True))
    return Rows(named[result], named.get("y"), *(named.get(name) for name in ("lse", "m", "l", "entropy")))


MOST_ROWS_IN_ONE_LAUNCH = 1 << 14
"""The largest number of rows for which the loss kernel writes the scalar itself; at most 2^31.

One launch instead of three saves host time, but a few of its blocks add the losses of all rows.  On an H200, forward
and backward of 16384 x 4096 bfloat16 are faster with one launch, and those of 65536 x 1024 with three.
"""

MOST_BYTES_IN_ONE_LAUNCH = 128 << 20
"""The largest number of bytes of logits for which a kernel that writes the gradient writes the scalar itself.

For more bytes the GPU takes longer than the host, and three launches, which overlap, are faster: for example, forward
and backward of 8192 x 32000 bfloat16 on an H200.
"""


def scalar_output(x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss, with_gradient: bool) -> str:
    """Name of the kernel's scalar output, "mean_loss" or "total_loss".

    It is an empty string if separate kernels reduce the losses.
    Only CUDA's kernels can write a scalar, so they do if the plan for the losses of the rows takes CUDA.
    """
    # Test for a trace before comparing sizes: a comparison would specialise the traced program to these sizes.
    if not x.is_cuda or _traced(x):
        return ""
    most_bytes = MOST_BYTES_IN_ONE_LAUNCH if with_gradient else math.inf
    if target.numel() > MOST_ROWS_IN_ONE_LAUNCH or not 0 < x.numel() * x.element_size() <= most_bytes:
        return ""
    dy = torch.empty((), dtype=loss.wide(x), device=x.device) if with_gradient else None
    call = loss_call(x, target, weight, loss, dy)
    if backend_of(call, ("loss", "y") if with_gradient else ("loss",)) != "cuda":
        return ""
    return f"{'mean' if loss.reduction == 'mean' else 'total'}_loss"


def by_cuda(call: Call) -> Call:
    """The same call with CUDA as its backend, because no other can write a scalar."""
    settings = call.settings
    return call._replace(settings=settings._replace(choice=settings.choice._replace(backend="cuda")))


def loss_call(x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss, dy: Tensor | None) -> Call:
    """The call of the operation that computes the loss of each row.  Arguments as for `loss_rows`."""
    beside = _beside(x, target, weight, loss)
    if dy is not None:
        beside["dy"] = dy if dy.dim() == 0 else dy.unsqueeze(loss.dim)
    return Call(_LOSS, x, loss.settings, loss.options, None, beside)


def loss_gradient(
    x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss, state: tuple[Tensor, Tensor], dy: Tensor
) -> Tensor:
    """The gradient with respect to the logits, from the state (m, l) and the incoming gradient dy of each row."""
    beside = _beside(x, target, weight, loss)
    beside |= {name: t.unsqueeze(loss.dim) for name, t in zip(("dy", "m", "l"), (dy, *state), strict=True)}
    settings = loss.settings._replace(dtype=None)
    (dx,) = launch(Call(OPERATIONS[_LOSS.gradient_name], x, settings, loss.options, None, beside), ("y",))
    return dx


def _beside(x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss) -> dict[str, Any]:
    """Operands shared by forward and backward; each number is passed as the int64 with its float64 bits."""
    dim = loss.dim
    beside: dict[str, Any] = {"target": target.unsqueeze(dim), **loss_numbers(loss)}
    if weight is not None:
        beside["weight"] = weight.reshape(-1, *[1] * (x.dim() - 1 - dim))
        if loss.smoothing:
            beside["weight_sum"] = weight.sum(dtype=accumulator_of(loss.wide(x), weight.dtype))
    return beside


def loss_numbers(loss: Loss) -> dict[str, int]:
    """The numbers of a loss that change something, each float64 as the integer that has its bits."""
    numbers = {"ignore_index": bits(float(loss.ignore_index))}
    if loss.smoothing:
        numbers["smoothing"] = bits(loss.smoothing)
    if loss.z_loss:
        numbers["z_loss"] = bits(loss.z_loss)
    return numbers


def launch(call: Call, outputs: tuple[str, ...]) -> tuple[Tensor, ...]:
    """Run a call and return its outputs; autograd does not record it.  In a trace, a custom operator replaces it."""
    if _traced(call.x):
        from . import custom_ops

        return custom_ops.outputs(call, outputs)
    return outputs_of(call, outputs)


def _traced(x: Tensor) -> bool:
    return torch.compiler.is_compiling() or type(x).__name__ in TRACED_TYPES


def reduced(
    x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss, stats: bool, with_gradient: bool
) -> tuple[Tensor, Rows]:
    """A cross-entropy reduced to a scalar, and the results for its rows; autograd does not record it."""
    outputs = (*(("y",) if with_gradient else ()), *(("lse", "entropy") if stats else ()))
    if scalar := scalar_output(x, target, weight, loss, with_gradient):
        rows = loss_rows(x, target, weight, loss, outputs, None, scalar)
        return rows.loss, rows
    small = None if _traced(x) else reducer(x, target, weight, loss, with_gradient)
    if small is not None:
        factor = small.factor and small.factor(target, weight)
        rows = loss_rows(x, target, weight, loss, outputs, None if factor is None else factor[0])
        return small.total(rows.loss, target, weight, factor), rows
    dtype = loss.wide(x)
    divisor = count_of(target, weight, loss, dtype) if loss.reduction == "mean" else None
    dy = None
    if with_gradient:
        dy = torch.ones((), dtype=dtype, device=x.device) if divisor is None else divisor.reciprocal()
    rows = loss_rows(x, target, weight, loss, outputs, dy)
    total = rows.loss.sum()
    total = total if divisor is None else total / divisor
    if total.dtype != loss.settings.dtype:
        # Without a change of dtype, `to` returns the tensor itself.  In a trace torch 2.11 takes both names for results
        # of the autograd function, and loses the gradient of the first.
        total = total.to(loss.settings.dtype)
    return total, rows


_NO_GRADIENTS = (None,) * 7
"""The result of a backward pass to which no gradient comes, for each argument of forward."""


class ScalarLoss(torch.autograd.Function):
    """The backward pass of a cross-entropy that is reduced to a scalar.

    Forward has computed `ctx.gradient`, and saved x, target, weight, scale and mask for derivatives of this gradient.
    Only these derivatives unpack them, so the logits may change after forward if no such derivative is asked for.
    """

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> Any:
        if dy is None:
            return _NO_GRADIENTS
        traced, gradient = torch.compiler.is_compiling(), ctx.gradient
        if gradient is None or (torch.is_grad_enabled() and not traced):
            dx = _gradient_of_scalar(ctx, dy)
        elif not traced and keeps_graph():
            dx = _scale_gradient(gradient.clone(), dy)
        else:
            ctx.gradient = None
            dx = _scale_gradient(gradient, dy)
        return dx, *_NO_GRADIENTS[1:]


keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""True in a backward pass after which another may follow: with `retain_graph` or `create_graph`."""


def _gradient_of_scalar(ctx: Any, dy: Tensor) -> Tensor:
    """The gradient of a reduced loss, by PyTorch's operations from the logits."""
    # Raises PyTorch's error where an earlier backward pass has freed the graph.
    x, target, weight, *tensors = ctx.saved_tensors
    if ctx.loss is None:
        raise RuntimeError("the gradient of numbers of sharded rows cannot be differentiated again (create_graph=True)")
    if ctx.loss.inplace:
        raise RuntimeError(
            "cross_entropy(): the gradient cannot be differentiated again (create_graph=True), because "
            "inplace_backward=True has overwritten input"
        )
    return _gradient_by_pytorch(x, target, weight, ctx.loss.with_tensors(*tensors), dy)


class Reduced(ScalarLoss):
    """A cross-entropy reduced to a scalar, with a gradient.

    Forward computes the gradient; with `inplace`, in the memory of the logits.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, target: Tensor, weight: Tensor | None, scale: Tensor | None, mask: Tensor | None,
        loss: Loss, stats: bool,
    ) -> Any:  # fmt: skip
        total, rows = reduced(x, target, weight, loss.with_tensors(scale, mask), stats, True)
        ctx.gradient = rows.gradient
        ctx.loss = loss
        # The gradient may have overwritten the logits.
        ctx.save_for_backward(None if loss.inplace else x, target, weight, scale, mask)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in (rows.lse, rows.entropy) if t is not None))
        return total, rows.lse, rows.entropy


def _scale_gradient(gradient: Tensor, factor: Tensor) -> Tensor:
    """Multiply the gradient by a tensor of one element, in place except in a trace or under vmap.

    Our kernel reads and writes nothing where the factor is 1; PyTorch's `mul_` always does.
    """
    if _traced(factor) or is_batched(factor):
        return gradient * factor
    backend = backend_for(gradient)
    # The kernel takes the elements in their order in memory, so the gradient may have any dense layout.
    dense = gradient.is_contiguous() or gradient.untyped_storage().nbytes() == gradient.nbytes
    if backend is None or not dense or not aligned(gradient):
        return gradient.mul_(factor)
    multiply_in_place = registry.load(backend).multiply_in_place
    if gradient.is_cuda and torch._C._cuda_getDevice() != gradient.get_device():
        with torch.cuda.device(gradient.device):
            multiply_in_place(gradient, factor)
    else:
        multiply_in_place(gradient, factor)
    return gradient


class PerRow(torch.autograd.Function):
    """The losses of all rows; backward computes the gradient from the logits and the states."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, target: Tensor, weight: Tensor | None, scale: Tensor | None, mask: Tensor | None,
        loss: Loss, stats: bool,
    ) -> Any:  # fmt: skip
        outputs = ("lse", "m", "l", "entropy") if stats else ("m", "l")
        rows = loss_rows(x, target, weight, loss.with_tensors(scale, mask), outputs)
        ctx.save_for_backward(x, target, weight, scale, mask, rows.m, rows.l)
        ctx.loss = loss
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in (rows.lse, rows.entropy) if t is not None))
        return rows.loss, rows.lse, rows.entropy

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> Any:
        if dy is None:
            return _NO_GRADIENTS
        x, target, weight, scale, mask, *state = ctx.saved_tensors
        loss = ctx.loss.with_tensors(scale, mask)
        if torch.is_grad_enabled() or is_batched(dy):
            # The gradient is itself to be differentiated, or a batch of gradients.
            dx = _gradient_by_pytorch(x, target, weight, loss, dy)
        else:
            dx = loss_gradient(x, target, weight, loss, tuple(state), dy)
        return dx, *_NO_GRADIENTS[1:]


def _gradient_by_pytorch(x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss, dy: Tensor) -> Tensor:
    """The gradient with respect to the logits by PyTorch's operations, which have derivatives.

    A target out of range, which PyTorch's operations do not take, has no gradient.
    """
    again, inside = torch.is_grad_enabled(), is_class(target, x.shape[loss.dim])
    with torch.enable_grad():
        # The view has no hooks: those of x run once, after this function.
        x = x.view_as(x)
        rows = targets_eager.losses(x, target.where(inside, 0), weight, loss).where(inside, 0.0)
        y = targets_eager.reduced(rows, target, weight, loss)
    (dx,) = torch.autograd.grad(y, x, dy.to(y.dtype), create_graph=again)
    return dx


def log_probabilities(call: Call, entropy: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """(logprob, entropy, lse) of all rows; autograd does not record them."""
    y, lse, *rest = launch(call, ("y", "lse", *(("entropy",) if entropy else ())))
    return y, rest[0] if rest else None, lse


class LogProbabilities(torch.autograd.Function):
    """(logprob, entropy, lse) of all rows; backward computes the gradient of all three from the logits."""

    @staticmethod
    def forward(ctx: Any, bare: Call, target: Tensor, entropy: bool, *tensors: Tensor | None) -> Any:
        call = _with_target(with_tensors(bare, tensors), target)
        y, lse, m, l, *rest = launch(call, ("y", "lse", "m", "l", *(("entropy",) if entropy else ())))
        row_entropy = rest[0] if rest else None
        ctx.bare = bare
        ctx.save_for_backward(target, m, l, row_entropy, *tensors)
        ctx.set_materialize_grads(False)
        return y, row_entropy, lse

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dentropy: Tensor | None, dlse: Tensor | None) -> Any:
        if dy is None and dentropy is None and dlse is None:
            return (None,) * 7
        target, m, l, entropy, *tensors = ctx.saved_tensors
        call = _with_target(with_tensors(ctx.bare, tensors), target)
        x = call.x
        again = torch.is_grad_enabled()
        if again or any(is_batched(each) for each in (dy, dentropy, dlse)):
            with torch.enable_grad():
                # The view has no hooks: those of x run once, after this function.
                x = x.view_as(x)
                outputs = targets_eager.log_probabilities(call._replace(x=x), entropy is not None)
            pairs = [(y, g) for y, g in zip(outputs, (dy, dentropy, dlse), strict=True) if g is not None]
            (dx,) = torch.autograd.grad([y for y, _ in pairs], x, [g for _, g in pairs], create_graph=again)
            return None, None, None, dx, None, None, None
        given = {"dy": torch.zeros_like(m) if dy is None else dy, "m": m, "l": l, "dlse": dlse}
        if dentropy is not None:
            given |= {"entropy": entropy, "dentropy": dentropy}
        return None, None, None, gradient_of_rows(call, given), None, None, None


def gradient_of_rows(call: Call, given: dict[str, Tensor | None]) -> Tensor:
    """The gradient of log-probabilities with respect to the logits, from the operands of each row; None is absent."""
    dim, gradient = call.settings.dim, OPERATIONS[_LOGPROBS.gradient_name]
    beside = dict(call.beside) | {name: t.unsqueeze(dim) for name, t in given.items() if t is not None}
    options, settings = call.options and call.options.of(gradient.options), call.settings._replace(dtype=call.x.dtype)
    (dx,) = launch(Call(gradient, call.x, settings, options, call.out, beside), ("y",))
    return dx


def _with_target(call: Call, target: Tensor) -> Call:
    """Put the target into a call; it travels apart from the call, because autograd tracks only arguments of `apply`."""
    return call._replace(beside={"target": target.unsqueeze(call.settings.dim)})
