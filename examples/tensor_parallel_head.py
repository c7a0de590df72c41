"""Train a language model whose head is sharded over processes, each with a part of the vocabulary.

    torchrun --nproc-per-node 2 examples/tensor_parallel_head.py

The script needs onlinesoftmax with the extras torch and cli.  It runs over gloo on CPUs, and over NCCL where every
process has a GPU.  The text comes with Python, and a token is a word, so nothing is downloaded.

Every process has the embedding and the hidden layer, and its own columns of the head.  Its logits are the columns of
the loss that `onlinesoftmax.distributed.cross_entropy` needs; no process ever holds a whole row of logits.  Process 0
also trains the same model in one piece.  The script prints both curves, and exits with 1 if they differ.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pydoc_data.topics import topics
from typing import Annotated, Any

import torch
import torch._dynamo  # the optimizers import it; see main()
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from typer import Exit, Option, run

from onlinesoftmax import distributed

CONTEXT, HIDDEN, BATCH = 8, 64, 64  # words before the predicted one, features, and examples of a step
TOLERANCE = 1e-4  # difference of two losses; the order of additions differs


class Copied(torch.autograd.Function):
    """Every process uses the same features; backward adds the gradients that they get from all shards of the head."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> Tensor:
        total = dh.contiguous()
        dist.all_reduce(total)
        return total


class Model(nn.Module):
    """An embedding, a hidden layer, and the columns [first, end) of a head, the same on every process at first."""

    def __init__(self, words: int, first: int, end: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shards = distributed.Shards(first, end - first, words)
        self.embedding = nn.Embedding(words, HIDDEN)
        self.hidden = nn.Linear(CONTEXT * HIDDEN, HIDDEN)
        self.head = nn.Parameter(nn.Linear(HIDDEN, words, bias=False).weight[first:end].detach().clone())

    def features(self, context: Tensor) -> Tensor:
        """The features of every example."""
        h: Tensor = torch.tanh(self.hidden(self.embedding(context).flatten(1)))
        return h


def text(words: int) -> Tensor:
    """Python's documentation as numbers: the most frequent words, and one number for all others."""
    found = re.findall(r"\w+|[^\w\s]", " ".join(topics.values()).lower())
    number = {word: i for i, (word, _) in enumerate(Counter(found).most_common(words - 1))}
    return torch.tensor([number.get(word, words - 1) for word in found])


def batches(tokens: Tensor, steps: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """(context, next word) of every step, the same on every process."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        at = torch.randint(len(tokens) - CONTEXT, (BATCH, 1), generator=generator) + torch.arange(CONTEXT + 1)
        rows = tokens[at].to(device)
        found.append((rows[:, :-1], rows[:, -1]))
    return found


def train(model: Model, data: list[tuple[Tensor, Tensor]], *, sharded: bool) -> list[float]:
    """The loss of every step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for context, target in data:
        h = model.features(context)
        if sharded:
            # This process knows where its columns are, so the processes exchange no shapes.
            loss = distributed.cross_entropy(Copied.apply(h) @ model.head.T, target, shards=model.shards)
        else:
            loss = functional.cross_entropy(h @ model.head.T, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(
    steps: Annotated[int, Option(min=1, help="Steps of the training.")] = 60,
    words: Annotated[int, Option(min=2, help="Words of the vocabulary.")] = 2001,
) -> None:
    """Train a language model whose head is sharded over the processes of torchrun."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if world == 1:
        print("One process: start the script with torchrun --nproc-per-node 2 to shard the head.")
        raise Exit(2)
    if on_gpu:
        torch.cuda.set_device(device)
    # torch._dynamo must have been imported by now: otherwise torch 2.11 keeps a reference to the process group, gloo's
    # threads outlive destroy_process_group, and one run in ten aborts when Python exits.
    dist.init_process_group("nccl" if on_gpu else "gloo")
    # The last process has the remaining columns, so that shards are uneven where the words do not divide.
    each = words // world
    first, end = rank * each, words if rank == world - 1 else (rank + 1) * each
    data = batches(text(words), steps, device)
    curve = train(Model(words, first, end).to(device), data, sharded=True)
    failed = rank == 0 and not _agrees(curve, train(Model(words, 0, words).to(device), data, sharded=False), world)
    dist.destroy_process_group()
    if failed:
        raise Exit(1)


def _agrees(curve: list[float], whole: list[float], world: int) -> bool:
    print(f"{'step':>4}  {f'{world} processes':>12}  one process")
    for step in range(0, len(curve), max(1, len(curve) // 10)):
        print(f"{step:>4}  {curve[step]:>12.4f}  {whole[step]:.4f}")
    difference = max(abs(a - b) for a, b in zip(curve, whole, strict=True))
    print(f"Largest difference: {difference:.1e}; at most {TOLERANCE:.0e} is allowed.")
    return difference <= TOLERANCE


if __name__ == "__main__":
    run(main)
