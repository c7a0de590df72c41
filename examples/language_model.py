"""Train a language model of Hugging Face transformers on Python's documentation, with our loss and with PyTorch's.

Run `python examples/language_model.py`.  It needs onlinesoftmax with the extras torch and cli, and transformers and
matplotlib.  `--help` lists the options.  Nothing is downloaded: the weights of the model are random, the text comes
with Python, and a token is a word.

The same model is trained three times, from the same weights and on the same batches:

- PyTorch: the loss that transformers computes with `torch.nn.functional.cross_entropy`.
- override(): the same code inside a block of `onlinesoftmax.override()`.
- cross_entropy(): `onlinesoftmax.cross_entropy` on the logits of the model.  It needs neither the float32 copy of
  bfloat16 logits that transformers makes nor memory for the gradient, which overwrites the logits.

The script prints the time, the tokens per second and the peak memory of each training, plots the loss curves, and
exits with 1 if the curves do not agree.  On a CPU, onlinesoftmax calls PyTorch's own operations, so that the curves
are equal and nothing is gained.  On a GPU, it runs its kernels.
"""

from __future__ import annotations

import gc
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from functools import lru_cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any, NamedTuple

import torch
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from typer import BadParameter, Exit, Option, Typer

import onlinesoftmax as osm

IGNORED = -100  # target of the last position of a sequence, which no token follows
WARMUP = 3  # number of first steps that the times leave out: they compile kernels and fill caches
COLORS, STYLES = ("tab:blue", "tab:orange", "tab:green"), ("-", "--", ":")  # of the curves after the first


class Device(str, Enum):
    """Devices to train on."""

    cpu = "cpu"
    cuda = "cuda"


class Dtype(str, Enum):
    """Dtypes of the matrix products and of the logits; the weights are float32."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Attention(str, Enum):
    """Implementations of attention in transformers: PyTorch's fused function, or products and a softmax."""

    sdpa = "sdpa"
    eager = "eager"


class Size(NamedTuple):
    """Sizes of the model, of its batches and of the training."""

    layers: int
    width: int
    vocabulary: int
    batch: int
    length: int
    steps: int


