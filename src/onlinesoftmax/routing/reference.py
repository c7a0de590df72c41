"""The routing of flat rows in PyTorch's operations: the reference that the kernels must equal, and its gradient.

selection.py says which experts are chosen, formulas.py what they get.  Tokens of one sequence follow those of another,
and each sequence has the same number.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..core.arrays import namespace
from ..sampling.order import largest
from ..sampling.topk import CHUNK
from ..torch.formulas import accumulator_of
from . import formulas, selection
from .results import Routed
from .rules import Call, Gradients, Rule, Score

Tensor = torch.Tensor


def _take(t: Tensor, places: Tensor) -> Tensor:
    return t.gather(-1, places.long())


def _largest(keys: Tensor, k: int) -> Tensor:
    return largest(keys.reshape(-1, keys.shape[-1]), k).reshape(*keys.shape[:-1], k)


def _power_of_two(n: Tensor) -> Tensor:
    return (n.nan_to_num(0.0).int() + 127 << 23).view(torch.float32)


def choosing() -> selection.Functions:
    """PyTorch's functions for the choice of experts."""
    return selection.Functions(
        namespace(torch.empty(0)), exact=lambda t: t, rounded=lambda t: t, double=Tensor.double, single=Tensor.float,
        power_of_two=_power_of_two, sqrt=torch.sqrt, log1p=torch.log1p, largest=_largest,
        sorted=lambda t: t.sort(-1).values, take=_take,
    )  # fmt: skip


def functions() -> formulas.Functions:
    """PyTorch's functions for the formulas."""
    return formulas.Functions(namespace(torch.empty(0)), torch.sqrt, torch.log1p, Tensor.detach, _take)


@torch.no_grad()
def choose(call: Call) -> Tensor:
    """The experts of each token, (T, k) int32; -1 for none, in every column of a token that is not valid."""
    experts = call.rule.experts
    if call.indices is None:
        x = call.x.to(accumulator_of(call.x.dtype, call.x.dtype))
        indices = selection.chosen(choosing(), x, call.bias, call.rule, x.dtype == torch.float64).int()
    else:
        indices = call.indices.masked_fill((call.indices < 0) | (call.indices >= experts), -1)
    return indices if call.mask is None else indices.masked_fill(~call.mask.unsqueeze(1), -1)


def found_at(call: Call, indices: Tensor, complete: bool = False) -> Routed:
    """The results for known experts, by operations that have gradients.

    Args:
        call: The call.
        indices: The experts, (T, k) int32 as `choose` returns them.
        complete: True where none of them is -1.
    """
    x = call.x.to(accumulator_of(call.x.dtype, call.x.dtype))
    found = formulas.results_of(functions(), x, call.bias, indices, call.rule, call.prob_sums, complete)
    sums, counts = None, None
    if found.probabilities is not None:
        sums = found.probabilities.reshape(call.sequences, call.tokens, call.rule.experts).sum(1)
    if call.counts:
        counts = counts_of(call, indices)
    return Routed(found.weights, indices, counts, sums, found.lse.squeeze(1))


def found_of(call: Call) -> Routed:
    """The results of a call without a gradient; on a CPU of a few tokens at a time, which stay in its caches."""
    parts = [found_at(part, choose(part), call.complete) for part in _parts_of(call)]
    if len(parts) == 1:
        return parts[0]
    joined: list[Any] = [None if each[0] is None else torch.cat(each) for each in zip(*parts, strict=True)]
    weights, indices, counts, sums, lse, _ = joined
    of_sequences = (call.sequences, -1, call.rule.experts)
    counts = None if counts is None else counts.reshape(of_sequences).sum(1, dtype=torch.int32)
    sums = None if sums is None else sums.reshape(of_sequences).sum(1)
    return Routed(weights, indices, counts, sums, lse)


