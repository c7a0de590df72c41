"""The routing of flat rows in PyTorch's operations: the reference that the kernels must equal, and its gradient.

selection.py says which experts are chosen, formulas.py what they get.  Tokens of one sequence follow those of another,
and each sequence has the same number.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch

from ..core.arrays import namespace
from ..sampling.order import is_readable, largest
from ..sampling.topk import CHUNK
from ..torch.formulas import widened
from . import formulas, selection
from .results import Routed
from .rules import Call, Gradients, Rule, Score

Tensor = torch.Tensor


def _take(t: Tensor, places: Tensor) -> Tensor:
    return t.gather(-1, places.long())


def _largest(keys: Tensor, k: int) -> Tensor:
    if keys.dim() == 2:
        return largest(keys, k)
    return largest(keys.reshape(-1, keys.shape[-1]), k).reshape(*keys.shape[:-1], k)


def _power_of_two(n: Tensor) -> Tensor:
    # A view of bits would be faster, and PyTorch 2.11 has no rule of vmap for one.
    return n.double().exp2().float()


def _softmax(x: Tensor) -> Tensor:
    # No mode replaces this operation, as `override` does torch.softmax.
    return torch._softmax(x, -1, False)


@cache
def _number(value: float) -> Tensor:
    # An operation with a tensor of the CPU takes the host half the time of one with a float.
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def _finite_power_of_two(n: Tensor) -> Tensor:
    # The bits of 2^n as a float32 number, which holds them exactly.
    return ((n + _number(127.0)) * _number(2.0**23)).int().view(torch.float32)


_ARRAYS = namespace(torch.empty(0))

CHOOSING = selection.Functions(
    _ARRAYS, exact=lambda t: t, rounded=lambda t: t, double=Tensor.double, single=Tensor.float, bounded=torch.clamp,
    power_of_two=_power_of_two, sqrt=torch.sqrt, log1p=torch.log1p, largest=_largest,
    sorted=lambda t: t.sort(-1).values, take=_take, number=float,
)  # fmt: skip
"""PyTorch's functions for the choice of experts."""

CHOOSING_FINITE = CHOOSING._replace(power_of_two=_finite_power_of_two, number=_number)
"""The same for tensors of a CPU whose numbers are finite."""

FUNCTIONS = formulas.Functions(_ARRAYS, torch.sqrt, torch.log1p, Tensor.detach, _take, _softmax)
"""PyTorch's functions for the formulas."""


def _is_finite(*tensors: Tensor | None) -> bool:
    """True where the host can read the tensors and all their numbers are finite.

    The sum of large numbers may be infinite: then the answer is False.
    """
    return all(t is None or (is_readable(t) and math.isfinite(t.sum().item())) for t in tensors)


def _is_small(lse: Tensor) -> bool:
    """True where the host can read that lse is finite and its rounding errors, |lse| * 2^-24 in float32, are small."""
    return is_readable(lse) and bool((lse.abs() < 64).all())


@torch.no_grad()
def choose(call: Call) -> Tensor:
    """The experts of each token, (T, k) int32; -1 for none, in every column of a token that is not valid."""
    return _chosen(call, widened(call.x), False)


def _chosen(call: Call, x: Tensor, finite: bool) -> Tensor:
    """`choose`, of logits in the dtype of the arithmetic; `finite` where all logits and biases are."""
    experts = call.rule.experts
    if call.indices is None:
        of = CHOOSING_FINITE if finite else CHOOSING
        indices = selection.chosen(of, x, call.bias, call.rule, x.dtype == torch.float64, finite).int()
    else:
        indices = call.indices.masked_fill((call.indices < 0) | (call.indices >= experts), -1)
    return indices if call.mask is None else indices.masked_fill(~call.mask.unsqueeze(1), -1)


def found_at(call: Call, indices: Tensor, complete: bool = False, finite: bool = False) -> Routed:
    """The results for known experts, by operations that have gradients.

    Args:
        call: The call.
        indices: The experts, (T, k) int32 as `choose` returns them.
        complete: True where none of them is -1.
        finite: True where the caller knows that all logits and biases are finite too, and needs no gradient.
    """
    x = widened(call.x)
    found = formulas.results_of(FUNCTIONS, x, call.bias, indices, call.rule, call.prob_sums, complete, finite)
    sums, counts = None, None
    if found.probabilities is not None:
        sums = found.probabilities.reshape(call.sequences, call.tokens, call.rule.experts).sum(1)
    if call.counts:
        counts = counts_of(call, indices, complete)
    return Routed(found.weights, indices, counts, sums, found.lse.squeeze(1))


