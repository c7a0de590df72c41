"""The measurement of a head: every way is checked, then timed beside the bare products of the same run.

The exact results are those of float64: all outputs, and some rows of the gradients.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from ..cases import OTHERS_SLACK
from ..formulas import log_probabilities
from ..measure import Begun, judged, over
from ..peers import Peer
from ..result import Result
from ..timing import Call
from .cases import LOGPROBS, HeadCase
from .peers import TorchHead

SPREAD = 3.0
"""Standard deviation of the logits: a few classes have most of the probability."""


def make_head(case: HeadCase, device: Any) -> tuple[Any, ...]:
    """Input, weight and targets; and for log-probabilities the incoming gradients of both outputs."""
    tokens, hidden, classes = case.shape
    dtype, wide = getattr(torch, case.dtype), getattr(torch, case.accumulator)
    where: dict[str, Any] = {"device": device, "generator": torch.Generator(device).manual_seed(classes)}
    x = torch.randn(tokens, hidden, **where).to(dtype)
    weight = (torch.randn(classes, hidden, **where) * (SPREAD / hidden**0.5)).to(dtype)
    target = torch.randint(classes, (tokens,), **where)
    incoming = [torch.randn(tokens, dtype=wide, **where) for _ in range(2)] if case.operation == LOGPROBS else []
    return (x.requires_grad_(), weight.requires_grad_(), target, *incoming)


def bare_products(x: Any, weight: Any) -> tuple[Call, Call]:
    """(three products, four products) of a head, without anything between.

    The three are the logits, the gradient of the input and the gradient of the weight; the four make the logits twice.
    The classes are a multiple of 8, with which products are fast.
    """
    x, weight = x.detach(), weight.detach()
    weight = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % 8))
    z, dx, dw = x.new_empty(len(x), len(weight)), torch.empty_like(x), torch.empty_like(weight)

    def three() -> None:
        torch.mm(x, weight.t(), out=z)
        torch.mm(z, weight, out=dx)
        torch.mm(z.t(), x, out=dw)

    def four() -> None:
        torch.mm(x, weight.t(), out=z)
        three()

    return three, four


def begin(case: HeadCase, device: Any) -> Begun:
    """Make the tensors of a case, for `Kind`."""
    inputs = make_head(case, device)
    sample = sample_of(case, *inputs)
    allowed = errors(sample, TorchHead(device.type).prepare(case)(*inputs))

    def check(peer: Peer) -> tuple[Result, Call]:
        call = partial(peer.prepare(case), *peer.arguments(case, inputs))
        found = errors(sample, peer.whole(case, call()))
        reason = wrong(case, found, allowed, getattr(peer, "slack", OTHERS_SLACK))
        return judged(case, peer, call, reason, found[1], allowed[1])

    three, four = bare_products(*inputs[:2])
    yardsticks, rates = {"three_products": three, "four_products": four}, over("three_products", "of_products")
    return Begun(check, yardsticks, before=three, rates=rates)


def wrong(case: HeadCase, found: tuple[float, ...], allowed: tuple[float, ...], slack: float) -> str | None:
    """The sentence that says what is wrong: an error above `slack` times PyTorch's own and a rounding.

    The roundings of the elements of a gradient differ, so that their norm is about a quarter of the largest one.  A
    float32 logsumexp from 8 to 16 may be off by one unit, and with it the results of its row.
    """
    outputs = ("logprob", "entropy") if case.operation == LOGPROBS else ("loss",)
    eps = torch.finfo(getattr(torch, case.dtype)).eps
    of_lse = 8 * torch.finfo(getattr(torch, case.accumulator)).eps
    of_gradient, of_output = eps / 4 + of_lse, eps + of_lse
    names = {"gradient of input": of_gradient, "gradient of weight": of_gradient, **dict.fromkeys(outputs, of_output)}
    # The reference rounds as float64 does.
    slack = max(slack, OTHERS_SLACK) if case.dtype == "float64" else slack
    for (name, rounding), error, own in zip(names.items(), found, allowed, strict=True):
        if not error <= slack * (own + rounding):
            return f"{name}: error {error:.1e}; the framework's own {own:.1e}"
    return None


ROWS = 256
"""Rows of each gradient that are compared."""

PIECE = 1 << 25
"""Logits that are computed at once: 256 MB in float64."""


class Sample(NamedTuple):
    """Exact results.

    Attributes:
        outputs: The loss; or the log-probability and the entropy of each token.
        tokens, classes: Numbers of the rows of the gradients of input and weight.
        input, weight: These rows.
    """

    outputs: tuple[Any, ...]
    tokens: Any
    classes: Any
    input: Any
    weight: Any


def sample_of(case: HeadCase, x: Any, weight: Any, target: Any, *incoming: Any) -> Sample:
    """The exact results for these tensors; without incoming gradients, of the mean of the losses."""
    x, weight, target = (t.detach() for t in (x, weight, target))
    wide, tokens = weight.double(), torch.randperm(len(x), device=x.device)[:ROWS]
    # Classes of some targets, whose gradients are large, and any others.
    classes = torch.cat([target[tokens[: ROWS // 2]], torch.randperm(len(weight), device=x.device)[: ROWS // 2]])
    classes, step = classes.unique(), max(1, PIECE // len(weight))
    # The loss is the mean of the negative logarithms.
    dys = tuple(t.double() for t in incoming) or (torch.full_like(target, -1 / len(x), dtype=torch.float64),)
    outputs, dx, dw = [], torch.empty_like(x, dtype=torch.float64), torch.zeros_like(wide[classes])
    for first in range(0, len(x), step):
        part = slice(first, first + step)
        rows = x[part].double()
        z = (rows @ wide.t()).requires_grad_()
        found = log_probabilities(z, target[part])
        (dz,) = torch.autograd.grad(found[: len(dys)], z, [dy[part] for dy in dys])
        outputs.append([y.detach() for y in found])
        dx[part] = dz @ wide
        dw += dz[:, classes].t() @ rows
    logprob, entropy = (torch.cat(parts) for parts in zip(*outputs, strict=True))
    return Sample((logprob, entropy) if incoming else (-logprob.mean(),), tokens, classes, dx[tokens], dw)


def errors(sample: Sample, found: tuple[Any, ...]) -> tuple[float, ...]:
    """Errors of (gradient of input, gradient of weight, *outputs).

    The error of a gradient is the norm of the difference over that of the exact rows; that of an output is the largest
    difference over the largest exact value.  NaN counts as infinite.
    """
    dx, dw, *outputs = found
    pairs = ((dx[sample.tokens], sample.input), (dw[sample.classes], sample.weight))
    relative = [float((mine.double() - exact).norm() / exact.norm()) for mine, exact in pairs]
    largest = [
        float((mine.double() - exact).abs().max() / exact.abs().max())
        for mine, exact in zip(outputs, sample.outputs, strict=True)
    ]
    return tuple(error if error == error else float("inf") for error in (*relative, *largest))
