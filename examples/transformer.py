"""Train a small causal transformer on the letters of Python's documentation, with our softmax and with PyTorch's.

Run `python examples/transformer.py`.  It needs onlinesoftmax with the extra torch.  `--help` lists the options.

Both trainings start from the same weights and see the same batches.  The two loss curves therefore show the effect of
the softmax implementation on a training, which is only rounding.  On a CPU, the curves are equal, because onlinesoftmax
calls PyTorch's own operations there.  On a GPU, onlinesoftmax runs its kernels.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from torch import Tensor, nn

import onlinesoftmax as osm


class Library(NamedTuple):
    """The two softmax functions that a transformer uses."""

    name: str
    attention: Callable[[Tensor, float], Tensor]
    """Map scores (batch, heads, queries, keys) and their scale to probabilities of the same shape."""
    log_probabilities: Callable[[Tensor], Tensor]
    """Map logits (batch, context, letters) to log-probabilities of the same shape."""


def our_attention(scores: Tensor, scale: float) -> Tensor:
    """Apply scale, causal mask and softmax in one pass over the scores."""
    return osm.softmax(scores, scale=scale, causal=True)


def torch_attention(scores: Tensor, scale: float) -> Tensor:
    """Apply the same formula as separate PyTorch operations."""
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return torch.softmax((scores * scale).masked_fill(later, -torch.inf), dim=-1)


def torch_log_softmax(logits: Tensor) -> Tensor:
    """Apply PyTorch's log_softmax along the last dimension."""
    return torch.log_softmax(logits, dim=-1)


OURS = Library("onlinesoftmax", our_attention, osm.log_softmax)
TORCH = Library("PyTorch", torch_attention, torch_log_softmax)


class Config(NamedTuple):
    """Sizes of the model and of its batches."""

    layers: int = 2
    heads: int = 4
    width: int = 64
    context: int = 64
    batch: int = 32


class Attention(nn.Module):
    """Causal self-attention, with explicit scores and softmax."""

    def __init__(self, config: Config, library: Library) -> None:
        super().__init__()
        self.heads, self.library = config.heads, library
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """X and the result are (batch, context, width)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1)
        probabilities = self.library.attention(scores, q.shape[-1] ** -0.5)
        return self.out((probabilities @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One transformer block: attention, then a network of one hidden layer at each position."""

    def __init__(self, config: Config, library: Library) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention = Attention(config, library)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """X and the result are (batch, context, width)."""
        x = x + self.attention(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))


class Transformer(nn.Module):
    """A causal transformer whose forward pass returns the loss of predicting the next letters."""

    def __init__(self, letters: int, config: Config, library: Library) -> None:
        super().__init__()
        self.library = library
        self.letter, self.place = nn.Embedding(letters, config.width), nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(Block(config, library) for _ in range(config.layers)))
        self.norm, self.head = nn.LayerNorm(config.width), nn.Linear(config.width, letters)

    def forward(self, read: Tensor, following: Tensor) -> Tensor:
        """Return the mean negative log-likelihood of `following` given `read`, in nats.

        Args:
            read: Indices of the input letters (batch, context).
            following: Indices of the letters that follow each of them (batch, context).
        """
        x = self.letter(read) + self.place.weight[: read.shape[1]]
        log_p = self.library.log_probabilities(self.head(self.norm(self.blocks(x))))
        return -log_p.gather(-1, following.unsqueeze(-1)).mean()


@lru_cache
def corpus() -> tuple[Tensor, int]:
    """Load the help topics of Python's documentation as letter indices, and the number of distinct letters."""
    text = "\n".join(topics[name] for name in sorted(topics))
    index = {letter: i for i, letter in enumerate(sorted(set(text)))}
    return torch.tensor([index[letter] for letter in text]), len(index)


def batches(config: Config, steps: int, seed: int, device: str) -> tuple[Tensor, Tensor]:
    """Draw the inputs and the letters that follow them, each (steps, batch, context)."""
    data, _ = corpus()
    starts = torch.randint(
        len(data) - config.context, (steps, config.batch, 1), generator=torch.Generator().manual_seed(seed)
    )
    windows = data[starts + torch.arange(config.context + 1)].to(device)
    return windows[..., :-1], windows[..., 1:]


def make_model(library: Library, config: Config, seed: int, device: str) -> Transformer:
    """Make a model.  Its weights depend only on the seed, because they are drawn on the CPU."""
    torch.manual_seed(seed)
    return Transformer(corpus()[1], config, library).to(device)


def train(
    library: Library, config: Config, steps: int, *, seed: int = 0, device: str = "cpu", compiler: str | None = None
) -> Tensor:
    """Train a model and return the loss before each step, in nats: (steps,), float32, on the CPU.

    Args:
        library: The softmax functions to use.
        config: Sizes of the model and of its batches.
        steps: Number of optimizer steps.
        seed: Seed of the weights and of the batches.
        device: "cpu" or "cuda".
        compiler: A backend of torch.compile, such as "inductor"; None to run eagerly.
    """
    model = make_model(library, config, seed, device)
    loss_of = model if compiler is None else torch.compile(model, backend=compiler, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for read, following in zip(*batches(config, steps, seed, device), strict=True):
        loss = loss_of(read, following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # No .item() here: it would make the host wait for a GPU at every step.
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, train, and print the loss curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="number of training steps (default: 200)")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu or cuda (default: cuda if there is a GPU)",
    )
    parser.add_argument("--compile", action="store_true", help="compile the model with torch.compile(fullgraph=True)")
    parser.add_argument(
        "--library", choices=("ours", "torch", "both"), default="both", help="softmax to train with (default: both)"
    )
    chosen = parser.parse_args(arguments)
    if chosen.steps < 1:
        parser.error("--steps must be at least 1")

    curves: dict[str, Tensor] = {}
    data, letters = corpus()
    print(f"{len(data)} letters of Python's help topics, {letters} distinct; {Config()}, on {chosen.device}")
    for library in {"ours": [OURS], "torch": [TORCH], "both": [OURS, TORCH]}[chosen.library]:
        began = time.perf_counter()
        compiler = "inductor" if chosen.compile else None
        curves[library.name] = train(library, Config(), chosen.steps, device=chosen.device, compiler=compiler)
        print(f"{library.name}: {chosen.steps} steps in {time.perf_counter() - began:.1f} s")
    print_curves(curves)
    return 0


def print_curves(curves: dict[str, Tensor]) -> None:
    """Print every 20th loss and the last one.  For two curves, print also their largest difference."""
    print(f"\n{'step':>6}" + "".join(f"{name:>16}" for name in curves) + ("difference".rjust(16) * (len(curves) == 2)))
    losses = torch.stack(list(curves.values()))
    apart = losses.amax(0) - losses.amin(0)
    last = losses.shape[1] - 1
    for step in sorted({*range(0, last, 20), last}):
        line = "".join(f"{loss:>16.6f}" for loss in losses[:, step].tolist())
        print(f"{step + 1:>6}{line}" + (f"{apart[step]:>16.1e}" if len(curves) == 2 else ""))
    if len(curves) == 2:
        print(
            f"\nThe largest difference between the two curves is {apart.max():.1e}, at step {int(apart.argmax()) + 1}."
        )


if __name__ == "__main__":
    sys.exit(main())
