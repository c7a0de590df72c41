"""The classes and the tokens of a head that other processes have, as the plans of a call see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .rows import Statistics

Tensor = torch.Tensor


class Sharing(NamedTuple):
    """The position of the local classes, and the exchanges with other processes.

    Attributes:
        first: Number of classes on the processes before this one.
        total: Number of classes on all processes.
        largest: Most classes of one process, with which every process makes its plan.
        merged: Function (statistics of the local classes, targets) that returns the statistics of all classes.  The
            targets are classes of all processes; the logarithm of one that is no class is NaN.
        summed: Function (total, out) that starts to add a float32 or float64 tensor over the processes that have
            classes, and returns the function that waits, writes the sum to `out`, and returns `out`.
        over_tokens: Function (number) that adds it over the processes that have tokens.  The gradient of a sum is that
            of each number.
    """

    first: int
    total: int
    largest: int
    merged: Callable[[Statistics, Tensor], Statistics]
    summed: Callable[[Tensor, Tensor], Callable[[], Tensor]]
    over_tokens: Callable[[Tensor], Tensor]

    def local(self, target: Tensor) -> Tensor:
        """The targets counted from the first local class."""
        return target - self.first if self.first else target
