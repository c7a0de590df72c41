"""The measurement of routing: every way is checked, then timed beside one read of the logits."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..inputs import lacks_copies
from ..measure import Begun, beside_one_read, judged
from ..peers import Peer
from ..result import Result
from ..timing import Call
from .cases import RouteCase
from .peers import Gate
from .reference import wrong

FLOAT64_COPIES = 10
"""Tensors of the shape of the logits, in float64 or int64, that the check holds at once."""

LONG = 8192
"""Columns of the rows that the one read has: rows of a few experts are not read at the speed of the memory."""

SPREAD = 2.0
"""Standard deviation of the logits."""

lacks_memory = partial(lacks_copies, FLOAT64_COPIES)


def make_logits(case: RouteCase, device: Any) -> tuple[Any, Any]:
    """Normal logits, and a bias where the gate has groups."""
    where: dict[str, Any] = {"device": device, "generator": torch.Generator(device).manual_seed(case.elements)}
    x = (torch.randn(case.shape, **where) * SPREAD).to(getattr(torch, case.dtype))
    bias = torch.randn(case.shape[1], **where) * 0.1 if "groups" in case.arguments else None
    return x.requires_grad_(case.with_gradient), bias


def begin(case: RouteCase, device: Any) -> Begun:
    """As `Kind.begin`."""
    inputs = make_logits(case, device)
    x = inputs[0].detach()
    long = x.view(-1, LONG) if x.numel() % LONG == 0 else x
    return beside_one_read(lambda peer: checked(case, peer, inputs), long)


def checked(case: RouteCase, peer: Peer, inputs: tuple[Any, Any]) -> tuple[Result, Call]:
    """The result of a way without times, and its call."""
    call = partial(peer.prepare(case), *inputs)
    assert isinstance(peer, Gate)
    found = peer.whole(case, call())
    slack, given = peer.rounding(case, inputs[0]), peer.incoming(case, inputs[0], found[1].long())
    return judged(case, peer, call, *wrong(case, *inputs, found, peer.ours, slack, given))
