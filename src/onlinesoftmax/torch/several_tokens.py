"""Log-probabilities of several tokens of each row on our kernels, from one pass over the logits.

forward    a kernel computes the state (m, l) of each row; the scores of the tokens are gathered:
           logprob = (z - m) - log(l)
backward   a kernel writes the gradient of all columns without the tokens' own terms; then the token columns are
           recomputed in the accumulator's dtype and overwritten
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..core.call import Call
from ..core.options import ScoreOptions, scores, softcap_slope
from . import eager
from .autograd import launch, record
from .formulas import accumulator_of
from .gradients import gradient_call
from .loss_arguments import is_class
from .loss_eager import log_probabilities_of
from .recording import Recording, Tensors, outputs_to_keep

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


def log_probabilities(call: Call, results: tuple[str, ...]) -> tuple[Tensor, ...]:
    """The results "y" (logprob), "lse" and "entropy" of all rows, if it is asked for.

    The target of the call has the columns of the tokens, along the softmax dimension.
    """
    if not (torch.is_grad_enabled() and call.x.requires_grad):
        return _outputs(call, results)
    how = {"forward": _forward, "gradient": _gradient, "by_pytorch": log_probabilities_of}
    return record(call, outputs_to_keep(call, results), results, **how)


def _forward(recording: Recording, call: Call) -> tuple[Tensor, ...]:
    return _outputs(call, recording.outputs)


def _outputs(call: Call, names: tuple[str, ...]) -> tuple[Tensor, ...]:
    states = ("lse", "m", "l", *(("entropy",) if "entropy" in names else ()))
    found = dict(zip(states, launch(_of_no_token(call), states), strict=True))
    dim, gathered = call.settings.dim, _gathered(call, call.beside["target"])
    y = _logprob(gathered, found["m"].unsqueeze(dim), found["l"].unsqueeze(dim))
    found["y"] = y.where(gathered.inside, torch.nan)
    return tuple([found[name] for name in names])


def _of_no_token(call: Call) -> Call:
    """The call with target -1 in each row, so that the kernel adds no target term."""
    x, dim = call.x, call.settings.dim
    return call.with_operands(target=x.new_full((*x.shape[:dim], 1, *x.shape[dim + 1 :]), -1, dtype=torch.int64))


def _gathered(call: Call, index: Tensor) -> _Gathered:
    x, dim, options = call.x, call.settings.dim, call.scores()
    inside = is_class(index, x.shape[dim])
    columns = index.where(inside, 0).long()
    if options.mask is not None:
        options = options._replace(mask=options.mask.expand_as(x).gather(dim, columns))
    logits = x.gather(dim, columns).to(accumulator_of(x.dtype, x.dtype))
    return _Gathered(columns, inside, scores(eager.FUNCTIONS, logits, options), logits, options)


def _logprob(gathered: _Gathered, m: Tensor, l: Tensor) -> Tensor:
    """The logarithm of the probability of each token; NaN in a row without a softmax, whose l is 0, infinite or NaN."""
    return (gathered.z - m) - l.log().where(l != torch.inf, torch.nan)


def _gradient(call: Call, saved: Tensors, dys: Tensors) -> Tensor:
    """The gradient with respect to the logits, from the gradients of logprob, entropy and lse."""
    dy, dentropy, dlse = dys.get("dy"), dys.get("dentropy"), dys.get("dlse")
    dim, gathered = call.settings.dim, _gathered(call, call.beside["target"])
    dy = torch.zeros_like(gathered.z) if dy is None else dy.to(gathered.z.dtype).where(gathered.inside, 0.0)
    # Every column has -p * (the sum of dy - dlse), as if it were the gradient of lse.
    to_lse = -dy.sum(dim) if dlse is None else dlse - dy.sum(dim)
    own, has_gradient = _sum_of_equal(dy, gathered.columns, dim), (dy != 0).any(dim, keepdim=True)
    return _with_tokens(call, saved, gathered, own, to_lse, dentropy, has_gradient)


def gradient_of_tokens(call: Call, saved: Tensors, indices: Tensor, target: Tensor | None, dys: Tensors) -> Tensor:
    """The gradient with respect to the logits of distinct tokens of each row, and of one that may be among them.

    Args:
        call: The call of log-probabilities, without a target.
        saved: The logits x, and the state (m, l) of each row.
        indices: The distinct tokens, along the softmax dimension.
        target: The other token of each row; None without one.
        dys: Gradients with respect to their scores "values", their "logprobs", "target_logprob" and "lse".
    """
    dim, k = call.settings.dim, indices.shape[call.settings.dim]
    tokens = indices if target is None else torch.cat([indices, target.long().unsqueeze(dim)], dim)
    gathered = _gathered(call, tokens)
    nothing = torch.zeros_like(gathered.z.narrow(dim, 0, k))
    dlogprobs = dys.get("logprobs", nothing)
    own, to_lse = dlogprobs + dys.get("values", nothing), dys.get("lse", 0.0) - dlogprobs.sum(dim)
    if target is not None:
        column = gathered.columns.narrow(dim, k, 1)
        dtarget = dys.get("target_logprob", torch.zeros_like(saved["m"])).unsqueeze(dim)
        dtarget, same = dtarget.where(gathered.inside.narrow(dim, k, 1), 0.0), indices == column
        own, to_lse = own + dtarget.where(same, 0.0), to_lse - dtarget.squeeze(dim)
        # Both places of a token that is there twice get its sum.
        of_target = own.where(same, 0.0).sum(dim, keepdim=True).where(same.any(dim, keepdim=True), dtarget)
        own = torch.cat([own, of_target], dim)
    return _with_tokens(call, saved, gathered, own, to_lse, None, (to_lse != 0).unsqueeze(dim))


def _with_tokens(
    call: Call, saved: Tensors, gathered: _Gathered, own: Tensor, to_lse: Tensor, dentropy: Tensor | None,
    has_gradient: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient with respect to the logits.

    Args:
        call, saved: As for `_gradient`.
        gathered: The tokens.
        own: Gradient with respect to the score of each token itself, equal where a token is there twice.
        to_lse: Gradient with respect to lse, (rows).
        dentropy: Gradient with respect to the entropy, or None.
        has_gradient: True for rows with gradients of log-probabilities, in a shape that broadcasts to `own`.
    """
    dim, m, l = call.settings.dim, saved["m"], saved["l"]
    given = {"dy": torch.zeros_like(m), "dlse": to_lse, **({} if dentropy is None else {"dentropy": dentropy})}
    states = {name: t for name, t in saved.items() if name != "target"}
    (dx,) = launch(gradient_call(_of_no_token(call), states, given, call.x.dtype), ("y",))
    log_p = _logprob(gathered, m.unsqueeze(dim), l.unsqueeze(dim))
    p, factor = log_p.exp(), to_lse.unsqueeze(dim)
    has_gradient = has_gradient | (factor != 0)
    if dentropy is not None:
        # The product 0 * -inf would be NaN.
        finite = log_p.where(p != 0, 0.0) + saved["entropy"].unsqueeze(dim)
        factor = factor - dentropy.unsqueeze(dim) * finite
        has_gradient = has_gradient | (dentropy != 0).unsqueeze(dim)
    # A row whose incoming gradients are all 0 has the gradient 0, even if it holds NaN.
    dz = (p * factor).where(has_gradient, 0.0) + own
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
