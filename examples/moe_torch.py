"""Train a mixture of experts to read handwritten digits in PyTorch, with our `Router` as its gate.

Run `python examples/moe_torch.py`.  It needs onlinesoftmax with the extras torch and cli, and scikit-learn.  `--help`
lists the options.  It is the mixture of moe_jax.py, which explains it: each image is routed to two of the experts, and
a loss keeps the experts in even use.

- `--balance 0.1` adds the load-balancing loss of Switch Transformer.
- `--balance 0 --correct 0.01` balances without a loss, as DeepSeek-V3 does: after each step, a bias that counts for
  the choice alone moves towards the experts with fewer images.
- `--balance 0` does neither: two experts get most images.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.nn import functional
from typer import Option, Typer

import onlinesoftmax as osm
from onlinesoftmax.routing import Routed

PIXELS, CLASSES = 64, 10
TOP_K = 2  # number of experts that each image is routed to


class Config(NamedTuple):
    """Sizes of the model and settings of the training."""

    experts: int = 8
    hidden: int = 128  # units in the hidden layer of an expert
    noise: float = 0.3  # standard deviation of the noise that training adds to the images that the gate sees
    balance: float = 0.1  # weight of the load-balancing loss
    correct: float = 0.0  # step of the bias that balances without a loss
    epochs: int = 60
    batch: int = 128
    learning_rate: float = 3e-3
    seed: int = 0


class Digits(NamedTuple):
    """Images (batch, 64): 8 x 8 pixels from 0 to 1.  Digits (batch,): the true classes, int64."""

    images: Tensor
    digits: Tensor


class MoE(torch.nn.Module):
    """A mixture of experts: a gate, and the experts that it chooses from, networks of two layers."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        # The choice of DeepSeek-V3 for `correct`, that of Mixtral else.
        kind = {"score": "sigmoid", "correction": True} if config.correct else {}
        self.gate = osm.nn.Router(PIXELS, config.experts, TOP_K, **kind)
        self.w1 = torch.nn.Parameter(torch.randn(config.experts, PIXELS, config.hidden) / PIXELS**0.5)
        self.b1 = torch.nn.Parameter(torch.zeros(config.experts, 1, config.hidden))
        self.w2 = torch.nn.Parameter(torch.randn(config.experts, config.hidden, CLASSES) / config.hidden**0.5)
        self.b2 = torch.nn.Parameter(torch.zeros(config.experts, 1, CLASSES))

    def forward(self, images: Tensor) -> tuple[Tensor, Routed]:
        """Map images (batch, 64) to logits (batch, classes), and the experts of each."""
        seen = images + self.config.noise * torch.randn_like(images) if self.training else images
        routed = self.gate(seen)
        # Every expert computes every image: two batched products, little at this size.
        hidden = functional.relu(images @ self.w1 + self.b1)
        logits = (hidden @ self.w2 + self.b2).movedim(0, 1)
        chosen = logits.take_along_dim(routed.indices.long().unsqueeze(-1), 1)
        return (routed.weights.unsqueeze(-1) * chosen).sum(1), routed


class Measured(NamedTuple):
    """Means over an epoch: the loss in nats, and the share of images routed to each expert (experts,)."""

    loss: float
    use: Tensor


def train(model: MoE, data: Digits) -> Iterator[Measured]:
    """Train the model in place.  Each iteration trains one epoch and yields its mean measurements."""
    config = model.config
    optimizer = torch.optim.Adam(model.parameters(), config.learning_rate)
    steps = len(data.images) // config.batch
    for _ in range(config.epochs):
        model.train()
        losses, counts = [], torch.zeros(config.experts, device=data.images.device)
        # The images that do not fill a batch are left out; they differ in every epoch.
        for batch in (
            torch.randperm(len(data.images)).to(data.images.device)[: steps * config.batch].split(config.batch)
        ):
            logits, routed = model(data.images[batch])
            loss = functional.cross_entropy(logits, data.digits[batch])
            if config.balance:
                loss = loss + config.balance * osm.load_balancing_loss(routed)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if config.correct:
                model.gate.balance(routed.counts, config.correct)
            losses.append(loss.detach())
            counts += routed.counts
        yield Measured(torch.stack(losses).mean().item(), (counts / (steps * config.batch)).cpu())


def handwritten_digits(device: torch.device) -> tuple[Digits, Digits]:
    """Load the 1437 training images and the 360 test images.  The split is the same for every seed."""
    images, digits = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, digits, test_size=0.2, random_state=0, stratify=digits)
    learn, test, learn_digits, test_digits = (torch.as_tensor(part, device=device) for part in parts)
    return Digits(learn.float(), learn_digits.long()), Digits(test.float(), test_digits.long())


@torch.no_grad()
def evaluate(model: MoE, data: Digits) -> tuple[int, Tensor]:
    """Count the images that are read correctly, and the images of each digit routed to each expert."""
    logits, routed = model.eval()(data.images)
    table = functional.one_hot(routed.indices.long(), model.config.experts).sum(1).T.float()
    of_digits = functional.one_hot(data.digits, CLASSES).float()
    return int((logits.argmax(-1) == data.digits).sum()), table @ of_digits


app = Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@app.command()
def main(
    epochs: Annotated[int, Option(min=1, help="Passes over the training images.")] = Config().epochs,
    experts: Annotated[int, Option(min=TOP_K, max=64, help="Number of experts.")] = Config().experts,
    balance: Annotated[float, Option(min=0, max=100, help="Weight of the load-balancing loss.")] = Config().balance,
    correct: Annotated[float, Option(min=0, max=1, help="Step of the balance without a loss.")] = Config().correct,
    seed: Annotated[int, Option(min=0, max=2**31 - 1, help="Seed of weights, order and noise.")] = Config().seed,
) -> None:
    """Train a mixture of experts to read handwritten digits, and test it."""
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = Config(experts=experts, balance=balance, correct=correct, epochs=epochs, seed=seed)
    learn, test = handwritten_digits(device)
    print(f"{len(learn.images)} training images, {len(test.images)} test images; {config}, on {device}")
    began, model = time.perf_counter(), MoE(config).to(device)
    for number, epoch in enumerate(train(model, learn), 1):
        use = f"each expert gets {epoch.use.min():.1%} to {epoch.use.max():.1%} of the images"
        print(f"epoch {number:>3} of {epochs}: loss {epoch.loss:.4f} nats; {use}", flush=True)
    right, counts = evaluate(model, test)
    print(f"\n{'expert':>6}{'share of the test images':>28}   gets most images of the digits")
    for i, own in enumerate(counts.cpu()):
        most = (own > counts.cpu().sum(0) / TOP_K / 2).nonzero().flatten().tolist()
        print(f"{i + 1:>6}{own.sum() / len(test.images):>28.1%}   {', '.join(map(str, most)) or 'none'}")
    seconds, total = time.perf_counter() - began, len(test.images)
    print(f"\ntest accuracy {right / total:.2%} ({right} of {total}), {seconds:.1f} s of training")


if __name__ == "__main__":
    app()
