"""The measurement of sampling: what a way may return, and one read of the logits, beside which it is timed.

Thresholds and log-probabilities are those of float64, and our own token is the one that our noise prefers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .... import sample, verify
from ..measure import Begun, beside_one_read, judged
from ..peers import Peer
from ..result import Result
from ..timing import Call
from .cases import SAMPLE, VERIFY, TokenCase
from .peers import OursTokens

ABOVE = 20.0
"""Distance of one logit of a peaked row from the others: its token has 0.999 of the probability of 128256 tokens."""

EXPONENTS = 1.0, 2.0
"""Least and largest exponent of the Zipf-like rows: the probability of a token falls as this power of its rank."""

DISTANCE = 0.5
"""Standard deviation of the difference between the logits of the two models: some drafts stay, and some do not."""


def make_logits(case: TokenCase, device: Any) -> Any:
    """The logits of a case.

    "normal" are normal numbers, and "peaked" are such with one large logit in each row.  "zipf" stands for the logits
    of a language model, none of which are recorded here: probabilities fall as a power of the rank, another power in
    each row, times the exponential of a normal number, and the tokens are in any order.
    """
    where: dict[str, Any] = {"device": device, "generator": torch.Generator(device).manual_seed(case.elements)}
    x = torch.randn(case.shape, **where)
    if case.logits == "peaked":
        x[..., case.shape[-1] // 3] += ABOVE
    if case.logits == "zipf":
        rank = torch.rand(case.shape, **where).argsort(-1) + 1.0
        x -= torch.linspace(*EXPONENTS, case.rows, device=device).view(*case.shape[:-1], 1) * rank.log()
    return x.to(getattr(torch, case.dtype))


def make_inputs(case: TokenCase, device: Any) -> tuple[Any, tuple[Any, ...]]:
    """The logits as rows that one read reads, and the arguments of a way: the logits alone, or those of `verify`."""
    x = make_logits(case, device)
    if case.operation != VERIFY:
        return x, (x,)
    rows, places, tokens = case.shape
    noise = torch.randn(x[:, 1:].shape, device=device, generator=torch.Generator(device).manual_seed(case.elements + 1))
    both = torch.cat([x.flatten(0, 1), (x[:, :-1] + DISTANCE * noise).to(x.dtype).flatten(0, 1)])
    target, draft = both[: rows * places].view(x.shape), both[rows * places :].view(rows, places - 1, tokens)
    row, place = torch.arange(rows, device=device), torch.arange(places - 1, device=device)
    # The noise of `verify` is independent of that of its drafts, though the seeds are the same.
    return both, (target, sample(draft, seed=row.unsqueeze(1), offset=place, **case.arguments).token, draft)


def begin(case: TokenCase, device: Any) -> Begun:
    """Make the tensors of a case, for `Kind`."""
    rows, inputs = make_inputs(case, device)
    return beside_one_read(lambda peer: checked(case, peer, *inputs), rows)


def checked(case: TokenCase, peer: Peer, *inputs: Any) -> tuple[Result, Call]:
    """The result of a way without times, and its call."""
    call = partial(peer.prepare(case), *inputs)
    seeds = peer.seeds(case) if isinstance(peer, OursTokens) else None
    judge: Callable[..., tuple[str | None, float]] = wrong_drafts if case.operation == VERIFY else wrong
    return judged(case, peer, call, *judge(case, *inputs, call(), seeds))


SLACK = 1e-3
"""Part of the probability by which the thresholds of other libraries may be off: they add up float32 numbers."""

MASS_ERROR = 1e-6
"""Part of the probability by which our own thresholds may be off: masses are made of numbers rounded to float32."""

ROUNDINGS = 8
"""Roundings in float32 of the largest number beside a log-probability: it and its logsumexp are a sum of some terms."""


def threshold_of(case: TokenCase, order: Any, slack: float = 0.0) -> Any:
    """The least score of each row, (rows, 1) float64, that the filters of a case keep.

    Args:
        case: The case, of `sample`.
        order: Scores (rows, tokens) by falling size, float64.
        slack: Part of the probability that may be kept beyond top_p and below min_p.
    """
    asked, largest = case.arguments, order[:, :1]
    if asked.get("temperature") == 0:
        return largest
    least = order[:, -1:]
    if (k := asked.get("top_k", order.shape[1])) < order.shape[1]:
        least = order[:, k - 1 : k]
    if (p := asked.get("top_p")) is not None:
        shares = (order - largest).exp().where(order >= least, 0.0).cumsum(-1)
        fewer = (shares < (p + slack) * shares[:, -1:]).sum(-1, keepdim=True)
        least = least.maximum(order.gather(1, fewer.clamp(max=order.shape[1] - 1)))
    if (min_p := asked.get("min_p")) is not None:
        least = least.maximum(largest + (largest.new_tensor(min_p * (1 - slack))).log())
    return least


def wrong(case: TokenCase, x: Any, found: Any, seed: Any = None) -> tuple[str | None, float]:
    """A sentence that says why a result is wrong, or None; and the largest error of a log-probability.

    Args:
        case: The case.
        x: The logits.
        found: (tokens, …) of `sample`, (values, tokens, …) of `topk_logprobs`; log-probabilities may follow.
        seed: Seeds of the rows, for our function: the result then has to be exact.
    """
    z = x.double()
    order, by_score = z.sort(dim=-1, descending=True, stable=True)
    if case.operation == SAMPLE:
        return _wrong_sample(case, z, order, found, seed)
    values, tokens, *more = found
    k = case.top
    own = z.gather(1, tokens.long())
    if not (torch.equal(values.double(), order[:, :k]) and torch.equal(own, order[:, :k])):
        return f"the {k} largest are others", torch.inf
    if seed is not None and not torch.equal(tokens, by_score[:, :k]):
        return "of equal scores, a later token comes first", torch.inf
    return _off(more[0], own - z.logsumexp(-1, keepdim=True), own) if more else (None, 0.0)


def _wrong_sample(case: TokenCase, z: Any, order: Any, found: Any, seed: Any) -> tuple[str | None, float]:
    token = found[0].long()
    inside = (token >= 0) & (token < z.shape[1])
    own = z.gather(1, token.clamp(0, z.shape[1] - 1).unsqueeze(1))
    least = threshold_of(case, order, MASS_ERROR if seed is not None else SLACK)
    if bad := int((~inside | (own < least)[:, 0]).sum()):
        return f"{bad} of {len(z)} tokens are not kept", torch.inf
    if seed is None:
        return None, 0.0
    given = case.arguments
    if given.get("temperature") != 0:
        fewest = (z >= threshold_of(case, order, -MASS_ERROR)).sum(1)
        if bad := int(((found.kept < fewest) | (found.kept > (z >= least).sum(1))).sum()):
            return f"{bad} of {len(z)} rows keep another number of tokens", torch.inf
        # The number of kept tokens says where the threshold is.
        given = {"top_k": found.kept, "top_logprobs": case.top}
    # No kernel takes float64, so these are our formulas in PyTorch's operations.
    exact = sample(z, seed=seed, **given)
    if bad := int(((token != exact.token) | (found.kept != exact.kept)).sum()):
        return f"{bad} of {len(z)} rows have another token, or keep some of equal scores", torch.inf
    pairs = [(found.logprob.unsqueeze(1), exact.logprob.unsqueeze(1))]
    pairs += [(found.top_logprobs, exact.top_logprobs)] if case.top else []
    mine, right = (torch.cat(parts, 1) for parts in zip(*pairs, strict=True))
    return _off(mine, right, own)


def wrong_drafts(
    case: TokenCase, target: Any, drafts: Any, draft: Any, found: Any, seed: Any = None
) -> tuple[str | None, float]:  # fmt: skip
    """The same for a result of `verify`.

    Args:
        case: The case.
        target, drafts, draft: The arguments of `verify`.
        found: (accepted, tokens, …).
        seed: As for `wrong`.
    """
    (rows, n), accepted, tokens = drafts.shape, found[0].unsqueeze(1), found[1].long()
    if seed is not None:
        # No kernel takes float64, so these are our formulas in PyTorch's operations.
        exact = verify(target.double(), drafts, draft.double(), seed=seed, **case.arguments)
        if bad := int(((found.accepted != exact.accepted) | (tokens != exact.tokens).any(1)).sum()):
            return f"{bad} of {rows} rows have other tokens", torch.inf
        return _off(found.logprobs, exact.logprobs, target)
    p, q = (_probabilities(case, x, SLACK) for x in (target, draft))
    position, row = (torch.arange(count, device=drafts.device) for count in (n + 1, rows))
    last, at = tokens.gather(1, accepted.clamp(0, n)), accepted[:, 0].clamp(0, n)
    right = torch.cat([drafts, last], 1).where(position < accepted, last.where(position == accepted, -1))
    some = tokens.clamp(0, p.shape[-1] - 1)
    kept = (p.gather(-1, some.unsqueeze(-1))[..., 0] > 0) & (tokens == some) | (position > accepted)
    # A token that replaces a draft has a larger probability in the target model than in the draft model.
    gained = p[row, at] * (1 + 2 * SLACK) > q[row, at.clamp(max=n - 1)]
    fits = kept.all(1) & ((at == n) | gained.gather(1, some.gather(1, at.unsqueeze(1)))[:, 0])
    if bad := int((~fits | (tokens != right).any(1)).sum()):
        return f"{bad} of {rows} rows have tokens that no draw gives", torch.inf
    return None, 0.0


def _probabilities(case: TokenCase, logits: Any, slack: float) -> Any:
    """Probabilities of all tokens after the filters, float64, in the shape of the logits; `slack` of threshold_of."""
    z = logits.double().flatten(0, 1)
    least = threshold_of(case, z.sort(dim=-1, descending=True).values, slack)
    return z.masked_fill(z < least, -torch.inf).softmax(-1).view(logits.shape)


def _off(found: Any, exact: Any, scores: Any) -> tuple[str | None, float]:
    """The sentence about log-probabilities that are further off than float32 explains, and their largest error."""
    same = found == exact  # both -inf
    error = float((found.double() - exact).masked_fill(same, 0.0).abs().nan_to_num(nan=torch.inf).max())
    largest = float(scores.abs().max() + exact.where(exact.isfinite(), 0.0).abs().max())
    allowed = ROUNDINGS * torch.finfo(torch.float32).eps * max(largest, 1.0)
    return (f"log-probability: error {error:.1e}, allowed {allowed:.1e}" if error > allowed else None), error
