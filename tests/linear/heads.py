"""Heads of small sizes, and the same formulas on all logits in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

import onlinesoftmax as osm

Tensor = torch.Tensor

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
TOKENS, HIDDEN, CLASSES = (3, 5), 7, 40

MEMORY = {"stored": None, "tokens": 8 * 40 * 8, "columns": 15 * (4 + 7) * 8 + 60}
"""Bytes with which small problems take each plan."""


def head(dtype: torch.dtype = torch.float64, bias: bool = True, seed: int = 0) -> tuple[Tensor, ...]:
    """(input, weight, bias, target); one target is ignored."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (*TOKENS, HIDDEN), (CLASSES, HIDDEN), (CLASSES,)
    x, w, b = (torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_() for shape in shapes)
    target = torch.randint(0, CLASSES, TOKENS, generator=generator).to(DEVICE)
    target[1, 2] = -100
    return x, w, b if bias else None, target  # type: ignore[return-value]


def logits_of(x: Tensor, w: Tensor, b: Tensor | None, scale: Any = 1.0, softcap: float | None = None) -> Tensor:
    z = functional.linear(x, w, b) * (
        scale if not isinstance(scale, Tensor) or not scale.dim() else scale.unsqueeze(-1)
    )
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def expected(
    x: Tensor, w: Tensor, b: Tensor | None, target: Tensor, *, reduction: str = "mean", z_loss: float = 0.0,
    token_weight: Tensor | None = None, scale: Any = 1.0, softcap: float | None = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """The loss on all logits."""
    z, soft = logits_of(x, w, b, scale, softcap), target.is_floating_point()
    y = functional.cross_entropy(
        z.movedim(-1, 1), target.movedim(-1, 1) if soft else target, reduction="none", **kwargs
    )
    counts = torch.ones_like(y) if soft else (target != -100).to(y.dtype)
    y = y + z_loss * z.logsumexp(-1) ** 2 * counts
    weights = kwargs.get("weight")
    divisor = counts.sum() if weights is None or soft else (weights[target.clamp(min=0)] * counts).sum()
    y = y if token_weight is None else y * token_weight
    return {"none": y, "sum": y.sum(), "mean": y.sum() / divisor}[reduction]


def same_with_gradients(ours: Tensor, theirs: Tensor, inputs: Any) -> None:
    """The results and the gradients in `inputs` agree to the last digits of float64."""
    torch.testing.assert_close(ours, theirs)
    dy = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1)).to(theirs)
    found = (torch.autograd.grad(y, inputs, dy, retain_graph=True) for y in (ours, theirs))
    torch.testing.assert_close(*found)


def clipped(logprob: Tensor, entropy: Tensor, lse: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    """PPO's loss of a token, with an entropy bonus and a penalty of lse."""
    ratio = (logprob - old).exp()
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) - 0.01 * entropy + 1e-3 * lse * lse


CALLS: dict[str, Any] = {
    "mean": lambda x, w, b, target, **given: osm.linear_cross_entropy(x, w, target, linear_bias=b, **given),
    "none": lambda x, w, b, target, **given: osm.linear_cross_entropy(
        x, w, target, linear_bias=b, reduction="none", **given
    ).sum(),
    "smoothed": lambda x, w, b, target, **given: osm.linear_cross_entropy(
        x, w, target, linear_bias=b, reduction="none", label_smoothing=0.1, **given
    ).sum(),
    "logprobs": lambda x, w, b, target, **given: sum(
        t.sin().sum() for t in osm.linear_token_logprobs(x, w, target, linear_bias=b, ignore_index=-100, **given)
    ),
    "loss": lambda x, w, b, target, **given: osm.linear_token_loss(
        x, w, target, lambda p, h, lse: lse * h - p.exp(), linear_bias=b, **given
    ),
}
"""A number that needs all gradients, from each function and each way to its gradient."""

PLANS_OF = {
    "mean": ("stored", "tokens", "columns"),
    "none": ("stored", "columns"),
    "smoothed": ("stored", "tokens"),
    "logprobs": ("stored", "columns"),
    "loss": ("stored", "tokens", "columns"),
}
PROBLEM_OF: dict[str, tuple[str, bool, bool]] = {
    "mean": ("linear_cross_entropy", False, False),
    "none": ("linear_cross_entropy", True, False),
    "smoothed": ("linear_cross_entropy", True, True),
    "logprobs": ("linear_token_logprobs", False, False),
    "loss": ("linear_token_loss", False, False),
}
"""Arguments of `problem_of`: function, each and whole_rows."""

each_call_and_plan = pytest.mark.parametrize(
    ("call", "plan"), [(call, plan) for call, names in PLANS_OF.items() for plan in names]
)
