"""The largest log-probabilities of torch tensors: by a kernel, or in PyTorch's operations; and their gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..core.call import Call, Settings
from ..core.task import ANY
from ..ops import OPERATIONS
from ..torch.arguments import check_scale_is_constant, is_lazy
from ..torch.eager import scores_of
from ..torch.fast_path import is_transformed
from ..torch.formulas import PLAIN_TYPES, accumulator_of
from ..torch.gradients import adjacent, gradient_by_pytorch, is_traced, reads_cuda
from ..torch.loss_run import run_tokens
from ..torch.namespace import NAMESPACE
from ..torch.several_tokens import gradient_of_tokens
from .arguments import Logits
from .order import largest, rank_of
from .results import TopLogprobs

Tensor = torch.Tensor

CHUNK = 1 << 18
"""Elements of the rows that a CPU computes at a time: intermediate results stay in its caches."""


def topk_logprobs(logits: Logits, k: int, target: Tensor | None) -> TopLogprobs:
    """The k largest scores of each row and their log-probabilities.

    Args:
        logits: The logits, which have no bias.
        k: From 0 to the number of tokens.
        target: A token of each row, an integer tensor of the shape of the rows.
    """
    x = logits.x
    check_scale_is_constant(f"{logits.name}()", logits.options)
    transformed = is_transformed()
    # The operator has no derivative, and no rule for vmap.
    if is_traced(x) and not transformed and x.numel():
        return _by_operator(logits, k, target)
    if type(x) not in PLAIN_TYPES or transformed or not x.numel():
        return _at(logits, *_order_of(logits, k, target), target)
    if torch.is_grad_enabled() and x.requires_grad:
        return TopLogprobs(*Listed.apply(x, How(logits._replace(x=None), k, None), target))
    return found_of(logits, k, target)


class How(NamedTuple):
    """The arguments of a recorded call that are no tensors.

    Attributes:
        logits: The logits without their tensor.
        k: Number of tokens.
        run: The function (x, target) of a prepared call that returns the results; None without one.
    """

    logits: Logits
    k: int
    run: Any


class Listed(torch.autograd.Function):
    """The results of `topk_logprobs`, recorded by autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: How, target: Tensor | None) -> Any:
        found = found_of(how.logits._replace(x=x), how.k, target) if how.run is None else how.run(x, target)
        ctx.how = how
        ctx.save_for_backward(x, target, found.values, found.indices, found.logprobs, found.lse)
        ctx.mark_non_differentiable(*[t for t in (found.indices, found.target_rank) if t is not None])
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> Any:
        x, target, values, indices, logprobs, lse = ctx.saved_tensors
        how: How = ctx.how
        given = {name: dy for name, dy in zip(TopLogprobs._fields, dys, strict=True) if dy is not None}
        if not given:
            return None, None, None
        logits = how.logits._replace(x=x)
        # A kernel's gradient has no derivative, and a kernel cannot read a lazy tensor.
        if torch.is_grad_enabled() or any(map(is_lazy, given.values())) or not reads_cuda(x):

            def results(x: Tensor) -> list[Tensor]:
                found = _at(logits._replace(x=x), indices, None, target)
                return [getattr(found, name) for name in given]

            return gradient_by_pytorch(x, results, [*given.values()]), None, None
        if not how.k:
            m, l = lse, torch.ones_like(lse)
        else:
            m, l = values.select(logits.dim, 0), (-logprobs.select(logits.dim, 0)).exp()
        call = Call(OPERATIONS["token_logprobs"], x, Settings(logits.dim), logits.options)
        return gradient_of_tokens(call, {"x": x, "m": m, "l": l}, indices, target, given), None, None


