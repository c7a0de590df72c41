"""The exact results of a head in float64: all of its outputs, and some rows of its gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

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
    import torch

    x, weight, target = (t.detach() for t in (x, weight, target))
    wide, tokens = weight.double(), torch.randperm(len(x), device=x.device)[:ROWS]
    # Classes of some targets, whose gradients are large, and any others.
    classes = torch.cat([target[tokens[: ROWS // 2]], torch.randperm(len(weight), device=x.device)[: ROWS // 2]])
    classes, step = classes.unique(), max(1, PIECE // len(weight))
    found = [_of_rows(x[i : i + step].double() @ wide.t(), target[i : i + step]) for i in range(0, len(x), step)]
    lse, logprob, entropy = (torch.cat(parts) for parts in zip(*found, strict=True))
    given = tuple(t.double() for t in incoming)
    dlogprob, dentropy = given or (torch.full_like(lse, -1 / len(x)), torch.zeros_like(lse))

    def gradient(z: Any, rows: Any, columns: Any) -> Any:
        """The gradient in logits of some rows and columns."""
        log_p = z - lse[rows, None]
        is_target = (target[rows, None] == columns).double()
        of_logprob = dlogprob[rows, None] * (is_target - log_p.exp())
        return of_logprob - dentropy[rows, None] * log_p.exp() * (log_p + entropy[rows, None])

    everything, every_class = torch.arange(len(x), device=x.device), torch.arange(len(weight), device=x.device)
    dw = gradient(x.double() @ wide[classes].t(), everything, classes).t() @ x.double()
    dx = torch.cat([
        gradient(x[part].double() @ wide.t(), part, every_class) @ wide for part in tokens.split(step)
    ])  # fmt: skip
    return Sample((logprob, entropy) if incoming else (-logprob.mean(),), tokens, classes, dx, dw)


def _of_rows(z: Any, target: Any) -> tuple[Any, Any, Any]:
    """(logsumexp, log-probability of the target, entropy) of each row."""
    return z.logsumexp(-1), *log_probabilities(z, target)


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
