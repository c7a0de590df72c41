"""Train a mixture of experts to read handwritten digits in JAX, with Flax NNX, optax, and our `route` as its gate.

Run `python examples/moe_jax.py`.  It needs onlinesoftmax with the extras jax and cli, and flax, optax, matplotlib and
scikit-learn.  `--help` lists the options.  If JAX finds a GPU, the same code runs there.  moe_torch.py trains the same
mixture in PyTorch.

A mixture of experts has several networks, the experts, and a gate that routes each image to some of them:

- The gate computes a logit for each expert.  In training, it adds noise to the logits, so that close decisions go
  both ways.
- A softmax turns the logits into probabilities.  Each image is routed to the two most probable experts.  Their
  probabilities, divided by their sum, weight their outputs.
- Without a further loss, the gate may route every image to the same two experts, and the other experts never learn.
  The load-balancing loss is smallest when all experts are used evenly.  Try `--balance 0`.

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
TOP_K = 2  # number of experts that each image is routed to


class Gate(NamedTuple):
    """Weights and experts of each image.

    Attributes:
        weights: (batch, TOP_K): weights of the experts that it is routed to.
        chosen: (batch, TOP_K): their numbers.
        load_balancing_loss: 1 when all experts are used evenly, and up to experts / 2 when two are used always.
    """

    weights: Array
    chosen: Array
    load_balancing_loss: Array


class Library(NamedTuple):
    """The functions that the model uses: a gate of logits (batch, experts), and log-softmax along the last axis."""

    gate: Callable[[Array], Gate]
    log_probabilities: Callable[[Array], Array]


def gate(logits: Array) -> Gate:
    """Route each image, from logits (batch, experts)."""
    found = osj.route(logits, TOP_K, prob_sums=True)
    return Gate(found.weights, found.indices, osj.load_balancing_loss(found))


OURS = Library(gate, osj.log_softmax)


class Config(NamedTuple):
    """Sizes of the model and settings of the training."""

    experts: int = 8
    hidden: int = 128  # units in the hidden layer of an expert
    noise: float = 0.3  # standard deviation of the noise that training adds to the gate's logits
    balance: float = 0.1  # weight of the load-balancing loss
    epochs: int = 60
    batch: int = 128
    learning_rate: float = 3e-3
    seed: int = 0


class Digits(NamedTuple):
    """Images (batch, 64): 8 x 8 pixels from 0 to 1.  Digits (batch,): the true classes, int."""

    images: Array
    digits: Array


class Output(NamedTuple):
    """Result of a forward pass.

    Attributes:
        logits: (batch, classes).
        routed: (batch, experts); 1 where an image is routed to an expert, else 0.
        load_balancing_loss: A scalar.
    """

    logits: Array
    routed: Array
    load_balancing_loss: Array


class Experts(nnx.Module):
    """All experts: networks of two layers.  The first axis of every parameter is the expert."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.w1 = nnx.Param(init(rngs.params(), (config.experts, PIXELS, config.hidden)))
        self.b1 = nnx.Param(jnp.zeros((config.experts, config.hidden)))
        self.w2 = nnx.Param(init(rngs.params(), (config.experts, config.hidden, CLASSES)))
        self.b2 = nnx.Param(jnp.zeros((config.experts, CLASSES)))

    def __call__(self, images: Array) -> Array:
        """Map images (batch, 64) to the logits of every expert (batch, experts, classes)."""
        hidden = nnx.relu(jnp.einsum("bp,eph->beh", images, self.w1[...]) + self.b1[...])
        return jnp.einsum("beh,ehc->bec", hidden, self.w2[...]) + self.b2[...]


class MoE(nnx.Module):
    """A mixture of experts: a gate, and the experts that it chooses from."""

    def __init__(self, config: Config, library: Library = OURS) -> None:
        self.config, self.library, rngs = config, library, nnx.Rngs(params=config.seed)
        self.gate = nnx.Linear(PIXELS, config.experts, use_bias=False, rngs=rngs)
        self.experts = Experts(config, rngs)

    def __call__(self, images: Array, rngs: nnx.Rngs | None = None) -> Output:
        """Run the model.

        Args:
            images: (batch, 64).
            rngs: Source of the gate's noise in training; None for inference without noise.
        """
        gate_logits = self.gate(images)
        if rngs is not None and self.config.noise:
            gate_logits += self.config.noise * jax.random.normal(rngs.noise(), gate_logits.shape)
        weights, chosen, load_balancing_loss = self.library.gate(gate_logits)
        # Every expert computes every image, even where it is not chosen.  This takes experts / TOP_K times the
        # arithmetic, which is little at this size.  It needs only two batched matrix products, no sort of the images
        # by expert, and no limit on the images per expert.  Sparse routing pays when experts are large or sharded.
        of_chosen = jnp.take_along_axis(self.experts(images), chosen[:, :, None], axis=1)
        logits = jnp.einsum("bk,bkc->bc", weights, of_chosen)
        return Output(logits, jax.nn.one_hot(chosen, self.config.experts).sum(axis=1), load_balancing_loss)


class Measured(NamedTuple):
    """Means over images: loss and cross-entropy in nats, and the share of images routed to each expert (experts,)."""

    loss: Array
    cross_entropy: Array
    use: Array


