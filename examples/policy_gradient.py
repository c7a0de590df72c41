"""Train a policy by PPO without its logits: a clipped ratio of log-probabilities, an entropy bonus, both gradients.

Run `python examples/policy_gradient.py`.  It needs onlinesoftmax with the extra torch, and takes seconds on a CPU.
`--help` lists the options.

The policy has a hidden state for each prompt and a head with a row for each token of a vocabulary.  Each prompt has one
right token, which gives the reward 1.  A batch of tokens is sampled once and used for several steps, so the ratio of
the new and the old probability matters.  The same policy is trained three times, from the same weights:

- PyTorch: logits, and PyTorch's operations, which write the log-probabilities of the whole vocabulary.
- token_logprobs(): logits, and one call for the log-probability of each token and the entropy of its row.
- linear_token_loss(): hidden states and the head.  The objective is evaluated for each chunk of rows, and the logits of
  all rows never exist at a time.

The script prints the time and the peak memory of a gradient in each way, on a GPU with a larger vocabulary, and checks
that gradients and curves are those of PyTorch's operations.

The objective is that of Schulman et al., Proximal Policy Optimization Algorithms, 2017, arXiv:1707.06347, equation 7,
with the entropy bonus of equation 9.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import onlinesoftmax as osm


class Settings(NamedTuple):
    """Sizes of the task and of the training."""

    prompts: int = 16
    width: int = 32
    """Numbers of a hidden state."""
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
    rate: float = 0.02


LARGE = Settings(width=1024, vocabulary=65536, samples=256)
"""Sizes for the time and the memory on a GPU: logits of 1.1 GB in float32."""

MEMORY = 256 << 20
"""Most bytes of the logits that linear_token_loss holds at a time."""

REPEATS = 5
"""Gradients of which the median time is printed."""


class Policy(NamedTuple):
    """The weights: a hidden state for each prompt, (prompts, width), and the head, (vocabulary, width)."""

    states: Tensor
    head: Tensor


class Batch(NamedTuple):
    """Sampled tokens: for each row its prompt, its token, the old log-probability of the token, and the advantage."""

    prompts: Tensor
    tokens: Tensor
    old: Tensor
    advantage: Tensor


LossOf = Callable[[Policy, Batch, Settings], Tensor]
"""Maps a policy, a batch and the settings to the mean objective, to be minimised."""


def objective(logprob: Tensor, entropy: Tensor, old: Tensor, advantage: Tensor, settings: Settings) -> Tensor:
    """The clipped objective of each row with the entropy bonus, to be minimised.

    Args:
        logprob: Log-probability of the sampled token, (rows).
        entropy: Entropy of the row, (rows).
        old: Log-probability of the token when it was sampled, (rows).
        advantage: Reward less the mean reward of the prompt, (rows).
        settings: The clip and the bonus.
    """
    ratio = (logprob - old).exp()
    clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
    return -torch.minimum(ratio * advantage, clipped * advantage) - settings.bonus * entropy


def by_pytorch(policy: Policy, batch: Batch, settings: Settings) -> Tensor:
    """The objective by PyTorch's operations."""
    log_p = (policy.states[batch.prompts] @ policy.head.T).log_softmax(-1)
    logprob, entropy = log_p.gather(-1, batch.tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    return objective(logprob, entropy, batch.old, batch.advantage, settings).mean()


def on_logits(policy: Policy, batch: Batch, settings: Settings) -> Tensor:
    """The objective from one read of the logits."""
    found = osm.token_logprobs(policy.states[batch.prompts] @ policy.head.T, batch.tokens)
    return objective(found.logprob, found.entropy, batch.old, batch.advantage, settings).mean()


def without_logits(policy: Policy, batch: Batch, settings: Settings) -> Tensor:
    """The objective from the hidden states and the head."""

    def loss(logprob: Tensor, entropy: Tensor, lse: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
        return objective(logprob, entropy, old, advantage, settings)

    states = policy.states[batch.prompts]
    return osm.linear_token_loss(states, policy.head, batch.tokens, loss, batch.old, batch.advantage, memory=MEMORY)


WAYS: dict[str, LossOf] = {
    "PyTorch": by_pytorch,
    "token_logprobs()": on_logits,
    "linear_token_loss()": without_logits,
}


def initial(settings: Settings, device: str) -> Policy:
    """A policy with random states, whose head gives every token the same probability."""
    torch.manual_seed(0)
    states = torch.randn(settings.prompts, settings.width, device=device)
    head = torch.zeros(settings.vocabulary, settings.width, device=device)
    return Policy(states.requires_grad_(), head.requires_grad_())


def sampled(policy: Policy, right: Tensor, settings: Settings) -> Batch:
    """A batch of tokens from the policy."""
    prompts = torch.arange(settings.prompts, device=right.device).repeat_interleave(settings.samples)
    with torch.no_grad():
        logits = policy.states @ policy.head.T
        tokens = torch.multinomial(osm.softmax(logits, dim=-1), settings.samples, replacement=True).flatten()
        old = osm.linear_token_logprobs(policy.states[prompts], policy.head, tokens).logprob
    reward = (tokens == right[prompts]).float().view(settings.prompts, -1)
    return Batch(prompts, tokens, old, (reward - reward.mean(1, keepdim=True)).flatten())


def train(loss_of: LossOf, settings: Settings, device: str = "cpu", seed: int = 0) -> list[float]:
    """Train a policy; the mean probability of the right token before each batch and at the end."""
    policy = initial(settings, device)
    torch.manual_seed(seed)
    right = torch.randint(settings.vocabulary, (settings.prompts,), device=device)
    optimizer = torch.optim.Adam(policy, lr=settings.rate)
    curve = []
    for _ in range(settings.batches):
        curve.append(mean_probability(policy, right))
        batch = sampled(policy, right, settings)
        for _ in range(settings.steps):
            optimizer.zero_grad()
            loss_of(policy, batch, settings).backward()
            optimizer.step()
    return [*curve, mean_probability(policy, right)]


def mean_probability(policy: Policy, right: Tensor) -> float:
    """The mean probability of the right tokens."""
    with torch.no_grad():
        return osm.linear_token_logprobs(policy.states, policy.head, right).logprob.exp().mean().item()


def random_batch(settings: Settings, device: str) -> tuple[Policy, Batch]:
    """A policy with a random head, and a batch that it did not sample."""
    policy = initial(settings, device)
    torch.manual_seed(1)
    rows = settings.prompts * settings.samples
    with torch.no_grad():
        policy.head.normal_(std=settings.width**-0.5)
    prompts = torch.arange(settings.prompts, device=device).repeat_interleave(settings.samples)
    tokens = torch.randint(settings.vocabulary, (rows,), device=device)
    old, advantage = torch.randn(2, rows, device=device)
    return policy, Batch(prompts, tokens, old - 4, advantage)


def gradient_difference(loss_of: LossOf, settings: Settings, device: str = "cpu") -> float:
    """Largest difference of a gradient from that of PyTorch's operations, relative to the largest entry."""
    policy, batch = random_batch(settings, device)
    ours, theirs = (torch.autograd.grad(way(policy, batch, settings), policy) for way in (loss_of, by_pytorch))
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, theirs, strict=True))


