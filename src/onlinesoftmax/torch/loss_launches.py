"""Prepared calls (fast_path.py) of losses and log-probabilities whose targets are contiguous."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..core.call import NOTHING, Call
from .autograd import split_tensors
from .gradients import accumulator_of
from .loss import Loss, scales_weight
from .prepare import kind_of, operands_of, prepare, prepared
from .reductions import Reducer, reducer, weight_scaler
from .targets import LogProbabilities, PerRow, ScalarLoss, by_cuda, loss_call, scalar_output

Tensor = torch.Tensor

Run = Callable[[Tensor, Tensor, Tensor | None], Any]


def prepared_loss(x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss) -> Run | None:
    """The function (x, target, weight) of a cacheable, checked loss; None where it needs the general path."""
    with_gradient = torch.is_grad_enabled() and x.requires_grad
    apart = loss.settings.choice.batch_invariant or loss.bare is not loss
    if apart or (loss.inplace and with_gradient) or not target.is_contiguous():
        return None
    if loss.reduction == "none":
        return _per_row(x, target, weight, loss, with_gradient)
    if weight is None or not scales_weight(target, weight, loss):
        return _scalar(x, target, weight, loss, with_gradient)
    scale: Callable[..., Tensor] = weight_scaler(x, target, weight, loss)
    of_scaled = _scalar(x, target, scale(target, weight), loss, with_gradient)
    if of_scaled is None:
        return None
    return lambda x, target, weight: of_scaled(x, target, scale(target, weight))


def _scalar(x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss, with_gradient: bool) -> Run | None:
    """A usual loss that is reduced to a scalar; None where it needs the general path."""
    if scalar := scalar_output(x, target, weight, loss, with_gradient):
        return _in_one_launch(x, target, weight, loss, (scalar, "y") if with_gradient else (scalar,))
    small = reducer(x, target, weight, loss, with_gradient)
    return small and _reduced(x, target, weight, loss, small)


def _rows(x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss, outputs: tuple[str, ...]) -> Callable[..., Any]:
    """The function (x, target, weight, dy) that launches the loss kernel and returns its outputs.

    With the output "loss" and the gradient of a mean, the launch before it must be the one that computes dy.
    """
    wide = loss.wide(x)
    of_rows = outputs[0] == "loss"
    dy = torch.empty((), dtype=wide, device=x.device) if of_rows and "y" in outputs else None
    call = loss_call(x, target, weight, loss, dy)
    call = call if of_rows else by_cuda(call)
    operands = operands_of(call)
    adds_weights = "weight_sum" in operands
    # The kernel that adds the weights would come between.
    follows_divisor = dy is not None and loss.reduction == "mean" and not adds_weights
    run = prepare(kind_of(call, operands, outputs), follows_divisor)
    # Planning needs views of the tensors, but a launch needs only their addresses.  So only the numbers are kept, and a
    # call passes its own tensors without making views.
    numbers = {name: value for name, value in operands.items() if isinstance(value, int)}

    def rows(x: Tensor, target: Tensor, weight: Tensor | None, dy: Tensor | None = None) -> Any:
        given: dict[str, Any] = {"target": target, **numbers}
        if dy is not None:
            given["dy"] = dy
        if weight is not None:
            given["weight"] = weight
            if adds_weights:
                given["weight_sum"] = weight.sum(dtype=accumulator_of(wide, weight.dtype))
        # empty_like takes half the host time of empty.
        return run(x, torch.empty_like(target, dtype=wide) if of_rows else None, given)

    return rows


class _Reduced(ScalarLoss):
    """A usual loss that is reduced to a scalar, with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, others: tuple[Callable[..., Any], Tensor, Any, Loss | None]) -> Tensor:
        # The function and the other arguments travel in a tuple: autograd takes time for each argument.
        run, target, weight, ctx.loss = others
        total, ctx.gradient = run(x, target, weight)
        ctx.save_for_backward(x, target, weight, None, None)
        ctx.set_materialize_grads(False)
        return total


# `apply` of the base class in C++, without the check for transforms in torch.autograd.Function.
_apply_reduced = super(torch.autograd.Function, _Reduced).apply