def found_of(call: Call) -> Routed:
    """The results of a call without a gradient; on a CPU of a few tokens at a time, which stay in its caches."""
    calls = _parts_of(call)
    if len(calls) == 1:
        return _found_of_part(call)
    parts = [_found_of_part(part) for part in calls]
    joined: list[Any] = [None if each[0] is None else torch.cat(each) for each in zip(*parts, strict=True)]
    weights, indices, counts, sums, lse, _ = joined
    of_sequences = (call.sequences, -1, call.rule.experts)
    counts = None if counts is None else counts.reshape(of_sequences).sum(1, dtype=torch.int32)
    sums = None if sums is None else sums.reshape(of_sequences).sum(1)
    return Routed(weights, indices, counts, sums, lse)


def _found_of_part(call: Call) -> Routed:
    x = widened(call.x)
    finite = call.complete and _is_finite(x, call.bias)
    return found_at(call, _chosen(call, x, finite), call.complete, finite)


def gradient_of(call: Call, found: Routed, given: Gradients, complete: bool = False) -> Tensor:
    """`gradient`, on a CPU of a few tokens at a time."""
    calls = _parts_of(call)
    if len(calls) == 1:
        return gradient(call, found, given, complete)
    parts, first = [], 0
    for part in calls:
        rows, number = slice(first, first + len(part.x)), first // max(call.tokens, 1)
        sums = None if given.prob_sums is None else given.prob_sums[number : number + part.sequences]
        weights, lse = (None if t is None else t[rows] for t in (given.weights, given.lse))
        own = Routed(found.weights[rows], found.indices[rows], None, None, found.lse[rows])
        parts.append(gradient(part, own, Gradients(weights, sums, lse), complete))
        first = rows.stop
    return torch.cat(parts)


