"""Train a policy by PPO with `token_logprobs`: the ratio of log-probabilities, an entropy bonus, and both gradients.

Run `python examples/policy_gradient.py`.  It needs onlinesoftmax with the extra torch, and takes seconds on a CPU.
`--help` lists the options.

The policy is a table of logits: for each prompt, one row over a vocabulary.  Each prompt has one right token, which
gives the reward 1.  A batch of tokens is sampled once and used for several steps, so the ratio of the new and the old
probability matters.  One call gives the log-probability of each sampled token and the entropy of its row; on a GPU, one
kernel computes the gradient of both.  The script checks the first gradient against PyTorch's operations.

The objective is that of Schulman et al., Proximal Policy Optimization Algorithms, 2017, arXiv:1707.06347, equation 7,
with the entropy bonus of equation 9.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import onlinesoftmax as osm


class Settings(NamedTuple):
    """Sizes of the task and of the training."""

    prompts: int = 16
    vocabulary: int = 64
    samples: int = 32
    """Tokens that are sampled for each prompt and batch."""
    batches: int = 30
    steps: int = 4
    """Steps of the optimizer on one batch."""
    clip: float = 0.2
    """Largest distance of the ratio from 1 that still has a gradient."""
    bonus: float = 0.003
    """Weight of the entropy."""
    rate: float = 0.1


Scores = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps logits (rows, vocabulary) and tokens (rows) to the log-probabilities of the tokens and the entropies (rows)."""


def ours(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies from one read of the logits."""
    found = osm.token_logprobs(logits, tokens)
    return found.logprob, found.entropy


def by_pytorch(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The same by PyTorch's operations, which write the log-probabilities of the whole vocabulary."""
    log_p = logits.log_softmax(-1)
    return log_p.gather(-1, tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def loss_of(
    scores: Scores, logits: Tensor, tokens: Tensor, old: Tensor, advantage: Tensor, settings: Settings
) -> Tensor:
    """The clipped objective with the entropy bonus, to be minimised.

    Args:
        scores: `ours` or `by_pytorch`.
        logits: Logits of the policy, (rows, vocabulary).
        tokens: Sampled tokens, (rows).
        old: Log-probabilities of the tokens when they were sampled, (rows).
        advantage: Rewards less their mean for each prompt, (rows).
        settings: The clip and the bonus.
    """
    logprob, entropy = scores(logits, tokens)
    ratio = (logprob - old).exp()
    clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
    return -torch.minimum(ratio * advantage, clipped * advantage).mean() - settings.bonus * entropy.mean()


def sampled(policy: Tensor, right: Tensor, settings: Settings) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A batch: the prompt of each row, its token, the log-probability of the token, and the advantage."""
    prompts = torch.arange(settings.prompts, device=policy.device).repeat_interleave(settings.samples)
    with torch.no_grad():
        logits = policy[prompts]
        tokens = torch.multinomial(osm.softmax(logits, dim=-1), 1)[:, 0]
        old = osm.token_logprobs(logits, tokens).logprob
    reward = (tokens == right[prompts]).float().view(settings.prompts, -1)
    return prompts, tokens, old, (reward - reward.mean(1, keepdim=True)).flatten()


def train(scores: Scores, settings: Settings, device: str = "cpu", seed: int = 0) -> list[float]:
    """Train a policy; the mean probability of the right token before each batch and at the end."""
    torch.manual_seed(seed)
    policy = torch.zeros(settings.prompts, settings.vocabulary, device=device, requires_grad=True)
    right = torch.randint(settings.vocabulary, (settings.prompts,), device=device)
    optimizer = torch.optim.Adam([policy], lr=settings.rate)
    curve = []
    for _ in range(settings.batches):
        curve.append(mean_probability(policy, right))
        prompts, tokens, old, advantage = sampled(policy, right, settings)
        for _ in range(settings.steps):
            optimizer.zero_grad()
            loss_of(scores, policy[prompts], tokens, old, advantage, settings).backward()
            optimizer.step()
    return [*curve, mean_probability(policy, right)]


def mean_probability(policy: Tensor, right: Tensor) -> float:
    """The mean probability of the right tokens."""
    with torch.no_grad():
        return osm.token_logprobs(policy, right).logprob.exp().mean().item()


def gradient_difference(settings: Settings, device: str = "cpu") -> float:
    """Largest difference between the gradients by `ours` and by PyTorch's operations, relative to the largest entry."""
    torch.manual_seed(1)
    rows = settings.prompts * settings.samples
    logits = torch.randn(rows, settings.vocabulary, device=device, requires_grad=True)
    tokens = torch.randint(settings.vocabulary, (rows,), device=device)
    old, advantage = torch.randn(2, rows, device=device)
    gradients = [
        torch.autograd.grad(loss_of(scores, logits, tokens, old - 4, advantage, settings), logits)[0]
        for scores in (ours, by_pytorch)
    ]
    return ((gradients[0] - gradients[1]).abs().max() / gradients[1].abs().max()).item()


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print the curve, and check the gradient; the exit code is 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=Settings().batches, help="batches of sampled tokens")
    parser.add_argument("--vocabulary", type=int, default=Settings().vocabulary, help="tokens to choose from")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    settings = Settings(batches=options.batches, vocabulary=options.vocabulary)
    curve = train(ours, settings, options.device)
    for batch in range(0, len(curve), max(1, len(curve) // 8)):
        print(f"after {batch:3} batches: the right token has probability {curve[batch]:.3f}")
    difference = gradient_difference(settings, options.device)
    print(f"Largest relative difference of the gradient from PyTorch's operations: {difference:.1e}")
    return int(curve[-1] <= curve[0] or difference > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
