"""Train a language model of Hugging Face transformers on Python's documentation, with our loss and with PyTorch's.

Run `python examples/language_model.py`.  It needs onlinesoftmax with the extras torch and cli, and transformers and
matplotlib.  `--help` lists the options.  Nothing is downloaded: the weights of the model are random, the text comes
with Python, and a token is a word.

The same model is trained four times, from the same weights and on the same batches:

- PyTorch: the loss that transformers computes with `torch.nn.functional.cross_entropy`.
- override(): the same code inside a block of `onlinesoftmax.override()`.
- cross_entropy(): `onlinesoftmax.cross_entropy` on the logits of the model.  It needs neither the float32 copy of
  bfloat16 logits that transformers makes nor memory for the gradient, which overwrites the logits.
- without-logits: `onlinesoftmax.linear_cross_entropy` on the last hidden states and the weight of the head.  It
  makes the logits of some tokens at a time, and the gradients with them.

The script prints the time, the tokens per second and the peak memory of each training, and plots the loss curves.
Then it checks that the losses agree: it compares losses and gradients with exact ones at the same weights, and the
curves with those of trainings that round differently.  The two checks are in language_model_parts/checks.py.  If one
fails, the script exits with 1.

On a CPU, onlinesoftmax calls PyTorch's own operations, and nothing is gained.  On a GPU, it runs its kernels.  There
the vocabulary is as large as that of a present-day model, though few of its classes occur in the text.  The loss takes
time and memory in proportion to the vocabulary: the logits of a batch take 4 GiB in bfloat16, and PyTorch keeps several
copies in float32.  With less than 54 GiB of free memory, the batches are smaller.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
from language_model_parts.checks import Errors, Samples, errors, round_differently, wide_gradients
from language_model_parts.training import (
    SIZES,
    WARMUP,
    Result,
    Settings,
    Size,
    Way,
    batches,
    corpus,
    logits_of_batch,
    loss_of_batch,
    loss_of_transformers,
    make_model,
    our_loss,
    our_loss_without_logits,
    train,
)  # fmt: skip
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from typer import BadParameter, Exit, Option, Typer

import onlinesoftmax as osm

SAMPLES = 8  # number of trainings that round differently
BYTES_OF_MODEL = 6 << 30  # more than a GPU needs for the weights, their gradients and the state of the optimizer
BYTES_PER_LOGIT = 24  # three copies in float32 while PyTorch computes the gradient, and room for the checks
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


def mean_difference(a: Tensor, b: Tensor) -> float:
    """Mean of the absolute differences of two curves; NaN where a loss is NaN."""
    return float((a - b).abs().mean())


def new_table(first: str, *others: str) -> Table:
    """A table with these headers, the first one of names and the others of numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for header in others:
        table.add_column(header, justify="right", no_wrap=True)
    return table


def print_table(results: dict[str, Result], size: Size) -> None:
    """Print the measurements, one line per training."""
    table = new_table("training", "ms per step", "tokens/s", "peak memory", "last loss", "difference")
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


def save_plot(path: Path, results: dict[str, Result], samples: Samples | None, title: str) -> None:
    """Save a PNG with the loss curves and, if they are not equal, a panel of their differences from the first one."""
    (first_name, first), *others = results.items()
    steps = range(1, len(first.losses) + 1)
    # A Figure without pyplot needs no display: the Agg backend draws it.
    figure = Figure(figsize=(9, 7.5 if samples else 5), layout="constrained")
    panels = figure.subplots(2 if samples else 1, 1, sharex=True, squeeze=False)[:, 0]
    panels[0].plot(steps, first.losses, color="0.75", linewidth=6, label=first_name)
    for i, curve in enumerate(samples.others if samples else ()):
        label = f"{first_name},\nother rounding" if i == 0 else None
        panels[1].plot(steps, above_zero(curve - first.losses), color="0.8", linewidth=1, label=label)
    for (name, result), color, style in zip(others, COLORS, STYLES, strict=False):
        panels[0].plot(steps, result.losses, color=color, linestyle=style, linewidth=1.8, label=name)
        if samples:
            difference = above_zero(result.losses - first.losses)
            panels[1].plot(steps, difference, color=color, marker=".", linewidth=1, label=name)
    panels[0].set(title=title if samples else f"{title}: equal curves", ylabel="loss (nats)")
    if samples:
        panels[1].set(title=f"Difference from {first_name}", ylabel="difference (nats)", yscale="log")
    panels[-1].set(xlabel="step")
    panels[-1].xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, format="png", dpi=120)


def above_zero(difference: Tensor) -> Tensor:
    """Absolute values; NaN in place of 0, for which a logarithmic axis has no place."""
    return difference.abs().where(difference != 0, math.nan)


def checked_device(device: Device | None) -> str:
    """The device to train on: the GPU if there is one, unless the user chose otherwise."""
    found = torch.cuda.is_available()
    if device is Device.cuda and not found:
        raise BadParameter("PyTorch finds no CUDA device here.", param_hint="'--device'")
    return device.value if device else ("cuda" if found else "cpu")


def size_for(on: str, quick: bool, chosen: dict[str, int]) -> Size:
    """The sizes for a device, but for the chosen ones: on a GPU with little free memory, fewer sequences in a batch."""
    size = SIZES["quick" if quick else on]._replace(**chosen)
    if on == "cpu" or quick or "batch" in chosen:
        return size
    free, _ = torch.cuda.mem_get_info()
    fitting = int(free - BYTES_OF_MODEL) // (BYTES_PER_LOGIT * size.length * size.vocabulary)
    return size._replace(batch=max(1, min(size.batch, fitting)))


