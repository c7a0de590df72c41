"""The operations, as the planner and every backend see them: a name and the memory it touches.

What an operation computes is in each backend's `ops`; how rows are reduced is in its strategies.
The two meet only here, so an operation is added without touching a strategy.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Operation:
    """One member of the family.

    Attributes:
        name: The public function's name.
        per_row: True when a row gives one number (logsumexp), False when it gives a row.
    """

    name: str
    per_row: bool


OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        Operation("softmax", per_row=False),
        Operation("log_softmax", per_row=False),
        Operation("logsumexp", per_row=True),
    )
}