def loss_of(model: MoE, batch: Digits, rngs: nnx.Rngs | None = None) -> tuple[Array, Measured]:
    """Return the training loss of a batch, and the measurements to report."""
    output = model(batch.images, rngs)
    log_p = model.library.log_probabilities(output.logits)
    cross_entropy = -jnp.take_along_axis(log_p, batch.digits[:, None], axis=-1).mean()
    loss = cross_entropy + model.config.balance * output.load_balancing_loss
    return loss, Measured(loss, cross_entropy, output.routed.mean(axis=0))


@nnx.jit
def train_step(model: MoE, optimizer: nnx.Optimizer[MoE], batch: Digits, rngs: nnx.Rngs) -> Measured:
    """Take one optimizer step.  The returned measurements are from before the step."""
    (_, measured), gradients = nnx.value_and_grad(loss_of, has_aux=True)(model, batch, rngs)
    optimizer.update(model, gradients)
    return measured


def train(model: MoE, data: Digits) -> Iterator[Measured]:
    """Train the model in place.  Each iteration trains one epoch and yields its mean measurements."""
    config = model.config
    optimizer = nnx.Optimizer(model, optax.adam(config.learning_rate), wrt=nnx.Param)
    rngs, order = nnx.Rngs(noise=config.seed), np.random.default_rng(config.seed)
    steps = len(data.images) // config.batch
    for _ in range(config.epochs):
        # The images that do not fill a batch are left out; they differ in every epoch.  A smaller last batch would
        # need another compilation.
        batches = order.permutation(len(data.images))[: steps * config.batch].reshape(steps, config.batch)
        measured = [train_step(model, optimizer, Digits(data.images[i], data.digits[i]), rngs) for i in batches]
        # Fetch the numbers once per epoch: fetching them at every step would make the host wait for a GPU.
        yield Measured(*(np.mean(column, axis=0) for column in zip(*jax.device_get(measured), strict=True)))


def handwritten_digits() -> tuple[Digits, Digits]:
    """Load the 1437 training images and the 360 test images.  The split is the same for every seed."""
    images, digits = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, digits, test_size=0.2, random_state=0, stratify=digits)
    learn_images, test_images, learn_digits, test_digits = map(jnp.asarray, parts)
    return Digits(learn_images, learn_digits), Digits(test_images, test_digits)


@nnx.jit
def evaluate(model: MoE, data: Digits) -> tuple[Array, Array]:
    """Count the correctly classified images, and the images of each digit routed to each expert (experts, classes)."""
    output = model(data.images)
    return (output.logits.argmax(axis=-1) == data.digits).sum(), output.routed.T @ jax.nn.one_hot(data.digits, CLASSES)


def save_plot(path: Path, epochs: Sequence[Measured]) -> None:
    """Save a PNG with two panels: loss and cross-entropy per epoch, and share of images routed to each expert."""
    loss, cross_entropy, use = (np.array(column) for column in zip(*epochs, strict=True))
    numbers, experts, columns = range(1, len(epochs) + 1), use.shape[1], 1 + use.shape[1] // 16
    # A Figure without pyplot needs no display: the Agg backend draws it.
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
        raise BadParameter(f"The folder '{path.parent}' does not exist or is not writable.")
    return path


app = Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@app.command()
def main(
    epochs: Annotated[int, Option(min=1, help="Passes over the training images.")] = Config().epochs,
    experts: Annotated[int, Option(min=TOP_K, max=64, help="Number of experts.")] = Config().experts,
    noise: Annotated[float, Option(min=0, max=100, help="Standard deviation of the gate's noise.")] = Config().noise,
    balance: Annotated[float, Option(min=0, max=100, help="Weight of the load-balancing loss.")] = Config().balance,
    seed: Annotated[int, Option(min=0, max=2**31 - 1, help="Seed of weights, order and noise.")] = Config().seed,
    plot: Annotated[Path, Option(callback=writable_png, dir_okay=False, help="PNG file to save.")] = Path(
        "moe_jax.png"
    ),
) -> None:
    """Train a mixture of experts to read handwritten digits, test it, and plot the loss and the use of the experts."""
    config = Config(experts=experts, noise=noise, balance=balance, epochs=epochs, seed=seed)
    learn, test = handwritten_digits()
    print(f"{len(learn.images)} training images, {len(test.images)} test images; {config}, on {jax.devices()[0]}")
    began, epochs_measured, model = time.perf_counter(), [], MoE(config)
    for number, epoch in enumerate(train(model, learn), 1):
        epochs_measured.append(epoch)
        use = f"each expert gets {epoch.use.min():.1%} to {epoch.use.max():.1%} of the images"
        print(f"epoch {number:>3} of {epochs}: loss {epoch.loss:.4f} nats; {use}", flush=True)
    right, counts = jax.device_get(evaluate(model, test))
    seconds, total = time.perf_counter() - began, len(test.images)
    print(f"\n{'expert':>6}{'share of the test images':>28}   gets most images of the digits")
    for i, gets_most in enumerate(counts > counts.sum(axis=0) / TOP_K / 2):
        digits = ", ".join(map(str, np.flatnonzero(gets_most))) or "none"
        print(f"{i + 1:>6}{counts[i].sum() / total:>28.1%}   {digits}")
    print(f"\ntest accuracy {right / total:.2%} ({right} of {total}), {seconds:.1f} s for compilation and training")
    save_plot(plot, epochs_measured)
    print(f"plot of the loss and the use of the experts: {plot}")


if __name__ == "__main__":
    app()