def writable_png(path: Path) -> Path:
    """Check that the plot can be saved, before anything is trained."""
    if path.suffix != ".png":
        raise BadParameter(f"'{path}' does not end in .png.")
    if not (path.parent.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)):
        raise BadParameter(f"The folder '{path.parent}' does not exist or is not writable.")
    return path


def errors_at(kept: dict[int, dict[str, Tensor]], ways: Sequence[Way], settings: Settings) -> dict[str, Errors]:
    """The largest errors of each way at the kept weights, for the batches that follow them."""
    model, (tokens, targets) = make_model(settings), batches(settings)
    wider = torch.float32 if settings.dtype == torch.bfloat16 else torch.float64
    found: dict[str, Errors] = {}
    for step, weights in kept.items():
        model.load_state_dict(weights)
        batch = tokens[step], targets[step]
        exact = wide_gradients(model, ways[0].loss_of, *batch, wider)
        plain = logits_of_batch(settings, model, batch[0])
        for way in ways:
            here = errors(model, partial(loss_of_batch, way, settings), *batch, exact, plain)
            found[way.name] = here.worse(found.get(way.name, here))
    return found


def same_errors(results: dict[str, Result], ways: Sequence[Way], settings: Settings) -> tuple[float, bool]:
    """Check each way at the same weights, and print the errors.

    Returns:
        The largest error of an element of the gradient that PyTorch's loss has, and whether every way passes.
    """
    kept = results[ways[0].name].weights
    found = errors_at(kept, ways, settings)
    theirs = found[ways[0].name]
    allowed = theirs.allowed(settings.dtype)
    table = new_table("errors at the same weights", "loss", "gradient of the logits", "of the weights")
    for name, row in (*found.items(), ("allowed", allowed)):
        of_logits = f"{row.logits:.1e}" if row.logits else "no logits"
        table.add_row(name, f"{row.loss:.1e}", of_logits, f"{row.weights:.1e}")
    print(f"\nAt PyTorch's weights before the steps {', '.join(str(step + 1) for step in kept)}:\n")
    Console(highlight=False).print(table)
    return theirs.logits, all(row.within(allowed) for row in found.values())


def same_curves(
    results: dict[str, Result], ways: Sequence[Way], settings: Settings, rounding: float
) -> tuple[Samples | None, bool]:
    """Check the curves of the ways after the first, and print their distances from the first.

    Args:
        results: The trainings, by the names of their ways.
        ways: PyTorch's loss, and the others.
        settings: How to train.
        rounding: Largest relative change of an element of the gradient by another rounding.

    Returns:
        The samples, or None if the curves are equal, and whether every curve passes.
    """
    center, *others = (results[way.name].losses for way in ways)
    if all(torch.equal(curve, center) for curve in others):
        print("\nThe curves are equal bit for bit.")
        return None, True
    print(f"\ntraining with PyTorch {SAMPLES} times more, each time with other rounding ...", flush=True)
    curves = []
    for seed in range(SAMPLES):
        prepare = partial(round_differently, size=rounding, seed=seed)
        curves.append(train(ways[0], settings, (), prepare).losses)
    samples = Samples(center, torch.stack(curves))
    theirs, allowed = samples.distances(), samples.allowed()
    print(f"Distances of these curves from PyTorch's: {float(theirs.min()):.2f} to {float(theirs.max()):.2f}.")
    print("1 is the usual distance of two trainings that only round differently.")
    ours = {way.name: samples.distance(curve) for way, curve in zip(ways[1:], others, strict=True)}
    for name, distance in ours.items():
        print(f"Distance of {name}: {distance:.2f}, and {allowed:.2f} is allowed.")
    return samples, all(distance <= allowed for distance in ours.values())


app = Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@app.command()
def main(
    steps: Annotated[int | None, Option(min=2, help="Steps of each training.")] = None,
    device: Annotated[Device | None, Option(help="Default: cuda if there is a GPU.")] = None,
    dtype: Annotated[Dtype | None, Option(help="Default: bfloat16 on a GPU, by autocast; float32 on a CPU.")] = None,
    batch: Annotated[int | None, Option(min=1, help="Sequences in a batch.")] = None,
    length: Annotated[int | None, Option(min=2, max=8192, help="Tokens in a sequence.")] = None,
    vocabulary: Annotated[int | None, Option(min=2, max=2**20, help="Classes, that is logits of each token.")] = None,
    attention: Annotated[Attention, Option(help="With eager, override() also replaces its softmax.")] = Attention.sdpa,
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
    given = {"steps": steps, "batch": batch, "length": length, "vocabulary": vocabulary}
    size = size_for(on, quick, {name: value for name, value in given.items() if value is not None})
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
        Way("without-logits", our_loss_without_logits),
    )
    results = {}
    for way in ways:
        print(f"training with {way.name} ...", flush=True)
        results[way.name] = train(way, settings, {0, size.steps // 2, size.steps - 1} if not results else ())
    print_table(results, size)
    print(f"\noverride() reports:\n{mode.report()}")
    if on == "cpu":
        print("All trainings ran PyTorch's operations, as always on a CPU, where memory is not measured.")
        print("The times differ by noise, and by the host time that override() adds to each call.")
        print("If other programs use the cores, OMP_NUM_THREADS=1 gives shorter and steadier times.")

    rounding, right = same_errors(results, ways, settings)
    samples, near = same_curves(results, ways, settings, rounding)
    save_plot(plot, results, samples, f"Training a language model with {size.vocabulary} classes on {where}")
    print(f"plot of the loss curves: {plot}")
    if not right:
        print("Error: at the same weights, a loss or a gradient is further off than allowed.", file=sys.stderr)
    if not near:
        print("Error: a loss curve is further from PyTorch's than rounding explains.", file=sys.stderr)
    if not (right and near):
        raise Exit(1)
    print("The losses agree with PyTorch's.")


if __name__ == "__main__":
    app()
