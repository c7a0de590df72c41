"""Log-probabilities of a token of each row on a CPU, for as many rows at a time as fit the cache.

forward    reads the logits once, and keeps the state (m, l) of each row
backward   reads them again, and writes the gradient

PyTorch's operations pass over all logits a dozen times in each direction, and keep copies of them in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..core.call import Call
from .autograd import is_recorded, record
from .fast_path import is_transformed
from .formulas import ELEMENTS_IN_CACHE, PLAIN_TYPES, accumulator_of
from .gradients import is_traced
from .loss_arguments import is_class
from .loss_eager import log_probabilities_of
from .recording import Recording, Tensors, outputs_to_keep

Tensor = torch.Tensor

LEAST_LOG = -1000.0
"""The least logarithm that is multiplied by its exponential, which is 0 there: the product 0 * -inf would be NaN."""


def takes(call: Call) -> bool:
    """True for a call that this module runs: contiguous rows of a plain tensor on a CPU, without score options."""
    x, target, settings = call.x, call.beside["target"], call.settings
    if type(x) not in PLAIN_TYPES or not x.is_cpu or x.layout is not torch.strided or x.is_nested:
        return False
    if is_traced(x) or is_transformed() or call.options is not None or settings.choice.batch_invariant:
        return False
    in_rows = x.is_contiguous() and settings.dim == x.dim() - 1 and target.dim() < x.dim()
    return in_rows and x.is_floating_point() and bool(x.numel())


def log_probabilities(call: Call, results: tuple[str, ...]) -> tuple[Tensor, ...]:
    """The results of all rows, by name: "y" (the log-probability), "lse", and "entropy" if it is asked for."""
    if not is_recorded(call):
        return _outputs(call, results)
    how = {"forward": _forward, "gradient": _gradient, "by_pytorch": log_probabilities_of}
    return record(call, outputs_to_keep(call, results), results, **how)


def _forward(recording: Recording, call: Call) -> tuple[Tensor, ...]:
    return _outputs(call, recording.outputs)


def _outputs(call: Call, names: tuple[str, ...]) -> tuple[Tensor, ...]:
    x, shape = call.x.detach(), call.beside["target"].shape
    wide, (columns, inside) = accumulator_of(x.dtype, x.dtype), _targets(call)
    # No views: autograd lets nobody change a view that a function returns.
    found = {name: x.new_empty(shape, dtype=wide) for name in ("y", "lse", "m", "l", "entropy")}
    y, lse, of_m, of_l, entropy = (t.view(-1, 1) for t in found.values())
    for part, z, (exponentials, d) in _parts(x, wide):
        m = torch.amax(z, 1, keepdim=True)
        torch.sub(z, m, out=d)
        l = torch.exp(d, out=exponentials).sum(1, keepdim=True)
        log_l = l.log()
        of_m[part], of_l[part], lse[part] = m, l, torch.where(m.isinf(), m, m + log_l)
        y[part] = (d.gather(1, columns[part]) - log_l).where(inside[part], torch.nan)
        if "entropy" in names:
            entropy[part] = log_l - d.clamp_(min=LEAST_LOG).mul_(exponentials).sum(1, keepdim=True) / l
    return tuple([found[name] for name in names])


def _targets(call: Call) -> tuple[Tensor, Tensor]:
    """The column of the token of each row, 0 where it is out of range; and whether it is in range."""
    target = call.beside["target"].reshape(-1, 1)
    inside = is_class(target, call.x.shape[-1])
    return target.where(inside, 0).long(), inside


def _parts(x: Tensor, wide: torch.dtype) -> Iterator[tuple[slice, Tensor, tuple[Tensor, Tensor]]]:
    """(rows, their logits in `wide`, memory for two tensors of their shape) of each part.

    Hazard: the logits are those of x themselves, or lie in the second memory if x has another dtype.
    """
    rows = x.view(-1, x.shape[-1])
    count = min(max(1, ELEMENTS_IN_CACHE * torch.get_num_threads() // rows.shape[1]), len(rows))
    first, second = (x.new_empty(count, rows.shape[1], dtype=wide) for _ in range(2))
    for begin in range(0, len(rows), count):
        part = slice(begin, min(begin + count, len(rows)))
        n = part.stop - begin
        z = rows[part] if x.dtype == wide else second[:n].copy_(rows[part])
        yield part, z, (first[:n], second[:n])


def _gradient(call: Call, saved: Tensors, dys: Tensors) -> Tensor:
    """The gradient with respect to the logits, from the gradients of logprob, entropy and lse.

    It is p * factor in each column, with factor = dlse - dy - dentropy * (log(p) + entropy), and dy more at the token.
    """
    x, (columns, inside) = call.x.detach(), _targets(call)
    wide = accumulator_of(x.dtype, x.dtype)
    nothing = x.new_zeros(len(columns), 1, dtype=wide)
    given = {name: dys[name].reshape(-1, 1).to(wide) if name in dys else nothing for name in ("dy", "dlse", "dentropy")}
    dy, dlse, dentropy = given.values()
    dy = dy.where(inside, 0.0)
    # A row whose incoming gradients are all 0 has the gradient 0, even if it holds NaN.
    no_gradient = (dy == 0) & (dlse == 0) & (dentropy == 0)
    m, l = saved["m"].view(-1, 1), saved["l"].view(-1, 1)
    factor, log_l = dlse - dy, l.log()
    if "dentropy" in dys:
        factor = factor - dentropy * saved["entropy"].view(-1, 1)
    dx = torch.empty_like(x).view(-1, x.shape[-1])
    for part, z, (exponentials, d) in _parts(x, wide):
        torch.sub(z, m[part], out=d)
        p = torch.exp(d, out=exponentials).div_(l[part])
        if "dentropy" in dys:
            p.mul_(d.sub_(log_l[part]).clamp_(min=LEAST_LOG).mul_(-dentropy[part]).add_(factor[part]))
        else:
            p.mul_(factor[part])
        p.scatter_add_(1, columns[part], dy[part])
        if no_gradient[part].any():
            p.masked_fill_(no_gradient[part], 0.0)
        dx[part] = p
    return dx.view(x.shape)
