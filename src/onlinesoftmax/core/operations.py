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
        name: The public function's name; with _backward for its gradient.
        per_row: True when a row gives one number (logsumexp), False when it gives a row.
        inputs: Tensors of the input's shape that are read: a gradient reads the saved one and dy.
        reduces: False when a row needs no sum of its own: the gradient of logsumexp is given its lse.
    """

    name: str
    per_row: bool
    inputs: int = 1
    reduces: bool = True

    @property
    def backward(self) -> bool:
        """Whether it is a gradient."""
        return self.name.endswith("_backward")

    @property
    def forward(self) -> str:
        """The public function that it is, or is the gradient of."""
        return self.name.removesuffix("_backward")


OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        Operation("softmax", per_row=False),
        Operation("log_softmax", per_row=False),
        Operation("logsumexp", per_row=True),
        Operation("softmax_backward", per_row=False, inputs=2),
        Operation("log_softmax_backward", per_row=False, inputs=2),
        Operation("logsumexp_backward", per_row=False, reduces=False),
    )
}

FORWARD: tuple[str, ...] = tuple(name for name, operation in OPERATIONS.items() if not operation.backward)
"""The public functions."""