def gradient_of(call: Call, indices: Tensor, given: Gradients) -> Tensor:
    """`gradient`, on a CPU of a few tokens at a time."""
    parts, first = [], 0
    for part in _parts_of(call):
        rows, number = slice(first, first + len(part.x)), first // max(call.tokens, 1)
        sums = None if given.prob_sums is None else given.prob_sums[number : number + part.sequences]
        weights, lse = (None if t is None else t[rows] for t in (given.weights, given.lse))
        parts.append(gradient(part, indices[rows], Gradients(weights, sums, lse)))
        first = rows.stop
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _parts_of(call: Call) -> list[Call]:
    """The calls on some tokens each: several sequences, or a part of one."""
    most, count, tokens = max(CHUNK // call.rule.experts, 1), len(call.x), call.tokens
    if not call.x.is_cpu or count <= most:
        return [call]
    whole = most // tokens * tokens
    # Each sequence has as many parts as another.
    starts = (
        range(0, count, whole) if whole else [s + i for s in range(0, count, tokens) for i in range(0, tokens, most)]
    )
    parts = []
    for first, end in zip(starts, [*starts[1:], count], strict=True):
        rows, sequences = slice(first, end), max((end - first) // tokens, 1)
        x, mask, indices = (None if t is None else t[rows] for t in (call.x, call.mask, call.indices))
        size = (end - first) // sequences
        parts.append(Call(x, call.bias, mask, indices, call.rule, sequences, size, call.counts, call.prob_sums))
    return parts


def counts_of(call: Call, indices: Tensor) -> Tensor:
    """How many tokens of each sequence have each expert, (sequences, experts) int32."""
    experts = call.rule.experts
    # -1 is counted behind the last expert.
    places = indices.masked_fill(indices < 0, experts).long().reshape(call.sequences, call.tokens * call.rule.k)
    counts = torch.zeros(call.sequences, experts + 1, dtype=torch.int32, device=indices.device)
    return counts.scatter_add(1, places, torch.ones_like(places, dtype=torch.int32))[:, :experts].contiguous()


@torch.no_grad()
def gradient(call: Call, indices: Tensor, given: Gradients) -> Tensor:
    """The gradient of the logits, (T, experts) in their dtype.

    With p the softmax of the logits, q the weights before `scale`, dq their gradient, s' the derivative of the score,
    and S the sum of the chosen scores:

        lse                      p * dlse
        softmax, all logits      q * dq at the chosen experts, and -p * sum(q * dq)
        softmax, chosen logits   q * (dq - sum(q * dq)) at the chosen experts
        another score            s' * dq at the chosen experts; renormalized, s' * (dq - sum(q * dq)) / S
        prob_sums                p * (dp - sum(p * dp)); of another score s' * (dp - sum(p * dp)) / sum(s)

    Args:
        call: The call.
        indices: The experts that its results have.
        given: Gradients of the results.
    """
    of, rule, dlse = functions(), call.rule, given.lse
    x = call.x.to(accumulator_of(call.x.dtype, call.x.dtype))
    valid = (indices >= 0).any(1, keepdim=True)
    x = torch.where(valid, x, 0.0)
    lse = formulas.logsumexp(of, x)
    dx, factor = torch.zeros_like(x), 0.0 if dlse is None else dlse.unsqueeze(1)
    if given.weights is not None:
        at, total = _of_weights(call, x, lse, indices, given.weights)
        factor = factor - total
        dx.scatter_add_(1, indices.clamp(min=0).long(), at)
    if dlse is not None or (given.weights is not None and rule.score is Score.SOFTMAX and not rule.of_chosen):
        dx += factor * formulas.probabilities(of, x, lse, rule._replace(score=Score.SOFTMAX))
    if given.prob_sums is not None:
        dp = given.prob_sums.unsqueeze(1).expand(-1, call.tokens, -1).reshape(x.shape)
        dx += _of_probabilities(x, lse, rule, dp)
    return torch.where(valid, dx, 0.0).to(call.x.dtype)


def _of_weights(call: Call, x: Tensor, lse: Tensor, indices: Tensor, dw: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of weights: of the chosen logits, (T, k); and the factor of -p for all logits, (T, 1).

    Args:
        call, indices: As for `gradient`.
        x: Logits (T, experts).
        lse: Their logsumexp (T, 1).
        dw: Gradient of the weights.
    """
    of, rule = functions(), call.rule
    places = indices.clamp(min=0)
    picked = _take(x, places)
    out = (indices < 0) | (picked == -math.inf) | formulas.is_out(of, call.bias, places)
    picked = picked.masked_fill(out, 0.0)
    q = formulas.weights_of(of, picked, out, lse, rule._replace(scale=1.0))
    dq = (dw * rule.scale).masked_fill(out, 0.0)
    total = (q * dq).sum(1, keepdim=True)
    none = torch.zeros_like(total)
    if rule.of_chosen:
        return (q * (dq - total)).masked_fill(out, 0.0), none
    if rule.score is Score.SOFTMAX:
        return q * dq, total
    if rule.renormalize:
        dq = (dq - total) / _sum_of(formulas.score_of(of, picked, rule).masked_fill(out, 0.0))
    return (_slope(picked, rule) * dq).masked_fill(out, 0.0), none


def _of_probabilities(x: Tensor, lse: Tensor, rule: Rule, dp: Tensor) -> Tensor:
    """The gradient of the logits (T, experts), of that of their probabilities."""
    of, out = functions(), x == -math.inf
    if rule.score is Score.IDENTITY:
        return dp.masked_fill(out, 0.0)
    p = formulas.probabilities(of, x, lse, rule)
    centered = dp - (p * dp).sum(1, keepdim=True)
    if rule.score is Score.SOFTMAX:
        return p * centered
    x = x.masked_fill(out, 0.0)
    total = _sum_of(formulas.score_of(of, x, rule).masked_fill(out, 0.0))
    return (_slope(x, rule) * centered / total).masked_fill(out, 0.0)


def _sum_of(scores: Tensor) -> Tensor:
    """The sum of the scores of each token, infinite where it is 0."""
    total = scores.sum(1, keepdim=True)
    return total.masked_fill(total == 0, math.inf)


def _slope(x: Tensor, rule: Rule) -> Tensor:
    """The derivative of the score of each logit."""
    if rule.score is Score.IDENTITY:
        return torch.ones_like(x)
    sigmoid = x.sigmoid()
    if rule.score is Score.SIGMOID:
        return sigmoid * (-x).sigmoid()
    s, low = formulas.score_of(functions(), x, rule), x < formulas.LOWEST
    return torch.where(low, s * 0.5, sigmoid / (2.0 * s.masked_fill(low, 1.0)))
