"""Two checks of a language model that is trained with another loss: does it learn what it learns with PyTorch's?

examples/language_model.py runs them.  Two correct losses round differently, and a training amplifies the difference
from step to step, often a thousandfold in a hundred steps.  So no fixed tolerance for the loss curves is right.

`errors` compares at the same weights, where nothing is amplified: the loss and its gradient with respect to the logits
with those in float64, and its gradient with respect to the weights with that of a wider model.  Another loss may be
off by twice as much as PyTorch's, or by one unit in the last place more, if that is more.

`Samples` compares the curves.  It needs further trainings with PyTorch's loss, in which every element of the gradient
with respect to the logits is rounded differently at random.  Their curves are samples of what rounding can do to the
curve of a correct loss.  This check finds errors that add up over the steps.  It cannot find a gradient with a wrong
factor, because AdamW divides by the size of the gradient.  The first check finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

IGNORED = -100  # target of a position that does not count
RARE = 1e-30  # probability below which the error of an element is not relative: float32 may round it to 0
AT_ONCE = 1 << 24  # logits that are converted to float64 at a time
LAST_PLACE = torch.finfo(torch.float32).eps  # relative size of a unit in the last place of a loss

LossOf = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""Map a model, tokens (batch, length) and targets (batch, length) to the mean loss."""


class Errors(NamedTuple):
    """Errors of a loss at given weights.

    Attributes:
        loss: Relative error of the loss, computed in float64 from the same logits.
        logits: Largest error of an element of the gradient with respect to the logits, relative to the sum of the sizes
            of its terms: p of every class, and 1 of the target class.  The exact one is that of the same logits.  0 for
            a loss that makes no logits.
        weights: Distance of the gradient with respect to all weights from that of the model in the wider dtype,
            relative to the norm of the latter.
    """

    loss: float
    logits: float
    weights: float

    def worse(self, other: Errors) -> Errors:
        """The larger of each two errors; NaN where one is NaN."""
        return Errors(*torch.tensor([self, other], dtype=torch.float64).amax(0).tolist())

    def allowed(self, dtype: torch.dtype) -> Errors:
        """The errors that another loss may have, if these are PyTorch's, for logits of this dtype."""
        units = (LAST_PLACE, torch.finfo(dtype).eps, torch.finfo(dtype).eps)
        return Errors(*(error + max(error, unit) for error, unit in zip(self, units, strict=True)))

    def within(self, allowed: Errors) -> bool:
        """True if no error is larger than allowed, or NaN."""
        return all(error <= limit for error, limit in zip(self, allowed, strict=True))


def errors(
    model: nn.Module, loss_of: LossOf, tokens: Tensor, targets: Tensor, exact: list[Tensor], plain: Tensor
) -> Errors:
    """The errors of one loss, whose gradient with respect to the weights should be `exact`; from `wide_gradients`.

    `plain` has the logits (batch, length, classes), for a loss that makes none.
    """
    seen: dict[str, Tensor] = {"logits": plain}

    def watch(_module: nn.Module, _inputs: Any, logits: Tensor) -> None:
        seen["logits"] = logits.detach().clone()  # the loss may overwrite the logits by their gradient
        logits.register_hook(lambda gradient: seen.update(gradient=gradient.detach()))

    handle = model.lm_head.register_forward_hook(watch)
    loss = loss_of(model, tokens, targets)
    handle.remove()
    loss.backward()
    parameters = list(model.parameters())
    off = norm([weight.grad - right for weight, right in zip(parameters, exact, strict=True)]) / norm(exact)
    model.zero_grad()
    logits, gradient = seen["logits"].flatten(0, 1), seen.get("gradient", plain).flatten(0, 1)
    right_loss, of_logits = at_logits(logits, gradient, targets.flatten())
    return Errors(abs(float(loss.detach()) / right_loss - 1), of_logits if "gradient" in seen else 0.0, off)


def norm(tensors: list[Tensor]) -> float:
    """Euclidean norm of all numbers of some tensors."""
    return float(torch.stack([tensor.double().norm() for tensor in tensors]).norm())


