"""The exact results of a head in float64: all of its outputs, and some rows of its gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..formulas import log_probabilities
from .cases import HeadCase

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
