"""Cross-entropy and token log-probabilities by PyTorch's own operations.

They serve CPU tensors, dtypes without kernels, class probabilities as targets, and derivatives of derivatives.
cached_rows.py takes token log-probabilities of contiguous rows on a CPU before them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from ..core.call import Call
from ..core.options import PLAIN
from . import eager, formulas
from .formulas import accumulator_of
from .loss_arguments import Loss, count_of, counted, is_class, scaled_weight, scales_weight

Tensor = torch.Tensor


def weight_of_mean(x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss) -> Any:
    """The weights that the formulas of a loss take: `scaled_weight` where `scales_weight`, else the weights."""
    if weight is None or not scales_weight(target, weight, loss):
        return weight
    return scaled_weight(target, weight, loss, accumulator_of(loss.wide(x), weight.dtype))


def pytorch_loss(x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss, reduction: str | None = None) -> Tensor:
    """The result of PyTorch's own cross_entropy, which knows neither z_loss nor score options.

    It is computed in float32 or wider, and so is its gradient, which is rounded once.  A reduction that is given
    replaces that of the loss.
    """
    wide = loss.wide(x)
    if rows := formulas.rows_at_a_time(x, wide):
        parts = zip(x.split(rows), target.split(rows), strict=True)
        of_rows = torch.cat([pytorch_loss(*part, weight, loss, "none") for part in parts])
        return of_rows if reduction == "none" else reduced(of_rows, target, weight, loss)
    of_target = torch.promote_types(target.dtype, wide) if target.is_floating_point() else torch.int64
    # `to` takes the host a microsecond also where nothing changes.
    return formulas.call_pytorch(
        functional.cross_entropy, x if x.dtype == wide else x.to(wide),
        target if target.dtype == of_target else target.to(of_target), None if weight is None else weight.to(wide),
        ignore_index=loss.ignore_index, reduction=reduction or loss.reduction, label_smoothing=loss.smoothing,
    )  # fmt: skip


REDUCTIONS = ("none", "mean", "sum")
"""The reductions in the order of the numbers that PyTorch's function in C++ takes."""