SIZES = {
    "cpu": Size(layers=2, width=128, vocabulary=8192, batch=4, length=64, steps=60),
    "cuda": Size(layers=4, width=512, vocabulary=32768, batch=16, length=512, steps=100),
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


class Result(NamedTuple):
    """Measurements of one training.

    Attributes:
        losses: The loss before each step, in nats: (steps,), float64, on the CPU.
        seconds: Median time of a step, without the first steps.
        peak_bytes: Most memory that tensors took on the GPU; None on a CPU.
    """

    losses: Tensor
    seconds: float
    peak_bytes: int | None


class Clock:
    """Clock of the steps.  It does not make the host wait for a GPU until the times are read."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"
        self.marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        """Record the end of a step, and of everything before."""
        if self.on_gpu:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def median_seconds(self) -> float:
        """Median time between two marks, without the first steps."""
        pairs = list(zip(self.marks, self.marks[1:], strict=False))[min(WARMUP, len(self.marks) - 2) :]
        if self.on_gpu:
            torch.cuda.synchronize()
            return float(torch.tensor([begin.elapsed_time(end) / 1e3 for begin, end in pairs]).median())
        return float(torch.tensor([end - begin for begin, end in pairs]).median())


@lru_cache
def corpus(vocabulary: int) -> tuple[Tensor, int]:
    """Load the help topics of Python's documentation as classes of words, and the number of classes that occur.

    A token is a word with the space before it, a sign, or other white space.  Class 0 stands for all words that are
    too rare for the vocabulary.
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


def make_model(settings: Settings) -> nn.Module:
    """Make a Llama model.  Its weights depend only on the seed, because they are drawn on the CPU."""
    # transformers reads the variable when it is imported.  The example needs no file of the hub.
    os.environ["HF_HUB_OFFLINE"] = "1"
    # The import takes seconds, for which --help need not wait.
    from transformers import LlamaConfig, LlamaForCausalLM

    size = settings.size
    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=max(1, size.width // 64),
        max_position_embeddings=size.length,
        attn_implementation=settings.attention,
        use_cache=False,
    )
    weights = torch.float64 if settings.dtype == torch.float64 else torch.float32
    return LlamaForCausalLM(config).to(settings.device, weights)


def train(way: Way, settings: Settings) -> Result:
    """Train a new model, and measure it."""
    # The model of an earlier training may hold itself through a cycle of references.
    gc.collect()
    on_gpu = settings.device == "cuda"
    model, (tokens, targets) = make_model(settings), batches(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    autocast = torch.autocast(settings.device, settings.dtype, enabled=settings.dtype == torch.bfloat16)
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    clock, losses = Clock(settings.device), []
    for read, following in zip(tokens, targets, strict=True):
        with autocast, way.block:
            loss = way.loss_of(model, read, following)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # No .item() here: it would make the host wait for a GPU at every step.
        losses.append(loss.detach().double())
        clock.mark()
    seconds = clock.median_seconds()
    return Result(torch.stack(losses).cpu(), seconds, torch.cuda.max_memory_allocated() if on_gpu else None)


def mean_difference(a: Tensor, b: Tensor) -> float:
    """Mean of the absolute differences of two curves; NaN where a loss is NaN.

    The largest difference is less reliable: with bfloat16, a single step may differ by more than ten times the mean.
    """
    return float((a - b).abs().mean())


def print_table(results: dict[str, Result], size: Size) -> None:
    """Print the measurements, one line per training."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for header in ("training", "ms per step", "tokens/s", "peak memory", "last loss", "difference"):
        table.add_column(header, justify="left" if header == "training" else "right", no_wrap=True)
    first = next(iter(results.values()))
    for name, result in results.items():
        memory = "not measured" if result.peak_bytes is None else f"{result.peak_bytes / 2**20:,.0f} MiB"
        speed = f"{size.batch * size.length / result.seconds:,.0f}"
        apart = "" if result is first else f"{mean_difference(result.losses, first.losses):.1e}"
        table.add_row(name, f"{1e3 * result.seconds:.2f}", speed, memory, f"{float(result.losses[-1]):.4f}", apart)
    print()
    Console(highlight=False).print(table)
    print(f"\nThe times are medians, without the first {min(WARMUP, size.steps - 1)} steps.", end=" ")
    print("The difference from PyTorch's losses is a mean, in nats.")


def save_plot(path: Path, results: dict[str, Result], title: str) -> None:
    """Save a PNG with the loss curves and, if they are not equal, a panel of their differences from the first one."""
    (first_name, first), *others = results.items()
    steps = range(1, len(first.losses) + 1)
    apart = {name: (result.losses - first.losses).abs() for name, result in others}
    differing = [name for name, difference in apart.items() if bool(difference.any())]
    # A Figure without pyplot needs no display: the Agg backend draws it.
    figure = Figure(figsize=(9, 7.5 if differing else 5), layout="constrained")
    panels = figure.subplots(1 + bool(differing), 1, sharex=True, squeeze=False)[:, 0]
    panels[0].plot(steps, first.losses, color="0.75", linewidth=6, label=first_name)
    for (name, result), color, style in zip(others, COLORS, STYLES, strict=False):
        panels[0].plot(steps, result.losses, color=color, linestyle=style, linewidth=1.8, label=name)
        if name in differing:
            # A logarithmic axis has no place for 0.
            above_zero = apart[name].where(apart[name] > 0, math.nan)
            panels[1].plot(steps, above_zero, color=color, marker=".", linewidth=1, label=name)
    panels[0].set(title=title if differing else f"{title}: equal curves", ylabel="loss (nats)")
    if differing:
        panels[1].set(title=f"Difference from {first_name}", ylabel="difference (nats)", yscale="log")
    panels[-1].set(xlabel="step")
    panels[-1].xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, format="png", dpi=120)


def checked_device(device: Device | None) -> str:
    """The device to train on: the GPU if there is one, unless the user chose otherwise."""
    found = torch.cuda.is_available()
    if device is Device.cuda and not found:
        raise BadParameter("PyTorch finds no CUDA device here.", param_hint="'--device'")
    return device.value if device else ("cuda" if found else "cpu")


def writable_png(path: Path) -> Path:
    """Check that the plot can be saved, before anything is trained."""
    if path.suffix != ".png":
        raise BadParameter(f"'{path}' does not end in .png.")
    if not (path.parent.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)):
        raise BadParameter(f"The folder '{path.parent}' does not exist or is not writable.")
    return path


def compare(ways: Sequence[Way], settings: Settings) -> tuple[dict[str, Result], float]:
    """Train with each way.  Return the results by name, and the allowed difference from the curve of the first way.

    If the curves are not equal, a further training with PyTorch in the next wider dtype measures how far the rounding
    of the whole model moves PyTorch's curve.  Our loss changes only a part of the rounding.  It may move the curve as
    far, and in the other direction: the allowed difference is twice the measured one, and one unit in the last place
    of a loss in float32.
    """
    results = {}
    for way in ways:
        print(f"training with {way.name} ...", flush=True)
        results[way.name] = train(way, settings)
    first, *others = (result.losses for result in results.values())
    if all(torch.equal(losses, first) for losses in others):
        return results, 0.0
    wider = torch.float32 if settings.dtype == torch.bfloat16 else torch.float64
    name = f"PyTorch, {str(wider).removeprefix('torch.')}"
    print(f"training with {name}, to measure the effect of rounding ...", flush=True)
    results[name] = train(ways[0]._replace(name=name), settings._replace(dtype=wider))
    last_place = torch.finfo(torch.float32).eps * float(first.max())
    return results, 2 * mean_difference(results[name].losses, first) + last_place


app = Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@app.command()
def main(
    steps: Annotated[int | None, Option(min=2, help="Steps of each training.")] = None,
    device: Annotated[Device | None, Option(help="Default: cuda if there is a GPU.")] = None,
    dtype: Annotated[Dtype | None, Option(help="Default: bfloat16 on a GPU, by autocast; float32 on a CPU.")] = None,
    batch: Annotated[int | None, Option(min=1, help="Sequences in a batch.")] = None,
    length: Annotated[int | None, Option(min=2, max=8192, help="Tokens in a sequence.")] = None,
    vocabulary: Annotated[int | None, Option(min=2, max=2**20, help="Classes, that is logits of each token.")] = None,
    attention: Annotated[Attention, Option(help="With eager, override() also takes its softmax.")] = Attention.sdpa,
    seed: Annotated[int, Option(min=0, max=2**31 - 1, help="Seed of the weights and of the batches.")] = 0,
    quick: Annotated[bool, Option("--quick", help="A tiny model and 10 steps, to see that everything works.")] = False,
    plot: Annotated[Path, Option(callback=writable_png, dir_okay=False, help="PNG file to save.")] = Path(
        "language_model.png"
    ),
) -> None:
    """Train a language model with our loss and with PyTorch's: compare curves, times and memory.

    The sizes depend on the device where they are not given.
    """
    on = checked_device(device)
    chosen = {"steps": steps, "batch": batch, "length": length, "vocabulary": vocabulary}
    size = SIZES["quick" if quick else on]._replace(**{k: v for k, v in chosen.items() if v is not None})
    usual = Dtype.bfloat16 if on == "cuda" and torch.cuda.is_bf16_supported() else Dtype.float32
    settings = Settings(size, on, getattr(torch, (dtype or usual).value), attention.value, seed)
    data, occurring = corpus(size.vocabulary)
    where = torch.cuda.get_device_name() if on == "cuda" else "the CPU"
    parameters = sum(weight.numel() for weight in make_model(settings).parameters())
    print(f"{len(data)} tokens of Python's help topics, {occurring} distinct; {size.vocabulary} classes")
    print(f"Llama with {parameters:,} random weights; {size}")
    print(f"{str(settings.dtype).removeprefix('torch.')}, attention {attention.value}, on {where}")

    mode = osm.override()
    ways = (
        Way("PyTorch", loss_of_transformers),
        Way("override()", loss_of_transformers, mode),
        Way("cross_entropy()", our_loss),
    )
    results, allowed = compare(ways, settings)
    print_table({way.name: results[way.name] for way in ways}, size)
    print(f"\noverride() reports:\n{mode.report()}")
    if on == "cpu":
        print("All three trainings ran PyTorch's operations, as always on a CPU, where memory is not measured.")
        print("The times differ by noise, and by the host time that override() adds to each call.")
        print("If other programs use the cores, OMP_NUM_THREADS=1 gives shorter and steadier times.")
    save_plot(plot, results, f"Training a language model with {size.vocabulary} classes on {where}")
    print(f"plot of the loss curves: {plot}\n")

    apart = [mean_difference(results[way.name].losses, results["PyTorch"].losses) for way in ways]
    worst = float(torch.tensor(apart).max())  # NaN, which Python's max may skip, fails below
    if worst == 0:
        print("The curves are equal bit for bit.")
    elif worst <= allowed:
        print(f"The curves agree: they differ by {worst:.1e} nats, and rounding explains {allowed:.1e} nats.")
    else:
        print(f"Error: the curves differ by {worst:.1e} nats; rounding explains {allowed:.1e} nats.", file=sys.stderr)
        raise Exit(1)


if __name__ == "__main__":
    app()
