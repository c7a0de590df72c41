"""The losses of a head: of the logits of a chunk, of the statistics of tokens, and their mean."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..torch.loss_arguments import Loss, counted
from . import rows
from .arguments import NOT_COMPUTED, Head
from .columns import OfStatistics
from .rows import Statistics
from .tokens import Rows

Tensor = torch.Tensor

READS_A_GRADIENT = f"loss reads a tensor that requires a gradient, which {NOT_COMPUTED}"


class LossCall(NamedTuple):
    """The checked arguments of `linear_cross_entropy`.

    Attributes:
        head: The tensors.
        loss: The options of the loss.  The dtype of its settings is that of the result where it is of 16 bits: the
            losses of rows are wider, and need no more digits than it.
        factor: Factor of the loss of each token, in the dtype of the sums: its weight.
        dtype: Dtype of the result.
        memory, sum_dtype: The arguments `memory` and `acc_dtype`.
    """

    head: Head
    loss: Loss
    factor: Tensor
    dtype: torch.dtype
    memory: int | None
    sum_dtype: torch.dtype


def needs_whole_rows(loss: Loss, target: Tensor, weight: Tensor | None, stats: bool) -> bool:
    """True where the loss of a token needs more than its log-probability and its lse."""
    return target.is_floating_point() or bool(loss.smoothing) or weight is not None or stats


def loss_rows(target: Tensor, weight: Tensor | None, loss: Loss, stats: bool) -> Rows:
    """The function of a chunk for cross-entropy: its outputs are the losses, and lse, entropy and the largest class."""

    def of_chunk(
        z: Tensor, part: slice, factor: Tensor | None, rest: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], Any]:
        of_tokens = loss._replace(options=rows.of_part(loss.options, part))
        if rest is not None and factor is not None:
            return rows.losses_in_two(z, rest, target[part], weight, of_tokens, factor, stats), None
        return rows.losses(z, target[part], weight, of_tokens, factor, stats)

    return of_chunk


def loss_of(found: tuple[Tensor, Tensor | None, Tensor], target: Tensor, loss: Loss) -> Tensor:
    """The loss of each token from its log-probability and its lse."""
    logprob, _, lse = found
    counts, y = counted(target, loss), -logprob
    if loss.z_loss:
        # An ignored token may hold NaN, and the derivative of its square would be 0 · NaN.
        lse = lse.where(counts & (logprob == logprob), 0.0)
        y = y + loss.z_loss * lse * lse
    return y.where(counts, 0.0)


def loss_of_statistics(target: Tensor, loss: Loss) -> OfStatistics:
    """The function of the statistics that returns the losses and their derivatives."""

    def of_statistics(found: Statistics, factor: Tensor | None) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        logprob, _, lse = found
        lse = lse.to(logprob.dtype)
        y = loss_of((logprob, None, lse), target, loss)
        if factor is None:
            return y, ()
        counts = counted(target, loss)
        dlse = (2 * loss.z_loss * lse * factor).where(counts & (logprob == logprob), 0.0) if loss.z_loss else None
        return y, ((-factor).where(counts, 0.0), None, dlse)

    return of_statistics


def checked_losses(name: str, y: Any, like: Tensor, *others: Tensor) -> Tensor:
    """The losses that the caller's function returns for some tokens.

    Where `others` are given, they and `like` are the only tensors that may require a gradient.
    """
    if not isinstance(y, Tensor) or y.shape != like.shape or y.is_complex():
        got = f"{tuple(y.shape)} {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
        raise ValueError(f"{name}(): loss must return one number for each token, {tuple(like.shape)}, got {got}")
    nodes, seen = [y.grad_fn] if others else [], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and all(leaf is not t for t in (like, *others)):
            raise RuntimeError(f"{name}(): {READS_A_GRADIENT}")
        nodes += [before for before, _ in node.next_functions]
    return y


def with_divisor(factor: Tensor, divisor: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The factors with the divisor in them, and None; for logits of float16 both as they are.

    The gradient of a mean over many tokens is too small for float16.  As the divisor comes after the sum, the factor of
    a gradient scaler is multiplied with it before it reaches a float16 tensor.
    """
    if divisor is None or dtype == torch.float16:
        return factor, divisor
    return factor / divisor, None


def divided(y: Tensor, divisor: Tensor | None) -> Tensor:
    """The quotient; with a divisor of 0 it is NaN and has no gradient."""
    if divisor is None:
        return y
    return (y * divisor.reciprocal().where(divisor != 0, 0.0)).masked_fill(divisor == 0, torch.nan)