def prepared_loss(x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss) -> Callable[..., Tensor]:
    """The function (x, target), or (x, target, weight), of cacheable, checked losses like this one."""
    wide, dtype = loss.wide(x), loss.settings.dtype
    of_target = torch.promote_types(target.dtype, wide) if target.is_floating_point() else torch.int64
    ignore_index, smoothing, reduction = loss.ignore_index, loss.smoothing, REDUCTIONS.index(loss.reduction)
    # Without the checks of PyTorch's function in Python, a call takes the host 0.3 microseconds less.
    cross_entropy: Callable[..., Tensor] = torch._C._nn.cross_entropy_loss
    has_modes = torch._C._len_torch_function_stack
    of_weight = wide if weight is None else weight.dtype
    if not is_right(x, loss) or not x.dtype == of_weight == wide == dtype or target.dtype != of_target:
        return lambda x, target, weight=None: losses(x, target, weight, loss, False)[0].to(dtype)

    def run(x: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
        if has_modes():
            return pytorch_loss(x, target, weight, loss)
        return cross_entropy(x, target, weight, reduction, ignore_index, smoothing)

    return run


def is_right(x: Tensor, loss: Loss) -> bool:
    """True where PyTorch's own cross_entropy has all options of this loss, and sums its rows with small errors."""
    if loss.z_loss or loss.options or loss.settings.choice.batch_invariant:
        return False
    return not formulas.is_long(x, loss.settings.dim, loss.wide(x))


def losses(x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss, stats: bool) -> tuple[Tensor, ...]:
    """(loss,), or (loss, lse, entropy, largest) with `stats`; the statistics are detached."""
    if not stats and is_right(x, loss):
        return (pytorch_loss(x, target, weight, loss),)
    weight = weight_of_mean(x, target, weight, loss)
    y = reduced(rows_of(x, target, weight, loss), target, weight, loss)
    return (y, *statistics(x, loss), _largest(x, loss)) if stats else (y,)


def rows_of(x: Tensor, target: Tensor, weight: Tensor | None, loss: Loss) -> Tensor:
    """The loss of each row, in float32 (float64 in float64, and where the bits do not depend on the other rows)."""
    z, dim, separate = _scores(x, loss), loss.settings.dim, loss.settings.choice.batch_invariant
    weight = None if weight is None else weight.to(z.dtype)
    if separate or loss.mask() is not None or formulas.is_long(z, dim):
        log_p = _log_p(z, dim, separate)
        y = _of_log_p(log_p, target, weight, loss)
    else:
        y, log_p = pytorch_loss(z, target, weight, loss, "none"), None
    if not loss.z_loss:
        return y
    lse = z.logsumexp(dim) if log_p is None else eager.logsumexp_from(z, log_p, dim, keepdim=False)
    penalty = loss.z_loss * lse**2
    return y + (penalty if target.is_floating_point() else penalty.where(counted(target, loss), 0.0))


def _of_log_p(log_p: Tensor, target: Tensor, weight: Tensor | None, loss: Loss) -> Tensor:
    """The loss of each row without z_loss; a class that the mask excludes has no part of the smoothing."""
    dim, mask = loss.settings.dim, loss.mask()
    kept = None if mask is None else mask.expand_as(log_p)
    separate = loss.settings.choice.batch_invariant
    w: Any = 1.0 if weight is None else weight.reshape(-1, *[1] * (log_p.dim() - 1 - dim))
    spread: Any = loss.smoothing
    spread = spread / log_p.shape[dim] if kept is None else spread / kept.sum(dim, True, dtype=log_p.dtype) * kept
    if target.is_floating_point():
        q = (1 - loss.smoothing) * target + spread
        # A class that is excluded counts only if the target has it: 0 * -inf would be NaN.
        terms = w * q * (log_p if kept is None else log_p.where(kept | (q != 0), 0.0))
        return -eager.row_sums(terms, dim, separate)
    y = formulas.call_pytorch(
        functional.nll_loss, log_p, target.long(), weight, ignore_index=loss.ignore_index, reduction="none"
    )
    if not loss.smoothing:
        return y
    of_spread = -eager.row_sums(w * spread * (log_p if kept is None else log_p.where(kept, 0.0)), dim, separate)
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


def factor(target: Tensor, weight: Tensor | None, loss: Loss, dtype: torch.dtype) -> Tensor:
    """The derivative of a reduced loss with respect to the loss of each row, in this dtype."""
    if loss.reduction == "sum":
        return torch.ones((), dtype=dtype, device=target.device)
    return count_of(target, weight, loss, dtype).reciprocal()


def statistics(x: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    """(lse, entropy) of each row, in float32 (float64 in float64)."""
    with torch.no_grad():
        z, dtype = _scores(x, loss), loss.wide(x)
        log_p = _log_p(z, loss.settings.dim, loss.settings.choice.batch_invariant)
        lse = eager.logsumexp_from(z, log_p, loss.settings.dim, keepdim=False)
        return lse.to(dtype), _entropy(log_p, loss.settings.dim, loss.settings.choice.batch_invariant).to(dtype)


def _largest(x: Tensor, loss: Loss) -> Tensor:
    """The class of each row with the largest score, by PyTorch's operations; -1 in rows without classes."""
    if not x.shape[loss.settings.dim]:
        return x.new_full((*x.shape[: loss.settings.dim], *x.shape[loss.settings.dim + 1 :]), -1, dtype=torch.int64)
    # The softcap keeps the order of the scores; a negative scale reverses it.
    scale: Any = 1.0 if loss.options is None else loss.options.scale
    if isinstance(scale, Tensor):
        x, negative = x.detach() * torch.where(scale < 0, -1.0, 1.0).to(x.dtype), False
    else:
        negative = scale < 0
    if (mask := loss.mask()) is not None:
        x = x.detach().masked_fill(~mask, torch.inf if negative else -torch.inf)
    return x.argmin(loss.settings.dim) if negative else x.argmax(loss.settings.dim)


def _scores(x: Tensor, loss: Loss) -> Tensor:
    wide = eager.wide_of(x, loss.wide(x), loss.settings.choice.batch_invariant)
    return eager.scores_of(x, loss.settings.dim, loss.options or PLAIN, wide)[0]


def _log_p(z: Tensor, dim: int, batch_invariant: bool) -> Tensor:
    """The log-probabilities of scores, with small errors at every length."""
    return eager.invariant("log_softmax", z, dim) if batch_invariant else formulas.exact_log_softmax(z, dim)


def _entropy(log_p: Tensor, dim: int, batch_invariant: bool) -> Tensor:
    # The product -inf * 0 would be NaN, and so would its gradient.  Negating a sum of 0 would give -0.0.
    terms = log_p.masked_fill(log_p == -torch.inf, 0.0) * log_p.exp()
    return 0.0 - eager.row_sums(terms, dim, batch_invariant)


def log_probabilities(call: Call, results: tuple[str, ...], of_lse: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """The results "y" (the log-probability), "lse" and "entropy", if it is asked for; lse in the dtype `of_lse`.

    The target has one column of each row, or several along the softmax dimension, and the first result has its shape.
    """
    x, dim, separate = call.x, call.settings.dim, call.settings.choice.batch_invariant
    target, dtype = call.beside["target"].long(), accumulator_of(x.dtype, x.dtype)
    several = target.dim() == x.dim()
    target = target if several else target.unsqueeze(dim)
    z = eager.scores_of(x, dim, call.scores(), eager.wide_of(x, dtype, separate))[0]
    log_p = _log_p(z, dim, separate)
    lse = eager.logsumexp_from(z, log_p, dim, keepdim=False, dtype=of_lse).to(of_lse or dtype)
    if not x.shape[dim]:
        # `gather` takes no index of a row without columns.
        logprob = (lse.to(dtype).unsqueeze(dim) + torch.nan).expand(target.shape)
    else:
        inside = is_class(target, x.shape[dim])
        logprob = log_p.gather(dim, target.where(inside, 0)).where(inside, torch.nan).to(dtype)
    found = logprob if several else logprob.squeeze(dim), lse
    return (*found, _entropy(log_p, dim, separate).to(dtype)) if "entropy" in results else found


def log_probabilities_of(recording: Any, call: Call) -> dict[str, Tensor]:
    """The results of a recorded call of log-probabilities, by the names of their gradients."""
    return dict(zip(recording.dys, log_probabilities(call, recording.results), strict=True))
