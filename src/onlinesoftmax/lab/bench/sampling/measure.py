"""The measurement of sampling: every way is checked, then timed beside one read of the logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .... import sample
from ..inputs import lacks_copies
from ..measure import Begun, beside_one_read, judged
from ..peers import Peer
from ..result import Result
from ..timing import Call
from .cases import VERIFY, TokenCase
from .peers import OursTokens
from .reference import wrong, wrong_drafts

ABOVE = 20.0
"""Distance of one logit of a peaked row from the others: its token has 0.999 of the probability of 128256 tokens."""

EXPONENTS = 1.0, 2.0
"""Least and largest exponent of the Zipf-like rows: the probability of a token falls as this power of its rank."""

DISTANCE = 0.5
"""Standard deviation of the difference between the logits of the two models: some drafts stay, and some do not."""

FLOAT64_COPIES = 12
"""Tensors of the shape of the logits, in float64 or int64, that the check holds at once; as many for each model."""


def lacks_memory(case: TokenCase, device: Any) -> str | None:
    """Why a case does not fit in memory; None if it does."""
    return lacks_copies(FLOAT64_COPIES * (1 + (case.operation == VERIFY)), case, device)


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
    """As `Kind.begin`."""
    rows, inputs = make_inputs(case, device)
    return beside_one_read(lambda peer: checked(case, peer, *inputs), rows)


def checked(case: TokenCase, peer: Peer, *inputs: Any) -> tuple[Result, Call]:
    """The result of a way without times, and its call."""
    call = partial(peer.prepare(case), *inputs)
    seeds = peer.seeds(case) if isinstance(peer, OursTokens) else None
    judge: Callable[..., tuple[str | None, float]] = wrong_drafts if case.operation == VERIFY else wrong
    return judged(case, peer, call, *judge(case, *inputs, call(), seeds))