def _parts_of(call: Call) -> list[Call]:
    """The calls on some tokens each: several sequences, or a part of one."""
    most, count, tokens = max(CHUNK // call.rule.experts, 1), call.x.shape[0], call.tokens
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


def counts_of(call: Call, indices: Tensor, complete: bool = False) -> Tensor:
    """How many tokens of each sequence have each expert, (sequences, experts) int32; arguments as of `found_at`."""
    experts = call.rule.experts
    # -1 is counted behind the last expert.
    width = experts if complete else experts + 1
    places = indices if complete else indices.masked_fill(indices < 0, experts)
    if call.sequences > 1:
        begin = torch.arange(call.sequences, device=indices.device) * width
        places = places.reshape(call.sequences, -1) + begin.unsqueeze(1)
    places = places.reshape(-1)
    counts = torch.zeros(call.sequences * width, dtype=torch.int32, device=indices.device)
    counts = counts.index_add(0, places, torch.ones_like(places, dtype=torch.int32)).reshape(call.sequences, width)
    return counts if complete else counts[:, :experts].contiguous()


@torch.no_grad()
def gradient(call: Call, found: Routed, given: Gradients, complete: bool = False) -> Tensor:
    """The gradient of the logits, (T, experts) in their dtype.

    With p the softmax of the logits, w the weights, dw their gradient, s' the derivative of the score, and S the sum of
    the chosen scores:

        lse                      p * dlse
        softmax, all logits      w * dw at the chosen experts, and -p * sum(w * dw)
        softmax, chosen logits   w * (dw - sum(w * dw) / scale) at the chosen experts
        another score            s' * scale * dw at the chosen experts
        another, renormalized    s' * (scale * dw - sum(w * dw)) / S at the chosen experts
        prob_sums                p * (dp - sum(p * dp)); of another score s' * (dp - sum(p * dp)) / sum(s)

    Args:
        call: The call.
        found: Its results; weights, indices and lse are read.
        given: Gradients of the results.
        complete: True where the caller knows that no index is -1.
    """
    of, rule, indices = FUNCTIONS, call.rule, found.indices
    x, lse, dlse = widened(call.x), found.lse.unsqueeze(1), given.lse
    valid = None if complete else (indices >= 0).any(1, keepdim=True)
    x = x if valid is None else torch.where(valid, x, 0.0)
    factor = None if dlse is None else dlse.unsqueeze(1)
    dp = None if given.prob_sums is None else _of_tokens(call, given.prob_sums)
    at = dx = None
    if given.weights is not None:
        at, total = _of_weights(call, x, found, given.weights)
        if rule.score is Score.SOFTMAX and not rule.is_of_chosen():
            factor = -total if factor is None else factor - total
    of_softmax = dp is not None and rule.score is Score.SOFTMAX
    if factor is not None or of_softmax:
        p = (x - lse).exp() if _is_small(lse) else formulas.softmax(of, x)
        if of_softmax:
            centered = (p * dp).sum(1, keepdim=True)
            dx = p * (dp - (centered if factor is None else centered - factor))
        else:
            dx = p * factor
    if dp is not None and not of_softmax:
        of_sums = _of_probabilities(x, rule, dp)
        dx = of_sums if dx is None else dx + of_sums
    if at is not None:
        places = indices if complete else indices.clamp(min=0)
        dx = (torch.zeros_like(x) if dx is None else dx).scatter_add_(1, places.long(), at)
    assert dx is not None, "a result has a gradient"
    return (dx if valid is None else torch.where(valid, dx, 0.0)).to(call.x.dtype)


def _of_tokens(call: Call, dp: Tensor) -> Tensor:
    """The gradient of the probabilities of each token, in a shape that broadcasts to (T, experts)."""
    return dp if call.sequences == 1 else dp.repeat_interleave(call.tokens, 0)


def _of_weights(call: Call, x: Tensor, found: Routed, dw: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of weights: of the chosen logits, (T, k); and the sum of w * dw, (T, 1).

    Args:
        call, found: As for `gradient`.
        x: Logits (T, experts).
        dw: Gradient of the weights.
    """
    of, rule, w = FUNCTIONS, call.rule, found.weights
    if rule.score is Score.SOFTMAX:
        # An expert that is out, and one whose weight underflows, has the weight 0.
        at = (w * dw).masked_fill(w == 0, 0.0)
        total = at.sum(1, keepdim=True)
        if not rule.is_of_chosen():
            return at, total
        # With the scale 0, all weights are.
        return at - w * (total if rule.scale == 1 else total / (rule.scale or 1.0)), total
    places = found.indices.clamp(min=0)
    picked = _take(x, places)
    out = (found.indices < 0) | (picked == -math.inf) | formulas.is_out(of, call.bias, places)
    picked = picked.masked_fill(out, 0.0)
    dq = (dw * rule.scale).masked_fill(out, 0.0)
    total, slope = (w * dw).masked_fill(out, 0.0).sum(1, keepdim=True), _slope(picked, rule)
    if rule.renormalize:
        # The slope comes first: the product of it and dq may be subnormal.
        slope = slope / _sum_of(formulas.score_of(of, picked, rule).masked_fill(out, 0.0))
        dq = dq - total
    return (slope * dq).masked_fill(out, 0.0), total


def _of_probabilities(x: Tensor, rule: Rule, dp: Tensor) -> Tensor:
    """The gradient of the logits (T, experts), of that of their probabilities, for a score that is not softmax."""
    of, out = FUNCTIONS, x == -math.inf
    if rule.score is Score.IDENTITY:
        return torch.where(out, 0.0, dp)
    x = x.masked_fill(out, 0.0)
    scores = formulas.score_of(of, x, rule).masked_fill(out, 0.0)
    total = _sum_of(scores)
    centered = dp - (scores / total * dp).sum(1, keepdim=True)
    return (_slope(x, rule) / total * centered).masked_fill(out, 0.0)


def _sum_of(scores: Tensor) -> Tensor:
    """The sum of the scores of each token, infinite where it is 0."""
    total = scores.sum(1, keepdim=True)
    return total.masked_fill(total == 0, math.inf)


def _slope(x: Tensor, rule: Rule) -> Tensor:
    """The derivative of the score of each logit."""
    if rule.score is Score.IDENTITY:
        return torch.ones_like(x)
    if rule.score is Score.SIGMOID:
        # The sigmoid of PyTorch's operation is 0 below -89.
        t = (-x.abs()).exp()
        return t / (1.0 + t).square()
    s, low = formulas.score_of(FUNCTIONS, x, rule), x < formulas.LOWEST
    return torch.where(low, s * 0.5, x.sigmoid() / (2.0 * s.masked_fill(low, 1.0)))
