"""A mixture of experts learns to read handwritten digits, in JAX: Flax NNX, optax, and our softmax as its gate.

Run it with `python examples/moe_jax.py` where onlinesoftmax is installed with the extras jax and cli, and flax,
optax, matplotlib and scikit-learn beside it; `--help` says what can be chosen.  Where JAX finds a GPU the same
lines run there, and softmax is a Pallas kernel.

A mixture of experts has several networks, and a gate that routes each image to some of them:

- the gate gives each expert a logit; in training, noise is added, so that close decisions are tried both ways;
- a softmax makes probabilities of the logits; the image is routed to the two most probable experts, and their
  probabilities, divided by their sum, are the weights by which their answers are combined;
- so far the gate may route every image to the same two, and the others never learn.  The load-balancing loss is
  least where all are used evenly: try `--balance 0`.

Noise: Shazeer et al., https://arxiv.org/abs/1701.06538.  Two experts and their weights: GShard,
https://arxiv.org/abs/2006.16668.  Load balancing: Switch Transformer, https://arxiv.org/abs/2101.03961, equation 4.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from matplotlib import colormaps
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from typer import BadParameter, Option, Typer

import onlinesoftmax.jax as osj

PIXELS, CLASSES = 64, 10
TOP_K = 2  # experts that an image is routed to


class Library(NamedTuple):
    """The two places where a mixture of experts takes a softmax: along the last axis, the shape stays."""

    gate: Callable[[Array], Array]
    log_probabilities: Callable[[Array], Array]


OURS = Library(osj.softmax, osj.log_softmax)


class Config(NamedTuple):
    """Sizes of the model, and how it is trained."""

    experts: int = 8
    hidden: int = 128  # units in the hidden layer of an expert
    noise: float = 0.3  # standard deviation of what is added to the gate's logits in training
    balance: float = 0.1  # weight of the load-balancing loss
    epochs: int = 60
    batch: int = 128
    learning_rate: float = 3e-3
    seed: int = 0


class Digits(NamedTuple):
    """Images (batch, 64) of 8 x 8 pixels from 0 to 1, and the digits that they show (batch,), int."""

    images: Array
    digits: Array


class Output(NamedTuple):
    """Logits (batch, classes); 1 where an image is routed to an expert, else 0 (batch, experts); a number."""

    logits: Array
    routed: Array
    load_balancing_loss: Array


class Experts(nnx.Module):
    """Networks of two layers, side by side: the first axis of every parameter is the expert."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.w1 = nnx.Param(init(rngs.params(), (config.experts, PIXELS, config.hidden)))
        self.b1 = nnx.Param(jnp.zeros((config.experts, config.hidden)))
        self.w2 = nnx.Param(init(rngs.params(), (config.experts, config.hidden, CLASSES)))
        self.b2 = nnx.Param(jnp.zeros((config.experts, CLASSES)))

    def __call__(self, images: Array) -> Array:
        """Images (batch, 64) to every expert's logits (batch, experts, classes)."""
        hidden = nnx.relu(jnp.einsum("bp,eph->beh", images, self.w1[...]) + self.b1[...])
        return jnp.einsum("beh,ehc->bec", hidden, self.w2[...]) + self.b2[...]


