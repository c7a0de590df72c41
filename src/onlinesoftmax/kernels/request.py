"""The request: a task and the plan for it.  A backend gets one and returns the function that runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..core.declaration import Operation
from ..core.task import Task
from ..planner.plan import Plan


class Rest(NamedTuple):
    """Place of the last columns of the rows, where it is not behind the others.

    Attributes:
        first: The first of these columns: a multiple of 16 bytes.
        stride: Elements from one row of them to the next.
    """

    first: int
    stride: int


@dataclass(frozen=True)
class Request:
    """A task and its plan: all that a backend must know to prepare a launch, before there is data.

    Attributes:
        task: What to compute, on which tensors.
        plan: Who runs it, with which blocks.
        follows_divisor: True where the kernel before this one on the stream computes `dy`, one number for all rows: the
            reciprocal of a mean's divisor.  That kernel writes nothing else, so this one may begin before it has ended.
        rest: Where the last columns of x lie, which a call passes as the tensor "rest"; None where they are in x.  Rows
            begin on 16 bytes in both tensors, and an element output overwrites x.  Not for strategy `grid`.
    """

    task: Task
    plan: Plan
    follows_divisor: bool = False
    rest: Rest | None = None

    @property
    def operation(self) -> Operation:
        """The operation's declaration."""
        return self.task.operation

    def has(self, name: str) -> bool:
        """True where the request has this tensor (operand or output) or this number."""
        return name in self.task.tensors or name in self.task.numbers
