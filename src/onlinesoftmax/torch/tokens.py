"""Log-probabilities of several tokens of each row on our kernels, from one pass over the logits.

forward    a kernel computes the state (m, l) of each row; the scores of the tokens are gathered:
           logprob = (z - m) - log(l)
backward   a kernel writes the gradient of all columns without the tokens' own terms; then the token columns are
           recomputed in the accumulator's dtype and overwritten
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..core.call import NOTHING, Call
from ..core.options import ScoreOptions, scores, softcap_slope
from . import eager, targets_eager
from .autograd import split_tensors, with_tensors
from .check import is_batched
from .gradients import accumulator_of
from .loss import is_class
from .targets import gradient_of_rows, launch

Tensor = torch.Tensor


class _Gathered(NamedTuple):
    """The tokens of a call.  In each tensor, the tokens lie along the softmax dimension.

    Attributes:
        columns: The column of each token; 0 where it is out of range.
        inside: False where it is out of range.
        z: The score of each token.
        x, options: Logit of each token in the dtype of the computation, and the score options at its column.
    """

    columns: Tensor
    inside: Tensor
    z: Tensor
    x: Tensor
    options: ScoreOptions


def log_probabilities(call: Call, index: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """(logprob, entropy, lse) of all rows.

    Args:
        call: The call, for which kernels run.
        index: The columns of the tokens, along the softmax dimension.
        entropy: Compute the entropy too.
    """
    if not (torch.is_grad_enabled() and call.x.requires_grad):
        return _forward(call, index, entropy)[:3]
    bare, tensors = split_tensors(call)
    y, row_entropy, lse = _Tokens.apply(bare._replace(beside=NOTHING), index, entropy, *tensors)
    return y, row_entropy, lse


def _forward(call: Call, index: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """(logprob, entropy, lse, m, l)."""
    lse, m, l, *rest = launch(_of_no_token(call, index), ("lse", "m", "l", *(("entropy",) if entropy else ())))
    dim = call.settings.dim
    gathered = _gathered(call, index)
    y = _logprob(gathered, m.unsqueeze(dim), l.unsqueeze(dim)).where(gathered.inside, torch.nan)
    return y, rest[0] if rest else None, lse, m, l


def _of_no_token(call: Call, index: Tensor) -> Call:
    """The call with target -1 in each row, so that the kernel adds no target term."""
    dim = call.settings.dim
    nowhere = index.new_full((*index.shape[:dim], 1, *index.shape[dim + 1 :]), -1, dtype=torch.int64)
    return call._replace(beside={"target": nowhere})


def _gathered(call: Call, index: Tensor) -> _Gathered:
    x, dim, options = call.x, call.settings.dim, call.scores
    inside = is_class(index, x.shape[dim])
    columns = index.where(inside, 0).long()
    if options.mask is not None:
        options = options._replace(mask=options.mask.expand_as(x).gather(dim, columns))
    logits = x.gather(dim, columns).to(accumulator_of(x.dtype, x.dtype))
    return _Gathered(columns, inside, scores(eager.FUNCTIONS, logits, options), logits, options)


def _logprob(gathered: _Gathered, m: Tensor, l: Tensor) -> Tensor:
    """The logarithm of the probability of each token; NaN in a row without a softmax, whose l is 0, infinite or NaN."""
    return (gathered.z - m) - l.log().where(l != torch.inf, torch.nan)


class _Tokens(torch.autograd.Function):
    """(logprob, entropy, lse) of all rows; backward computes the gradient of all three from the logits."""

    @staticmethod
    def forward(ctx: Any, bare: Call, index: Tensor, entropy: bool, *tensors: Tensor | None) -> Any:
        y, row_entropy, lse, m, l = _forward(with_tensors(bare, tensors), index, entropy)
        ctx.bare = bare
        ctx.save_for_backward(index, m, l, row_entropy, *tensors)
        ctx.set_materialize_grads(False)
        return y, row_entropy, lse

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> Any:
        if all(dy is None for dy in dys):
            return (None,) * 7
        index, m, l, entropy, *tensors = ctx.saved_tensors
        call = with_tensors(ctx.bare, tensors)
        again = torch.is_grad_enabled()
        if again or any(is_batched(dy) for dy in dys):
            with torch.enable_grad():
                # The view has no hooks: those of x run once, after this function.
                x = call.x.view_as(call.x)
                of_index = call._replace(x=x, beside={"target": index})
                outputs = targets_eager.log_probabilities(of_index, entropy is not None, several=True)
            pairs = [(y, dy) for y, dy in zip(outputs, dys, strict=True) if dy is not None]
            (dx,) = torch.autograd.grad([y for y, _ in pairs], x, [dy for _, dy in pairs], create_graph=again)
        else:
            dx = _gradient(call, index, (m, l, entropy), dys)
        return None, None, None, dx, None, None, None


def _gradient(
    call: Call, index: Tensor, saved: tuple[Tensor, Tensor, Tensor | None], dys: tuple[Tensor | None, ...]
) -> Tensor:
    """The gradient with respect to the logits, from the gradients dys of (logprob, entropy, lse)."""
    (m, l, entropy), (dy, dentropy, dlse) = saved, dys
    dim, gathered = call.settings.dim, _gathered(call, index)
    dy = torch.zeros_like(gathered.z) if dy is None else dy.to(gathered.z.dtype).where(gathered.inside, 0.0)
    # Every column has -p * (the sum of dy - dlse), as if it were the gradient of lse.
    to_lse = -dy.sum(dim) if dlse is None else dlse - dy.sum(dim)
    given: dict[str, Tensor | None] = {"dy": torch.zeros_like(m), "m": m, "l": l, "dlse": to_lse}
    if dentropy is not None:
        given |= {"entropy": entropy, "dentropy": dentropy}
    dx = gradient_of_rows(_of_no_token(call, index), given)
    log_p = _logprob(gathered, m.unsqueeze(dim), l.unsqueeze(dim))
    p, factor = log_p.exp(), to_lse.unsqueeze(dim)
    has_gradient = (dy != 0).any(dim, keepdim=True) | (factor != 0)
    if dentropy is not None and entropy is not None:
        # The product 0 * -inf would be NaN.
        finite = log_p.where(p != 0, 0.0) + entropy.unsqueeze(dim)
        factor = factor - dentropy.unsqueeze(dim) * finite
        has_gradient = has_gradient | (dentropy != 0).unsqueeze(dim)
    # A row whose incoming gradients are all 0 has the gradient 0, even if it holds NaN.
    dz = (p * factor).where(has_gradient, 0.0) + _sum_of_equal(dy, gathered.columns, dim)
    d = dz * softcap_slope(eager.FUNCTIONS, gathered.x, gathered.options) * gathered.options.scale
    if gathered.options.mask is not None:
        d = d.where(gathered.options.mask, 0.0)
    return dx.scatter_(dim, gathered.columns, d.to(dx.dtype))


def _sum_of_equal(dy: Tensor, index: Tensor, dim: int) -> Tensor:
    """The sum of dy over the tokens of a row that have the same column, at each of them."""
    total = torch.zeros_like(dy)
    # A scatter_add would add in an order that changes from run to run on a GPU.
    for i in range(index.shape[dim]):
        total += dy.narrow(dim, i, 1).where(index == index.narrow(dim, i, 1), 0.0)
    return total
