"""The request: a task and the plan for it.  A backend gets one and returns the function that runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..core.layout import Layout
from ..core.operations import Accumulator, Operation
from ..core.task import Task
from ..planner.plan import Plan


@dataclass(frozen=True)
class Request:
    """A task and its plan: all that a backend must know to prepare a launch, before there is data.

    Attributes:
        task: What to compute, on which tensors.
        plan: Who runs it, with which blocks.
        follows_divisor: True where the kernel before this one on the stream computes `dy`, one number for all rows: the
            reciprocal of a mean's divisor.  That kernel writes nothing else, so this one may begin before it has ended.
    """

    task: Task
    plan: Plan
    follows_divisor: bool = False

    @property
    def operation(self) -> Operation:
        """The operation's declaration."""
        return self.task.operation

    @property
    def layout(self) -> Layout:
        """Rows of every tensor."""
        return self.task.layout

    @property
    def dtypes(self) -> Mapping[str, str]:
        """Name of the dtype of every tensor."""
        return self.task.dtypes

    @property
    def sums(self) -> tuple[Accumulator, ...]:
        """The sums that a state keeps for the outputs that are written."""
        return self.task.operation.summed(self.task.outputs, {*self.task.dtypes, *self.task.numbers})

    @property
    def exact_sums(self) -> bool:
        """True where sums need float64: a result is float32 or float64, or the entropy is written.

        The entropy is lse - zl / l.  Near 0 it has the absolute rounding errors of l, which is at least 1, and of zl.
        """
        return self.task.exact or any(one.rescaled for one in self.sums[1:])

    @property
    def peeled(self) -> bool:
        """True where unaligned rows are split into head, body and tail."""
        return self.plan.vector > 1

    def has(self, name: str) -> bool:
        """True where the request has this tensor (operand or output) or this number."""
        return name in self.task.dtypes or name in self.task.numbers