def measured(loss_of: LossOf, settings: Settings, device: str) -> tuple[float, int | None]:
    """Median time of the gradient of a batch in seconds, and the memory that it takes; None on a CPU."""
    policy, batch = random_batch(settings, device)
    on_gpu, seconds, peak = device.startswith("cuda"), [], 0
    for _ in range(REPEATS + 1):
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated() if on_gpu else 0
        begin = time.perf_counter()
        torch.autograd.grad(loss_of(policy, batch, settings), policy)
        if on_gpu:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - held
        seconds.append(time.perf_counter() - begin)
    # The first call compiles.
    return statistics.median(seconds[1:]), peak if on_gpu else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Train in each way, print curve, time and memory, and check; the exit code is 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=Settings().batches, help="batches of sampled tokens")
    parser.add_argument("--vocabulary", type=int, default=Settings().vocabulary, help="tokens to choose from")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    settings = Settings(batches=options.batches, vocabulary=options.vocabulary)
    curves = {name: train(loss_of, settings, options.device) for name, loss_of in WAYS.items()}
    first, failed = next(iter(curves.values())), 0
    for batch in range(0, len(first), max(1, len(first) // 8)):
        print(f"after {batch:3} batches: the right token has probability {first[batch]:.3f}")
    large = LARGE if options.device.startswith("cuda") else settings
    print(f"\nGradients of {large.prompts * large.samples} rows, {large.width} numbers to {large.vocabulary} tokens:\n")
    print(f"{'way':<21}{'ms':>9}{'peak memory':>15}{'gradient off':>14}{'curve off':>11}")
    for name, loss_of in WAYS.items():
        seconds, peak = measured(loss_of, large, options.device)
        memory = "not measured" if peak is None else f"{peak / 1e6:.1f} MB"
        gradient = gradient_difference(loss_of, settings, options.device)
        off = max(abs(a - b) for a, b in zip(curves[name], first, strict=True))
        print(f"{name:<21}{1e3 * seconds:>9.2f}{memory:>15}{gradient:>14.1e}{off:>11.1e}")
        failed |= curves[name][-1] <= curves[name][0] or gradient > 1e-4 or off > 0.05
    print("\nThe distances are the largest from PyTorch's gradient, relative to its largest entry, and from its curve.")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
