"""Cross-entropy and token log-probabilities by PyTorch's own operations.

They serve CPU tensors, dtypes without kernels, class probabilities as targets, and derivatives of derivatives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from ..core.call import Call
from ..core.options import PLAIN
from . import eager, ops
from .gradients import accumulator_of
from .loss import Loss, count_of, counted, is_class

Tensor = torch.Tensor


def pytorch_loss(x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss) -> Tensor:
    """The result of PyTorch's own cross_entropy, which knows neither z_loss nor score options."""
    y: Tensor = ops.call_pytorch(
        functional.cross_entropy, x, target if target.is_floating_point() else target.long(), weight,
        ignore_index=loss.ignore_index, reduction=loss.reduction, label_smoothing=loss.smoothing,
    )  # fmt: skip
    return y


def losses(x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss) -> Tensor:
    """The loss of each row, in float32 (float64 in float64)."""
    z = _scores(x, loss)
    weight, loss = None if weight is None else weight.to(z.dtype), loss._replace(reduction="none")
    if loss.mask is None:
        y = pytorch_loss(z, target, weight, loss)
    else:
        y = _of_kept(z, loss.mask.expand_as(z), target, weight, loss)
    if not loss.z_loss:
        return y
    penalty = loss.z_loss * z.logsumexp(loss.dim) ** 2
    return y + (penalty if target.is_floating_point() else penalty.where(counted(target, loss), 0.0))


def _of_kept(z: Tensor, kept: Tensor, target: Tensor, weight: Tensor | None, loss: Loss) -> Tensor:
    """The loss of each row whose scores are -inf where the mask is False; such a class has no part of the smoothing."""
    dim, shape = loss.dim, (-1, *[1] * (z.dim() - 1 - loss.dim))
    log_p, w = z.log_softmax(dim), 1.0 if weight is None else weight.reshape(shape)
    spread = loss.smoothing / kept.sum(dim, keepdim=True, dtype=z.dtype) * kept
    if target.is_floating_point():
        q = (1 - loss.smoothing) * target.to(z.dtype) + spread
        # A class that is excluded counts only if the target has it: 0 * -inf would be NaN.
        return -(w * q * log_p.where(kept | (q != 0), 0.0)).sum(dim)
    y = pytorch_loss(z, target, weight, loss._replace(smoothing=0.0))
    if not loss.smoothing:
        return y
    of_spread = -(w * spread * log_p.where(kept, 0.0)).sum(dim)
    return (1 - loss.smoothing) * y + of_spread.where(counted(target, loss), 0.0)


def reduced(rows: Tensor, target: Tensor, weight: Tensor | None, loss: Loss) -> Tensor:
    """The losses of all rows, reduced as asked for."""
    if loss.reduction == "none":
        return rows
    if loss.reduction == "sum":
        return rows.sum()
    if target.is_floating_point():
        # PyTorch divides by the number of rows.
        return rows.sum() / rows.numel()
    return rows.sum() / count_of(target, weight, loss, rows.dtype)


def statistics(x: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    """(lse, entropy) of each row, in float32 (float64 in float64)."""
    with torch.no_grad():
        z = _scores(x, loss)
        log_p = z.log_softmax(loss.dim)
        return eager.logsumexp_from(z, log_p, loss.dim, keepdim=False), _entropy(log_p, loss.dim)


def _scores(x: Tensor, loss: Loss) -> Tensor:
    z: Tensor = eager.scores_of(x, loss.dim, loss.options or PLAIN, loss.wide(x))[0]
    return z


def _entropy(log_p: Tensor, dim: int) -> Tensor:
    # The product -inf * 0 would be NaN, and so would its gradient.
    return -(log_p.masked_fill(log_p == -torch.inf, 0.0) * log_p.exp()).sum(dim)


def log_probabilities(call: Call, entropy: bool, several: bool = False) -> tuple[Tensor, Any, Tensor]:
    """(logprob, entropy, lse) of each row; entropy is None unless asked for.

    With `several`, the target has several columns of each row, along the softmax dimension, and so has logprob.
    """
    x, dim = call.x, call.settings.dim
    target = call.beside["target"].long()
    z = eager.scores_of(x, dim, call.scores, accumulator_of(x.dtype, x.dtype))[0]
    log_p = z.log_softmax(dim)
    lse = eager.logsumexp_from(z, log_p, dim, keepdim=False)
    if not x.shape[dim]:
        # `gather` takes no index of a row without columns.
        nothing = (lse.unsqueeze(dim) + torch.nan).expand(target.shape)
        return nothing if several else nothing.squeeze(dim), _entropy(log_p, dim) if entropy else None, lse
    inside = is_class(target, x.shape[dim])
    logprob = log_p.gather(dim, target.where(inside, 0)).where(inside, torch.nan)
    return logprob if several else logprob.squeeze(dim), _entropy(log_p, dim) if entropy else None, lse
