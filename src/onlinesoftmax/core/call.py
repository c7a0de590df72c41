"""The call: one call of an operation with its tensors, and the results that have names, for the Python layers.

A public function checks the arguments that need no framework and makes a `Call`.  torch/run.py takes the calls on
torch tensors, numpy/ those on NumPy arrays.  The planner and the kernels read a task instead (task.py), which has no
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .arrays import Array
from .declaration import Operation
from .options import PLAIN, ScoreOptions
from .task import ANY, Choice, ColumnRange

NOTHING: Mapping[str, Array] = {}
"""No operands besides the input.  A plain dict, because torch.compile of PyTorch 2.9 takes no proxy of one."""


class Settings(NamedTuple):
    """Arguments of a call that are neither tensors nor score options; hashable.

    Attributes:
        dim: The softmax dimension; some operations take several.
        dtype: Dtype of the result; None for the dtype of the input.
        keepdim: True where a result per row keeps the softmax dimension with size 1.
        choice: The parts of the plan that the caller forces.
        part: Position of the columns in longer rows; None where the rows are whole.
    """

    dim: Any
    dtype: Any = None
    keepdim: bool = False
    choice: Choice = ANY
    part: ColumnRange | None = None


class Call(NamedTuple):
    """One call of an operation.

    Attributes:
        operation: Its declaration.
        x: The input.
        settings: Dimension, dtype, keepdim, and the parts of the plan that the caller forces.
        options: The score options; None where every one is at its default.
        out: Tensor or array that receives the result; None for a new one.
        beside: Operands besides the input and the score options, by name: dy, lse, logits.
    """

    operation: Operation
    x: Array
    settings: Settings
    options: ScoreOptions | None = None
    out: Any = None
    beside: Mapping[str, Array] = NOTHING

    # No property, which torch.compile of PyTorch 2.10 cannot trace.
    def scores(self) -> ScoreOptions:
        """The score options, at their defaults where none is given."""
        return self.options or PLAIN

    def with_settings(self, **values: Any) -> Call:
        """The call with other settings."""
        return self._replace(settings=self.settings._replace(**values))

    def with_operands(self, **more: Any) -> Call:
        """The call with more operands besides the input and the score options."""
        return self._replace(beside={**self.beside, **more})


class LossStatistics(NamedTuple):
    """Statistics of each row, returned with the loss and detached; floating ones are float32 (float64 in float64).

    Attributes:
        lse: Logsumexp of the scores.
        z_loss: z_loss * lse**2, which the loss contains; 0 for an ignored row.
        entropy: Entropy of the softmax of the scores.
        largest: The class with the largest score; -1 in a row without classes.
        correct: True where that class is the target, or the most probable class of the target; False for an ignored
            row.
    """

    lse: Array
    z_loss: Array
    entropy: Array
    largest: Array
    correct: Array


class TokenLogprobs(NamedTuple):
    """Numbers of each row of logits, float32 (float64 for float64 logits), each differentiable in the logits.

    Attributes:
        logprob: Logarithm of the probability of the chosen token, or of each of several tokens.
        entropy: Entropy of the distribution; None where it was not asked for.
        lse: Logsumexp of the scores.
    """

    logprob: Array
    entropy: Array | None
    lse: Array
