"""What happens to the logits of a chunk: losses or statistics of its rows, and the gradient in the logits' place.

Kernels read and write the chunk in place.  Where they cannot run, PyTorch's operations compute the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..core.call import Call, Settings
from ..core.options import ScoreOptions, softcap_slope
from ..core.task import ANY
from ..ops import OPERATIONS
from ..torch import eager
from ..torch.loss import Loss, counted, is_class
from ..torch.loss_kernels import loss_call
from ..torch.losses import cross_entropy, why_not_kernels
from ..torch.ops import accumulator_of
from ..torch.prepare import run

Tensor = torch.Tensor

_LOGPROBS = OPERATIONS["token_logprobs"]

CHOICE = ANY
"""The plan of the kernels that read a chunk, which tests force."""


class Statistics(NamedTuple):
    """Numbers of each row in float32 or wider, (rows,) tensors; logprob is NaN where the target is no column."""

    logprob: Tensor
    entropy: Tensor
    lse: Tensor


def losses(
    z: Tensor, target: Tensor, weight: Tensor | None, loss: Loss, factor: Tensor | None, stats: bool
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """(outputs, gradient of the sum of factor · loss in the logits); without a factor, no gradient.

    The outputs are the loss of each row, and with `stats` its lse, entropy and largest class.  Where kernels run, the
    gradient is in the memory of the logits.
    """
    more = ("lse", "entropy", "largest") if stats else ()
    if _kernels_run(z, target, weight, loss.ignore_index):
        loss = loss._replace(settings=loss.settings._replace(choice=CHOICE))
        call = loss_call(z, target, weight, loss, factor)
        if factor is None:
            return tuple_of(run(call, ("loss", *more))), None
        rows, dz, *found = run(call._replace(beside={**call.beside, "y": z}), ("loss", "y", *more))
        return (rows, *found), dz
    found = cross_entropy(z, target, weight, tuple(loss), True)[1][:4] if stats else ()
    if not target.is_floating_point():
        # PyTorch's gradient of an ignored row is NaN where the row has NaN; that of a kernel is 0.
        z = z.masked_fill(~counted(target, loss).unsqueeze(1), 0.0)
    leaf = z.detach().requires_grad_(factor is not None)
    with torch.set_grad_enabled(factor is not None):
        rows = cross_entropy(leaf, target, weight, tuple(loss), False)
    dz = None if factor is None else torch.autograd.grad(rows, leaf, factor.to(rows.dtype))[0]
    # The statistics of cross_entropy have z_loss in the second place.
    return (rows.detach(), *found[:1], *found[2:]), dz


def tuple_of(found: Any) -> tuple[Tensor, ...]:
    """The outputs of a kernel, in a tuple even if there is only one."""
    return found if isinstance(found, tuple) else (found,)


def statistics(z: Tensor, target: Tensor, options: ScoreOptions | None) -> Statistics:
    """The statistics of the rows of some logits."""
    if _kernels_run(z, target):
        call = Call(_LOGPROBS, z, Settings(1, None, False, CHOICE), options, None, {"target": target})
        logprob, lse, entropy = run(call, ("y", "lse", "entropy"))
        return Statistics(logprob, entropy, lse)
    s = _scores(z, options)
    log_p = torch.log_softmax(s, 1)
    inside = is_class(target, z.shape[1])
    own = log_p.gather(1, target.where(inside, 0).unsqueeze(1)).squeeze(1)
    finite = log_p.masked_fill(log_p == -torch.inf, 0.0)
    return Statistics(own.where(inside, torch.nan), -(log_p.exp() * finite).sum(1), torch.logsumexp(s, 1))


def gradient(
    z: Tensor, target: Tensor, known: Statistics, dlogprob: Tensor, dentropy: Tensor | None, dlse: Tensor,
    options: ScoreOptions | None,
) -> Tensor:  # fmt: skip
    """The gradient in the logits of a chunk, in their place where kernels run.

    Args:
        z: Logits of some columns of each row.
        target: Column of the target in the chunk; -1 where it is in none of its columns.
        known: Statistics of whole rows.
        dlogprob: Gradient of the target's logarithm; read where the target is in the chunk.
        dentropy: Gradient of the entropy.
        dlse: Factor of the softmax: the gradient of lse, less that of logprob where the target lies in another chunk.
        options: Scale and softcap.
    """
    if _kernels_run(z, target):
        beside = {"target": target, "dy": dlogprob, "m": known.lse, "l": torch.ones_like(known.lse), "dlse": dlse}
        if dentropy is not None:
            beside |= {"entropy": known.entropy, "dentropy": dentropy}
        settings = Settings(1, None, False, CHOICE)
        found: Tensor = run(Call(OPERATIONS[_LOGPROBS.gradient_name], z, settings, options, z, beside))
        return found
    s, inside = _scores(z, options), is_class(target, z.shape[1])
    above = s - known.lse.unsqueeze(1)
    p = above.exp()
    own = dlogprob.where(inside, 0.0)
    factor = (dlse - own).unsqueeze(1)
    if dentropy is not None:
        factor = factor - dentropy.unsqueeze(1) * (above.masked_fill(p == 0, 0.0) + known.entropy.unsqueeze(1))
    g = p * factor
    g.scatter_add_(1, target.where(inside, 0).unsqueeze(1), own.unsqueeze(1))
    if options is not None:
        g = g * options.scale
        if options.softcap is not None:
            g = g * softcap_slope(eager.FUNCTIONS, z.to(s.dtype), options)
    nothing = (dlogprob == 0) & (dlse == 0) & (True if dentropy is None else dentropy == 0)
    return g.masked_fill(nothing.unsqueeze(1), 0.0).to(z.dtype)


def _kernels_run(z: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100) -> bool:
    return z.numel() > 0 and why_not_kernels(z, target, weight, None, ignore_index) is None


def _scores(z: Tensor, options: ScoreOptions | None) -> Tensor:
    wide = z.to(accumulator_of(z.dtype, z.dtype))
    if options is None:
        return wide
    wide = wide * options.scale
    return wide if options.softcap is None else options.softcap * torch.tanh(wide / options.softcap)