def at_logits(logits: Tensor, gradient: Tensor, targets: Tensor) -> tuple[float, float]:
    """The mean loss of the logits (rows, classes) in float64, and the largest error of an element of its gradient."""
    count = (targets != IGNORED).sum()
    total, worst = (torch.zeros((), dtype=torch.float64, device=logits.device) for _ in range(2))
    rows = max(1, AT_ONCE // logits.shape[1])
    for x, found, target in zip(*(tensor.split(rows) for tensor in (logits, gradient, targets)), strict=True):
        counts = (target != IGNORED)[:, None]
        chosen = target[:, None].where(counts, 0)
        ones = torch.ones_like(chosen, dtype=torch.float64)
        logarithms = x.double().log_softmax(1)
        total -= logarithms.gather(1, chosen).where(counts, 0.0).sum()
        p = logarithms.exp_()
        exact = p.scatter_add(1, chosen, -ones) * counts
        sizes = p.clamp_(min=RARE).scatter_add_(1, chosen, ones)
        # The mean divides every row's gradient by the number of rows that count.
        worst = torch.maximum(worst, ((found.double() * count - exact).abs() / sizes).max())
    return float(total / count), float(worst)


def wide_gradients(model: nn.Module, loss_of: LossOf, tokens: Tensor, targets: Tensor, dtype: torch.dtype) -> list[Any]:
    """The gradient with respect to each weight, from a copy of the model in a wider dtype.

    The sequences pass through the model one by one, because their logits take more memory than those of the model.  All
    have the same number of targets, so that the mean of their means is the mean of all.
    """
    copy = deepcopy(model).to(dtype)
    for read, following in zip(tokens.split(1), targets.split(1), strict=True):
        (loss_of(copy, read, following) / len(tokens)).backward()
    return [weight.grad for weight in copy.parameters()]


def round_differently(model: nn.Module, size: float, seed: int) -> None:
    """Change every element of the gradient with respect to the logits at random, by up to this relative size.

    The result is rounded to the dtype of the gradient.
    """
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)

    def change(gradient: Tensor) -> Tensor:
        noise = torch.empty_like(gradient).uniform_(-1, 1, generator=generator)
        return noise.mul_(gradient).mul_(size).add_(gradient)

    def watch(_module: nn.Module, _inputs: Any, logits: Tensor) -> None:
        logits.register_hook(change)

    model.lm_head.register_forward_hook(watch)


class Samples(NamedTuple):
    """Curves of trainings that differ from each other only by rounding.

    Attributes:
        center: The curve of PyTorch's loss: (steps,), float64.
        others: The curves of further trainings with PyTorch's loss that round differently: (samples, steps), float64.
    """

    center: Tensor
    others: Tensor

    def distance(self, curve: Tensor) -> float:
        """How far a curve is from PyTorch's, in units of the usual distance; NaN for a curve with NaN.

        The usual distance at a step is the root of the mean square over the samples.  The result is a geometric mean
        over the steps: neither the late steps, where all curves are far apart, nor a few steps with a large difference
        hide the others.  It leaves out the first loss, which precedes every update.  A difference that the rounding of
        the two losses to float32 explains counts as that rounding.
        """
        rounding = 2 * LAST_PLACE * self.center.abs()
        usual = (self.others - self.center).square().mean(0).sqrt()
        ratios = (curve - self.center).abs().maximum(rounding) / usual.maximum(rounding)
        return float(ratios[1:].log().mean().exp())

    def distances(self) -> Tensor:
        """The distance of each sample, in units of the usual distance of the others."""
        return torch.tensor([self._without(i).distance(curve) for i, curve in enumerate(self.others)])

    def _without(self, i: int) -> Samples:
        return Samples(self.center, torch.cat((self.others[:i], self.others[i + 1 :])))

    def allowed(self) -> float:
        """The largest distance that rounding explains: ten standard deviations above the mean of the samples.

        Ten are many, because the distances have no normal distribution: a single weight that moves the other way once
        can take a curve far.  In trials with small models, eight of 24 samples set the limit, and the others tested
        it: five were too few for up to 2 of 100 correct curves, and ten were enough for all.
        """
        found = self.distances()
        return float(found.mean() + 10 * found.std())
