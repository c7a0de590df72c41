"""The measurement of sampling: every way is checked, then timed beside one read of the logits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ..inputs import lacks_copies
from ..measure import check_each, judged, over_one_read
from ..peers import Peer
from ..result import CaseResult, Result
from ..timing import Call, Clock
from .cases import TokenCase
from .peers import OursTokens
from .reference import wrong

ABOVE = 20.0
"""Distance of one logit of a peaked row from the others: its token has 0.999 of the probability of 128256 tokens."""

EXPONENTS = 1.0, 2.0
"""Least and largest exponent of the Zipf-like rows: the probability of a token falls as this power of its rank."""

FLOAT64_COPIES = 12
"""Tensors of the shape of the logits, in float64 or int64, that the check holds at once."""


lacks_memory = partial(lacks_copies, FLOAT64_COPIES)


def make_logits(case: TokenCase, device: Any) -> Any:
    """The logits of a case.

    "normal" are normal numbers, and "peaked" are such with one large logit in each row.  "zipf" stands for the logits
    of a language model, none of which are recorded here: probabilities fall as a power of the rank, another power in
    each row, times the exponential of a normal number, and the tokens are in any order.
    """
    import torch

    where: dict[str, Any] = {"device": device, "generator": torch.Generator(device).manual_seed(case.elements)}
    x = torch.randn(case.shape, **where)
    if case.logits == "peaked":
        x[:, case.shape[1] // 3] += ABOVE
    if case.logits == "zipf":
        rank = torch.rand(case.shape, **where).argsort(-1) + 1.0
        x -= torch.linspace(*EXPONENTS, case.rows, device=device).unsqueeze(1) * rank.log()
    return x.to(getattr(torch, case.dtype))


def measure(case: TokenCase, everybody: Sequence[Peer], device: Any, repeat_ms: float, clock: Clock) -> CaseResult:
    """Measure a case in all ways; as `Kind.measure`."""
    x = make_logits(case, device)
    results, calls = check_each(case, everybody, lambda peer: checked(case, peer, x))
    return over_one_read(CaseResult(case, results=results), calls, x, clock, repeat_ms)


def checked(case: TokenCase, peer: Peer, x: Any) -> tuple[Result, Call]:
    """The result of a way without times, and its call."""
    call = partial(peer.prepare(case), x)
    seeds = peer.seeds(case) if isinstance(peer, OursTokens) else None
    return judged(case, peer, call, *wrong(case, x, call(), seeds))
