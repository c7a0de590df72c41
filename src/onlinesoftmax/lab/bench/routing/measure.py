"""The measurement of routing: what a way may return, and one read of the logits, beside which it is timed.

Experts have the largest scores; weights and a gradient are those of float64.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from .... import load_balancing_loss, route, router_z_loss
from ....routing import rules
from ....routing.eager import choose
from ..measure import Begun, beside_one_read, judged
from ..peers import Peer
from ..result import Result
from ..timing import Call
from .cases import RouteCase
from .peers import Gate, incoming

LONG = 8192
"""Columns of the rows that the one read has: rows of a few experts are not read at the speed of the memory."""

SPREAD = 2.0
"""Standard deviation of the logits."""


def make_logits(case: RouteCase, device: Any) -> tuple[Any, Any]:
    """Normal logits, and a bias where the gate has groups."""
    where: dict[str, Any] = {"device": device, "generator": torch.Generator(device).manual_seed(case.elements)}
    x = (torch.randn(case.shape, **where) * SPREAD).to(getattr(torch, case.dtype))
    bias = torch.randn(case.shape[1], **where) * 0.1 if "groups" in case.arguments else None
    return x.requires_grad_(case.with_gradient), bias


def begin(case: RouteCase, device: Any) -> Begun:
    """Make the tensors of a case, for `Kind`."""
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


ROUNDINGS = 32
"""Float32 roundings that a weight or a gradient may be off by, relative to the largest number of its token.

The numbers of a gradient are sums of terms, which may cancel, so its largest term counts too.
"""

NEAR = 1e-6
"""Distance of two scores that other libraries may take for each other."""


def wrong(
    case: RouteCase, x: Any, bias: Any, found: Any, exact: bool, slack: float = 0.0, given: Any = None
) -> tuple[str | None, float]:
    """The fault of a result in a sentence, None without one, and the largest error of a weight or a gradient.

    Args:
        case: The case.
        x, bias: Logits and bias.
        found: (weights or gradient, experts, counts, …).
        exact: True for a way whose experts have to be those of our formulas.
        slack: Relative error that its scores and weights may have beyond float32 roundings.
        given: Incoming gradient of its weights, (tokens, k); None for that of `incoming`.
    """
    numbers, experts, counts = found[0].detach(), found[1].long(), found[2]
    rows, k = x.detach(), case.arguments["k"]
    in_order = experts.sort(1).values
    if bool(((in_order[:, 1:] == in_order[:, :-1]).any(1) | (in_order[:, 0] < 0)).any()):
        return "experts of a token are equal, or are none", torch.inf
    if reason := _wrong_choice(case, rows, bias, experts, exact, slack):
        return reason, torch.inf
    if not torch.equal(counts.long(), experts.flatten().bincount(minlength=case.shape[1])):
        return "counts are others", torch.inf
    want, size = _in_float64(case, rows, bias, experts, given)
    error = float(((numbers.double() - want).abs() / size.clamp(min=1e-30)).max())
    # A gradient is rounded to the dtype of the logits.
    eps = torch.finfo(rows.dtype if case.with_gradient else torch.float32).eps
    allowed = ROUNDINGS * torch.finfo(torch.float32).eps + max(eps, slack)
    what = "gradient" if case.with_gradient else f"{k} weights"
    return (f"{what}: error {error:.1e}, allowed {allowed:.1e}" if not error <= allowed else None), error


def _wrong_choice(case: RouteCase, x: Any, bias: Any, experts: Any, exact: bool, slack: float) -> str | None:
    given = case.arguments
    groups = given.get("groups"), given.get("group_k"), "top2_sum"
    others = given.get("score", "softmax"), given.get("order", "score_first"), groups, True, 1.0
    rule = rules.checked_rule("route()", case.shape[1], given["k"], *others)
    want = choose(rules.Call(x, bias, None, None, rule, 1, len(x), False, False)).long()
    if exact:
        return None if torch.equal(experts, want) else "the experts are not those of our formulas"
    if bias is not None:
        # The two best scores of different groups are near to one another in some rows of a large case.
        off = (experts.sort(1).values != want.sort(1).values).any(1)
        return None if float(off.float().mean()) < 1e-2 else "experts of other groups are chosen"
    least, own = (x.float().softmax(-1).gather(1, each).amin(1) for each in (want, experts))
    return "experts with smaller scores are chosen" if bool((own < least * (1 - slack) - NEAR).any()) else None


def _in_float64(case: RouteCase, x: Any, bias: Any, experts: Any, given: Any) -> tuple[Any, Any]:
    """The weights of the experts, or the gradient; and the largest number of each token, or term of one."""
    z = x.double().requires_grad_()
    found = route(z, bias=bias, indices=experts, prob_sums=True, **case.arguments)
    weights = found.weights.detach()
    if not case.with_gradient:
        return weights, weights.abs().amax(1, keepdim=True)
    outputs = [found.weights, load_balancing_loss(found), router_z_loss(found)]
    of_weights, *of_losses = incoming(found.weights)
    of_weights = of_weights if given is None else given.double()
    (gradient,) = torch.autograd.grad(outputs, z, [of_weights, *of_losses])
    terms = weights * of_weights
    return gradient, torch.cat([gradient, terms], 1).abs().amax(1, keepdim=True)
