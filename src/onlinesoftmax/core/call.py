"""The call: one record that a public function makes and every layer below reads.

A public function checks what needs no framework, makes a `Call`, and passes it on: to torch/dispatch.py for torch
tensors, to numpy.py for NumPy arrays.  Where a layer needs the call without its data, it makes a task (task.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from .arrays import Array
from .operations import Operation
from .options import PLAIN, ScoreOptions
from .task import ANY, Choice

NOTHING: Mapping[str, Array] = MappingProxyType({})
"""No operands besides the input."""


class Settings(NamedTuple):
    """What a call asks for besides tensors and score options; hashable.

    Attributes:
        dim: The softmax dimension; some operations take several.
        dtype: Dtype of the result; None for the dtype of the input.
        keepdim: True where a result per row keeps the softmax dimension with size 1.
        choice: What is forced of the plan.
    """

    dim: Any
    dtype: Any = None
    keepdim: bool = False
    choice: Choice = ANY


class Call(NamedTuple):
    """One call of an operation.

    Attributes:
        operation: Its declaration.
        x: The input.
        settings: Dimension, dtype, and what is forced of the plan.
        options: The score options; None where every one is at its default.
        out: Where to write the result; None for a new array.
        beside: Operands besides the input and the score options, by name: dy, lse, logits.
    """

    operation: Operation
    x: Array
    settings: Settings
    options: ScoreOptions | None = None
    out: Any = None
    beside: Mapping[str, Array] = NOTHING

    @property
    def scores(self) -> ScoreOptions:
        """The score options, at their defaults where none is given."""
        return self.options or PLAIN

    @property
    def plain(self) -> bool:
        """True where the call gives no score option and forces nothing of the plan."""
        return self.options is None and self.settings.choice is ANY
