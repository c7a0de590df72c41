"""The signature of a call on JAX arrays: all of the call but its arrays.  This module does not import JAX."""

from __future__ import annotations

from typing import NamedTuple

from ..core.arrays import Array
from ..core.declaration import Operation
from ..core.options import PLAIN, ScoreOptions
from ..core.task import ANY, Choice
from ..ops import OPERATIONS

Names = tuple[str, ...]
"""Names of mesh axes along which rows are sharded."""

Values = dict[str, Array]
"""Arrays by name: the operands of a call, or its results."""


class Signature(NamedTuple):
    """A call of an operation without its arrays: a static parameter of a primitive.

    Attributes:
        name: Name of an operation, or of one of the other formulas in eager.py.
        outputs: Names of the results, in the order of the declaration.
        options: Score options.  ARRAY stands for an array, which is an operand with the name of the option.
        numbers: Name and value of each operand that is a number and is not 0.
        choice: The backend and the strategy that the caller forces.
        factor: Number that a gradient or a tangent is multiplied by.
        axis_name: Axes of `shard_map` along which rows are sharded, if the call itself exchanges numbers.
        classes: Number of columns of a whole row, for a derivative of rows that are sharded; 0 for whole rows.  The
            target is then a local column, or the number of local columns where another device has it.  A tangent is
            the part of the local columns, which the caller sums over the devices.
    """

    name: str
    outputs: tuple[str, ...]
    options: ScoreOptions = PLAIN
    numbers: tuple[tuple[str, float], ...] = ()
    choice: Choice = ANY
    factor: float = 1.0
    axis_name: Names = ()
    classes: int = 0

    @property
    def operation(self) -> Operation | None:
        """The declaration; None for a formula that is not declared, such as a tangent."""
        return OPERATIONS.get(self.name)

    @property
    def writes_gradient(self) -> bool:
        """True where a forward call with results per row also writes their gradient, the output "y"."""
        operation = self.operation
        if operation is None or not operation.per_row:
            return False
        return any(output.kind == "element" for output in operation.written(self.outputs))

    @property
    def without_gradient(self) -> Signature:
        """The call without the gradient that it writes."""
        return self._replace(outputs=tuple(name for name in self.outputs if name != "y"))

    def number(self, name: str) -> float:
        """Value of an operand that is a number; 0 where it is not given."""
        return dict(self.numbers).get(name, 0.0)