class MoE(nnx.Module):
    """A mixture of experts: a gate, and the networks that it chooses from."""

    def __init__(self, config: Config, library: Library = OURS) -> None:
        self.config, self.library, rngs = config, library, nnx.Rngs(params=config.seed)
        self.gate = nnx.Linear(PIXELS, config.experts, use_bias=False, rngs=rngs)
        self.experts = Experts(config, rngs)

    def __call__(self, images: Array, rngs: nnx.Rngs | None = None) -> Output:
        """Images (batch, 64); `rngs`, in training, draws the noise."""
        gate_logits = self.gate(images)
        if rngs is not None and self.config.noise:
            gate_logits += self.config.noise * jax.random.normal(rngs.noise(), gate_logits.shape)
        probabilities = self.library.gate(gate_logits)

        top, chosen = jax.lax.top_k(probabilities, TOP_K)
        one_hot = jax.nn.one_hot(chosen, self.config.experts)
        weights = jnp.einsum("bk,bke->be", top / top.sum(axis=-1, keepdims=True), one_hot)
        # Every expert computes every image, also where its weight is 0.  That is experts / TOP_K times the arithmetic,
        # but little at this size, in two batched matrix products: images need not be sorted by expert, and none is
        # too many for its expert.  To compute only what is routed pays where experts are large, or on other devices.
        logits = jnp.einsum("be,bec->bc", weights, self.experts(images))

        routed = one_hot.sum(axis=1)
        # 1 where all experts are used evenly, up to experts / 2 where always the same two are.  The first mean is of
        # counts and has no derivative: the gradient comes by the second.
        load_balancing_loss = self.config.experts * jnp.sum(routed.mean(axis=0) / TOP_K * probabilities.mean(axis=0))
        return Output(logits, routed, load_balancing_loss)


class Measured(NamedTuple):
    """Means over images: loss and cross-entropy in nats, and the share routed to each expert (experts,)."""

    loss: Array
    cross_entropy: Array
    use: Array


def loss_of(model: MoE, batch: Digits, rngs: nnx.Rngs | None = None) -> tuple[Array, Measured]:
    """What training makes small, and what is measured on the way."""
    output = model(batch.images, rngs)
    log_p = model.library.log_probabilities(output.logits)
    cross_entropy = -jnp.take_along_axis(log_p, batch.digits[:, None], axis=-1).mean()
    loss = cross_entropy + model.config.balance * output.load_balancing_loss
    return loss, Measured(loss, cross_entropy, output.routed.mean(axis=0))


@nnx.jit
def train_step(model: MoE, optimizer: nnx.Optimizer[MoE], batch: Digits, rngs: nnx.Rngs) -> Measured:
    """One step of the optimizer; what is measured is before it."""
    (_, measured), gradients = nnx.value_and_grad(loss_of, has_aux=True)(model, batch, rngs)
    optimizer.update(model, gradients)
    return measured


def train(model: MoE, data: Digits) -> Iterator[Measured]:
    """Train the model in place, an epoch for each one that is asked for."""
    config = model.config
    optimizer = nnx.Optimizer(model, optax.adam(config.learning_rate), wrt=nnx.Param)
    rngs, order = nnx.Rngs(noise=config.seed), np.random.default_rng(config.seed)
    steps = len(data.images) // config.batch
    for _ in range(config.epochs):
        # What does not fill a batch is left out, other images each time: another size would be another compilation.
        batches = order.permutation(len(data.images))[: steps * config.batch].reshape(steps, config.batch)
        told = [train_step(model, optimizer, Digits(data.images[i], data.digits[i]), rngs) for i in batches]
        # Numbers are fetched here only: a GPU would be waited for at every step.
        yield Measured(*(np.mean(column, axis=0) for column in zip(*jax.device_get(told), strict=True)))


def handwritten_digits() -> tuple[Digits, Digits]:
    """The 1437 images to learn from and the 360 to judge by, the same for every seed."""
    images, digits = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, digits, test_size=0.2, random_state=0, stratify=digits)
    learn_images, test_images, learn_digits, test_digits = map(jnp.asarray, parts)
    return Digits(learn_images, learn_digits), Digits(test_images, test_digits)


@nnx.jit
def judge(model: MoE, data: Digits) -> tuple[Array, Array]:
    """How many images are read right, and how many of each digit are routed to each expert, (experts, classes)."""
    output = model(data.images)
    return (output.logits.argmax(axis=-1) == data.digits).sum(), output.routed.T @ jax.nn.one_hot(data.digits, CLASSES)