@torch.no_grad()
def found_of(logits: Logits, k: int, target: Tensor | None) -> TopLogprobs:
    """The results of `topk_logprobs` without a gradient."""
    x, dim, z = logits.x, logits.dim, logits.as_rows()
    if reads_cuda(x):
        from .kernels import topk_launch

        rows = adjacent(z)
        run = topk_launch.bind(rows, logits.rows, k, dim, target is not None)
        if run is not None:
            return run(rows, None if target is None else target.long().contiguous())
    columns, wide = largest(z, k), accumulator_of(z.dtype, z.dtype)
    values = z.gather(1, columns).to(wide)
    m = values[:, :1] if k else z.amax(1, keepdim=True).to(wide)
    log_sum = _sums(z, m).log()
    lse, own, rank = torch.where(m.isinf(), m, m + log_sum), None, None
    if target is not None:
        of_target = target.reshape(-1).long()
        rank = rank_of(z, of_target)
        own = z.gather(1, of_target.where(rank > 0, 0).unsqueeze(1)) - m - log_sum
        own, rank = own.squeeze(1).where(rank > 0, torch.nan).reshape(logits.rows), rank.reshape(logits.rows)
    values, columns, logprobs = (_along(logits, t) for t in (values, columns, values - m - log_sum))
    return TopLogprobs(values, columns, logprobs, own, rank, lse.reshape(logits.rows))


def _along(logits: Logits, listed: Tensor) -> Tensor:
    """Tokens (rows, k) along the dimension of the tokens."""
    return listed.reshape(*logits.rows, listed.shape[1]).movedim(-1, logits.dim)


def _by_operator(logits: Logits, k: int, target: Tensor | None) -> TopLogprobs:
    """The results in a trace."""
    with torch.no_grad():
        z = logits.as_rows()
        of_rows = None if target is None else target.reshape(-1).long()
        found = getattr(torch.ops, NAMESPACE).topk_logprobs(z, of_rows, k)
        values, indices, logprobs = (_along(logits, t) for t in found[:3])
        lse, own, rank = (*(t.reshape(logits.rows) for t in found[3:]), None, None)[:3]
    if torch.is_grad_enabled() and logits.x.requires_grad:
        return _at(logits, indices, rank, target)
    return TopLogprobs(values, indices, logprobs, own, rank, lse)


def _sums(z: Tensor, m: Tensor) -> Tensor:
    """The sum of exp(z - m) of each row, (rows, 1) in the dtype of m; NaN in a row without a softmax."""
    # The sums of PyTorch's log_softmax have errors of 1e-4 in rows of 2^20 tokens on a CPU.
    count = max(CHUNK // z.shape[1], 1) if z.is_cpu else z.shape[0]
    parts = zip(z.split(count), m.split(count), strict=True)
    return torch.cat([(part.to(m.dtype) - of_part).exp_().sum(1, keepdim=True) for part, of_part in parts])


@torch.no_grad()
def _order_of(logits: Logits, k: int, target: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The tokens with the largest scores, along the dimension of the tokens, and the rank of the target."""
    scores = logits.scores()
    indices = largest(scores, k).reshape(*logits.rows, k).movedim(-1, logits.dim)
    return indices, None if target is None else rank_of(scores, target.reshape(-1).long()).reshape(logits.rows)


def _at(logits: Logits, indices: Tensor, rank: Tensor | None, target: Tensor | None) -> TopLogprobs:
    """The results for known tokens, in operations that have gradients."""
    x, dim, options, k = logits.x, logits.dim, logits.options, indices.shape[logits.dim]
    wanted = indices if target is None else torch.cat([indices, target.long().unsqueeze(dim)], dim)
    found = run_tokens(x, wanted, dim, None if options.is_plain() else options, False, ANY)
    mask = None if options.mask is None else options.mask.expand_as(x).gather(dim, indices)
    values = scores_of(x.gather(dim, indices), dim, options._replace(mask=mask), torch.float32)[0]
    own = None if target is None else found.logprob.select(dim, k)
    return TopLogprobs(values, indices, found.logprob.narrow(dim, 0, k), own, rank, found.lse)
