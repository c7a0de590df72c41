"""The classes of a head that lie on other processes, as the plans of a call see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .rows import Statistics

Tensor = torch.Tensor


class Sharing(NamedTuple):
    """The position of the local classes, and the two exchanges of a chunk of logits.

    Attributes:
        first: Number of classes on the processes before this one.
        total: Number of classes on all processes.
        merged: Function (statistics of the local classes) that returns those of all classes.
        summed: Function (total, out) that starts to add a float32 or float64 tensor over the processes, and returns the
            function that waits, writes the sum to `out`, and returns `out`.
    """

    first: int
    total: int
    merged: Callable[[Statistics], Statistics]
    summed: Callable[[Tensor, Tensor], Callable[[], Tensor]]