def save_plot(path: Path, epochs: Sequence[Measured]) -> None:
    """Two panels as a PNG: loss and cross-entropy of each epoch, and the share of images routed to each expert."""
    loss, cross_entropy, use = (np.array(column) for column in zip(*epochs, strict=True))
    numbers, experts, columns = range(1, len(epochs) + 1), use.shape[1], 1 + use.shape[1] // 16
    # A Figure without pyplot needs no display and chooses no backend: Agg draws it.
    figure = Figure(figsize=(7.5 + 1.5 * columns, 7.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot(numbers, cross_entropy, marker=".", color="tab:blue", label="cross-entropy")
    above.plot(numbers, loss, marker=".", color="black", linestyle="--", label="with load\nbalancing")
    above.set(title="Loss in training", ylabel="mean loss (nats)", yscale="log")
    above.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    above.yaxis.set_major_formatter("{x:g}")
    above.yaxis.set_minor_formatter("")
    below.set_prop_cycle(color=colormaps["turbo"](np.linspace(0.05, 0.95, experts)))
    below.plot(numbers, 100 * use, marker=".", label=[f"expert {i + 1}" for i in range(experts)])
    below.axhline(100 * TOP_K / experts, color="black", linestyle="--", label="even use")
    below.set(title=f"Use of the experts: each image is routed to {TOP_K}", ylabel="share of the training images (%)")
    below.set(xlabel="epoch", xlim=(0.5, len(epochs) + 0.5), ylim=(0, None))
    below.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    for panel, ncols in ((above, 1), (below, columns)):
        panel.grid(alpha=0.3)
        panel.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, ncols=ncols)
    figure.savefig(path, format="png", dpi=120)


def writable_png(path: Path) -> Path:
    if path.suffix != ".png":
        raise BadParameter(f"'{path}' does not end in .png.")
    if not (path.parent.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)):
        raise BadParameter(f"There is no folder '{path.parent}', or it cannot be written.")
    return path


app = Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@app.command()
def main(
    epochs: Annotated[int, Option(min=1, help="Passes over the training images.")] = Config().epochs,
    experts: Annotated[int, Option(min=TOP_K, max=64, help="How many experts.")] = Config().experts,
    noise: Annotated[float, Option(min=0, max=100, help="Standard deviation in the gate.")] = Config().noise,
    balance: Annotated[float, Option(min=0, max=100, help="Weight of load balancing.")] = Config().balance,
    seed: Annotated[int, Option(min=0, max=2**31 - 1, help="Of weights, order and noise.")] = Config().seed,
    plot: Annotated[Path, Option(callback=writable_png, dir_okay=False, help="PNG to save.")] = Path("moe_jax.png"),
) -> None:
    """Train a mixture of experts to read handwritten digits; judge it; plot the loss and the use of the experts."""
    config = Config(experts=experts, noise=noise, balance=balance, epochs=epochs, seed=seed)
    learn, test = handwritten_digits()
    print(f"{len(learn.images)} images to learn from, {len(test.images)} to judge by; {config}, on {jax.devices()[0]}")
    began, told, model = time.perf_counter(), [], MoE(config)
    for number, epoch in enumerate(train(model, learn), 1):
        told.append(epoch)
        use = f"{epoch.use.min():.1%} to {epoch.use.max():.1%} of the images routed to an expert"
        print(f"epoch {number:>3} of {epochs}: loss {epoch.loss:.4f} nats; {use}", flush=True)
    right, counts = jax.device_get(judge(model, test))
    seconds, total = time.perf_counter() - began, len(test.images)
    print(f"\n{'expert':>6}{'share of the test images':>28}   gets most images of")
    for i, gets_most in enumerate(counts > counts.sum(axis=0) / TOP_K / 2):
        digits = ", ".join(map(str, np.flatnonzero(gets_most))) or "no digit"
        print(f"{i + 1:>6}{counts[i].sum() / total:>28.1%}   {digits}")
    print(f"\ntest accuracy {right / total:.2%} ({right} of {total}), {seconds:.1f} s of compilation and training")
    save_plot(plot, told)
    print(f"loss and use of the experts: {plot}")


if __name__ == "__main__":
    app()