def _in_one_launch(x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss, outputs: tuple[str, ...]) -> Run:
    """A loss whose kernel writes the scalar itself."""
    rows = _rows(x, target, weight, loss, outputs)
    if len(outputs) == 1:
        return rows
    return lambda x, target, weight: _apply_reduced(x, (rows, target, weight, loss))


def _reduced(x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss, small: Reducer) -> Run:
    factor_of, total = small
    if factor_of is None:
        rows = _rows(x, target, weight, loss, ("loss",))
        return lambda x, target, weight: total(rows(x, target, weight), target, weight, None)
    return reduced_with_gradient(_rows(x, target, weight, loss, ("loss", "y")), small, loss)


def reduced_with_gradient(rows: Callable[..., Any], small: Reducer, loss: Loss | None) -> Run:
    """A loss that is reduced to a scalar by small kernels before and after the loss kernel, which writes the gradient.

    Args:
        rows: The function (x, target, weight, factor) that launches the loss kernel and returns (losses, gradient).
        small: The other launches.
        loss: The other arguments, for derivatives of the gradient; None for sharded rows, which have none.
    """
    factor_of, total = small
    assert factor_of is not None

    def run(x: Tensor, target: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        factor = factor_of(target, weight)
        losses, gradient = rows(x, target, weight, factor)
        return total(losses, target, weight, factor), gradient

    return lambda x, target, weight: _apply_reduced(x, (run, target, weight, loss))


class _PerRow(PerRow):
    """The usual losses of all rows, with a gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, target: Tensor, weight: Tensor | None, scale: Tensor | None, mask: Tensor | None,
        loss: Loss, rows: Any,
    ) -> Any:  # fmt: skip
        losses, m, l = rows(x, target, weight)
        ctx.save_for_backward(x, target, weight, scale, mask, m, l)
        ctx.loss = loss
        ctx.set_materialize_grads(False)
        return losses


_apply_per_row = super(torch.autograd.Function, _PerRow).apply


def _per_row(x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss, with_gradient: bool) -> Run:
    dtype = loss.settings.dtype
    rows = _rows(x, target, weight, loss, ("loss", "m", "l") if with_gradient else ("loss",))
    if with_gradient:
        return lambda x, target, weight: _apply_per_row(x, target, weight, None, None, loss, rows).to(dtype)
    return lambda x, target, weight: rows(x, target, weight).to(dtype)


class _LogProbabilities(LogProbabilities):
    """The usual log-probabilities, with a gradient."""

    @staticmethod
    def forward(ctx: Any, bare: Call, target: Tensor, rows: Any, *tensors: Tensor | None) -> Any:
        y, lse, m, l, *rest = rows(*tensors, target)
        found = rest[0] if rest else None
        ctx.bare = bare
        # No bias, scale or mask is a tensor, so only x is given.
        ctx.save_for_backward(target, m, l, found, *tensors, None, None, None)
        ctx.set_materialize_grads(False)
        return y, found, lse


_apply_log_probabilities = super(torch.autograd.Function, _LogProbabilities).apply


def prepared_log_probabilities(call: Call, entropy: bool) -> Callable[[Tensor, Tensor], Any] | None:
    """The function (x, target) of cacheable, checked log-probabilities; None where they need the general path."""
    x, target, options = call.x, call.beside["target"].squeeze(call.settings.dim), call.scores
    with_gradient = torch.is_grad_enabled() and x.requires_grad
    plain = options.mask is None and isinstance(options.scale, float)
    if not plain or call.settings.choice.batch_invariant or not target.is_contiguous():
        return None
    outputs = ("y", "lse", *(("m", "l") if with_gradient else ()), *(("entropy",) if entropy else ()))
    run, operands = prepared(call, outputs)
    wide = accumulator_of(x.dtype, x.dtype)
    numbers = {name: value for name, value in operands.items() if isinstance(value, int)}

    def rows(x: Tensor, target: Tensor) -> Any:
        return run(x, torch.empty_like(target, dtype=wide), {"target": target, **numbers})

    if with_gradient:
        bare = split_tensors(call)[0]._replace(beside=NOTHING)
        return lambda x, target: _apply_log_probabilities(bare, target, rows, x)

    def found(x: Tensor, target: Tensor) -> Any:
        y, lse, *rest = rows(x, target)
        return y, rest[0] if rest else None, lse

    return found
