"""The model, the text and the training of examples/language_model.py."""

from __future__ import annotations

import gc
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import lru_cache
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from language_model_parts.checks import IGNORED
from torch import Tensor, nn

import onlinesoftmax as osm

WARMUP = 3  # number of first steps that the times leave out: they compile kernels and fill caches


class Size(NamedTuple):
    """Sizes of the model, of its batches, and of the training and its steps."""

    layers: int
    width: int
    vocabulary: int
    batch: int
    length: int
    steps: int
    rate: float = 1e-3


SIZES = {
    "cpu": Size(layers=2, width=128, vocabulary=8192, batch=4, length=64, steps=60),
    "cuda": Size(layers=2, width=1024, vocabulary=131072, batch=16, length=1024, steps=40, rate=3e-4),
    "quick": Size(layers=1, width=32, vocabulary=512, batch=2, length=16, steps=10),
}


class Settings(NamedTuple):
    """How every training runs."""

    size: Size
    device: str
    dtype: torch.dtype
    attention: str
    seed: int


class Way(NamedTuple):
    """One way to compute the loss of a batch.

    Attributes:
        name: Name in the table and in the plot.
        loss_of: Map a model, tokens (batch, length) and targets (batch, length) to the mean loss in nats.
        block: Context in which every forward pass runs.
    """

    name: str
    loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor]
    block: AbstractContextManager[Any] = nullcontext()


def loss_of_transformers(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Let transformers compute the loss; it makes the targets itself."""
    return model(tokens, labels=tokens).loss


def our_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Call our function on the logits, and let their gradient overwrite them."""
    return osm.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten(), inplace_backward=True)


def our_loss_without_logits(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Call our function on the last hidden states and the weight of the head, which makes some logits at a time."""
    hidden = model.model(tokens).last_hidden_state
    return osm.linear_cross_entropy(hidden, model.lm_head.weight, targets)


def logits_of_batch(settings: Settings, model: nn.Module, tokens: Tensor) -> Tensor:
    """The logits of a batch, without a graph."""
    autocast = torch.autocast(settings.device, settings.dtype, enabled=settings.dtype == torch.bfloat16)
    with torch.no_grad(), autocast:
        return model(tokens).logits


class Result(NamedTuple):
    """Measurements of one training.

    Attributes:
        losses: The loss before each step, in nats: (steps,), float64, on the CPU.
        seconds: Median time of a step, without the first steps.
        peak_bytes: Most memory that tensors took on the GPU; None on a CPU.
        weights: The weights before some steps, by the number of the step, on the CPU.
    """

    losses: Tensor
    seconds: float
    peak_bytes: int | None
    weights: dict[int, dict[str, Tensor]]


class Clock:
    """Clock of the steps.  It does not make the host wait for a GPU until the times are read."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"
        self.marks: list[Any] = []

    def mark(self) -> None:
        """Record the beginning or the end of a step, in turns."""
        if self.on_gpu:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def median_seconds(self) -> float:
        """Median time of a step, without the first steps."""
        steps = list(zip(self.marks[::2], self.marks[1::2], strict=True))
        pairs = steps[min(WARMUP, len(steps) - 1) :]
        if self.on_gpu:
            torch.cuda.synchronize()
            return float(torch.tensor([begin.elapsed_time(end) / 1e3 for begin, end in pairs]).median())
        return float(torch.tensor([end - begin for begin, end in pairs]).median())


@lru_cache
def corpus(vocabulary: int) -> tuple[Tensor, int]:
    """Load the help topics of Python's documentation as classes of words, and the number of classes that occur.

    A token is a word with one space before it or none, a sign, or other white space.  Class 0 stands for all words
    that are too rare for the vocabulary.
    """
    words = re.findall(r" ?\w+|[^\w\s]|\s+", "\n".join(topics[name] for name in sorted(topics)))
    known = {word: i for i, (word, _) in enumerate(Counter(words).most_common(vocabulary - 1), 1)}
    classes = torch.tensor([known.get(word, 0) for word in words])
    return classes, len(classes.unique())


def batches(settings: Settings) -> tuple[Tensor, Tensor]:
    """Draw the tokens and their targets, the tokens that follow them: each (steps, batch, length)."""
    size, (data, _) = settings.size, corpus(settings.size.vocabulary)
    generator = torch.Generator().manual_seed(settings.seed)
    starts = torch.randint(len(data) - size.length + 1, (size.steps, size.batch, 1), generator=generator)
    tokens = data[starts + torch.arange(size.length)].to(settings.device)
    return tokens, nn.functional.pad(tokens[..., 1:], (0, 1), value=IGNORED)


@lru_cache(maxsize=1)
def initial_model(size: Size, attention: str, seed: int) -> nn.Module:
    """Make a Llama model on the CPU, so that its weights depend only on the seed."""
    # transformers reads the variable when it is imported.  The example needs no file of the hub.
    os.environ["HF_HUB_OFFLINE"] = "1"
    # The import takes seconds, for which --help need not wait.
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=max(1, size.width // 64),
        max_position_embeddings=size.length,
        attn_implementation=attention,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def make_model(settings: Settings) -> nn.Module:
    """Copy the initial model to the device."""
    return deepcopy(initial_model(settings.size, settings.attention, settings.seed)).to(settings.device)


def loss_of_batch(way: Way, settings: Settings, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Run the forward pass in the dtype of the settings, up to the loss."""
    autocast = torch.autocast(settings.device, settings.dtype, enabled=settings.dtype == torch.bfloat16)
    with autocast, way.block:
        return way.loss_of(model, tokens, targets)


def train(
    way: Way, settings: Settings, keep: Collection[int] = (), prepare: Callable[[nn.Module], None] | None = None
) -> Result:
    """Train a new model, and measure it.

    Args:
        way: How to compute the loss.
        settings: How to train.
        keep: Numbers of the steps before which the weights are copied to the CPU.
        prepare: Function that changes the model before the training.
    """
    on_gpu = settings.device == "cuda"
    model, (tokens, targets) = make_model(settings), batches(settings)
    if prepare is not None:
        prepare(model)
    # One kernel updates all weights on a GPU, so that the optimizer does not take longer than the model.
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.size.rate, fused=on_gpu)
    if on_gpu:
        # The model of an earlier training may hold itself through a cycle of references.
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    clock, losses, weights = Clock(settings.device), [], {}
    for step, (read, following) in enumerate(zip(tokens, targets, strict=True)):
        if step in keep:
            weights[step] = {name: weight.to("cpu", copy=True) for name, weight in model.state_dict().items()}
        clock.mark()
        loss = loss_of_batch(way, settings, model, read, following)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # No .item() here: it would make the host wait for a GPU at every step.
        losses.append(loss.detach().double())
        clock.mark()
    seconds = clock.median_seconds()
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    return Result(torch.stack(losses).cpu(), seconds, peak, weights)
