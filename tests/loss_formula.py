"""The losses and log-probabilities of rows and their gradients in NumPy's float64, written out from the papers.

Nothing here comes from the package or from a framework, so that an error of one formula is not in both.

    p = softmax(z)                  z = softcap * tanh(scale * x / softcap), and -inf where the mask is False
    loss of a row = -sum(q * log(p)) + z_loss * lse²                            Chowdhery et al., arXiv:2204.02311
    q = weight[t] * (1 - smoothing) at the target t, and weight[c] * smoothing / classes at each class c, or
        weight[c] * ((1 - smoothing) * target[c] + smoothing / classes)         Szegedy et al., arXiv:1512.00567
    mean = sum(-sum(q * log(p))) / sum(weight[t]) + z_loss * sum(lse²) / rows, each over the rows that count

With class probabilities, the mean divides both sums by the number of rows, as PyTorch does.
"""

from __future__ import annotations

import itertools
import random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pairs import with_every_pair

Array = NDArray[Any]


class Expected(NamedTuple):
    """A loss, its gradient, and the statistics of each row."""

    loss: Array
    gradient: Array
    lse: Array
    z_loss: Array
    entropy: Array


class _Scores(NamedTuple):
    """Numbers of scores along the last axis; `slope` is the derivative of a score with respect to its logit."""

    slope: Array
    p: Array
    log_p: Array
    lse: Array
    entropy: Array
    kept: Array


def _scores(x: Array, scale: Any, softcap: float | None, mask: Any) -> _Scores:
    z, slope = scale * x, np.full_like(x, scale)
    if softcap is not None:
        bounded = np.tanh(z / softcap)
        z, slope = softcap * bounded, slope * (1 - bounded**2)
    kept = np.broadcast_to(np.array(True) if mask is None else mask, x.shape)
    z, slope = np.where(kept, z, -np.inf), np.where(kept, slope, 0.0)
    m = z.max(-1, keepdims=True)
    lse = m + np.log(np.exp(z - m).sum(-1, keepdims=True))
    log_p = z - lse
    p = np.exp(log_p)
    entropy = -(p * np.where(p > 0, log_p, 0.0)).sum(-1)
    return _Scores(slope, p, log_p, lse[..., 0], entropy, kept)


def expected_loss(
    x: Array, target: Array, dy: Any = 1.0, *, weight: Any = None, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0, z_loss: float = 0.0, scale: Any = 1.0, softcap: float | None = None,
    mask: Any = None,
) -> Expected:  # fmt: skip
    """A cross-entropy of float64 logits; dy is the incoming gradient of the loss.

    Classes are the second dimension, or the only one.  The mask has the shape of x, and a scale that is an array has
    as many dimensions as x and size 1 along the classes.
    """
    dim = 1 if x.ndim > 1 else 0
    last = lambda a: np.moveaxis(np.asarray(a), dim, -1)  # noqa: E731  one line in two places
    scale = last(scale) if np.ndim(scale) else scale
    s = _scores(last(x), scale, softcap, None if mask is None else last(mask))
    cols, w = x.shape[dim], np.ones(x.shape[dim]) if weight is None else np.asarray(weight, np.float64)
    spread = label_smoothing * np.where(s.kept, 1 / s.kept.sum(-1, keepdims=True), 0.0)
    if target.dtype.kind == "f":
        q, counts = w * ((1 - label_smoothing) * last(target) + spread), np.ones(s.lse.shape, bool)
        divisor = counts.sum()
    else:
        counts = target != ignore_index
        own = np.where(counts, w[np.where(counts, target, 0)], 0.0)
        q = (1 - label_smoothing) * own[..., None] * (np.arange(cols) == target[..., None]) + w * spread
        divisor = own.sum()
    q = np.where(counts[..., None], q, 0.0)
    nll, penalty = -(q * np.where(q == 0, 0.0, s.log_p)).sum(-1), np.where(counts, z_loss * s.lse**2, 0.0)
    of_nll, of_penalty, loss = 1.0, 1.0, nll + penalty
    if reduction == "sum":
        loss = loss.sum()
    elif reduction == "mean":
        of_nll, of_penalty = 1 / divisor, 1 / counts.sum()
        loss = nll.sum() * of_nll + penalty.sum() * of_penalty
    factor = of_nll * q.sum(-1) + of_penalty * np.where(counts, 2 * z_loss * s.lse, 0.0)
    dz = factor[..., None] * s.p - of_nll * q
    dx = np.asarray(dy)[..., None] * dz * s.slope
    return Expected(np.asarray(loss), np.moveaxis(dx, -1, dim), s.lse, penalty, s.entropy)


class ExpectedTokens(NamedTuple):
    """Log-probabilities of tokens, the statistics of each row, and the gradient."""

    logprob: Array
    entropy: Array
    lse: Array
    gradient: Array


def expected_tokens(
    x: Array, index: Array, dim: int, dys: list[Array], *, ignore_index: int | None = None, scale: Any = 1.0,
    softcap: float | None = None, mask: Any = None,
) -> ExpectedTokens:  # fmt: skip
    """Results for several tokens of each row, which lie along `dim`; dys are the gradients of the first three results.

    The logprob is NaN where the index is out of range.  With H the entropy, dH/dz = -p * (log(p) + H).
    """
    last = lambda a: np.moveaxis(np.asarray(a), dim, -1)  # noqa: E731  one line in several places
    scale = last(scale) if np.ndim(scale) else scale
    s, tokens, cols = _scores(last(x), scale, softcap, None if mask is None else last(mask)), last(index), x.shape[dim]
    inside = (tokens >= 0) & (tokens < cols)
    logprob = np.where(inside, np.take_along_axis(s.log_p, np.where(inside, tokens, 0), -1), np.nan)
    dy, dentropy, dlse = last(dys[0]), dys[1], dys[2]
    if ignore_index is not None:
        logprob = np.where(tokens == ignore_index, 0.0, logprob)
        dy = np.where(tokens == ignore_index, 0.0, dy)
    dy = np.where(inside, dy, 0.0)
    hits = (tokens[..., None] == np.arange(cols)) * dy[..., None]
    of_entropy = np.where(s.p > 0, s.log_p, 0.0) + s.entropy[..., None]
    dz = hits.sum(-2) + s.p * (dlse - dy.sum(-1))[..., None] - dentropy[..., None] * s.p * of_entropy
    back = lambda a: np.moveaxis(a, -1, dim)  # noqa: E731  one line in two places
    return ExpectedTokens(back(logprob), s.entropy, s.lse, back(dz * s.slope))


def pairs(choices: dict[str, tuple[Any, ...]], seed: int) -> list[dict[str, Any]]:
    """Combinations in which every pair of values of two options occurs with every reduction."""
    every = list(itertools.product(*(range(len(values)) for values in choices.values())))
    # Each three values occur many times in a sample of this size.
    some = random.Random(seed).sample(every, min(1000, len(every)))
    reduction = list(choices).index("reduction")
    chosen = with_every_pair(some, lambda one: [(*option, one[reduction]) for option in enumerate(one)])
    return [{name: values[i] for (name, values), i in zip(choices.items(), one, strict=True)} for one in chosen]
