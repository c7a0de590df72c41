"""The reduction of a loss: one scalar from the losses and the targets of all rows, without the data."""

from __future__ import annotations

from typing import NamedTuple


class Reduction(NamedTuple):
    """One reduction over all rows; equal reductions share a prepared kernel.

        divisor = sum(weight[target] of the rows that count), or their number without a weight
        total   = sum(losses) / divisor,  or sum(losses) where no divisor is known

    A row counts if its target is not `ignore_index`.  A weighted row counts only if its target is a class.

    The tensors have these names.  All are contiguous.
        losses: Loss of each row in the accumulator dtype; read where `result` is given.
        target, weight: Read where `target` and `weight` give their dtypes.  The kernel then computes the divisor.
        count: (1 / divisor, divisor) in the accumulator dtype, from an earlier reduction; read where `divides`.
        divisor: The same of this reduction; written where `keeps`, beside the total.

    Attributes:
        rows: Number of rows, at least 1.
        accumulator: Dtype of losses and divisor: "float32" or "float64".
        result: Dtype of the total.  None: the kernel writes (1 / divisor, divisor) in the accumulator dtype instead.
        divides: True where the total is divided by a divisor that is given.
        target: Dtype of the targets; None where the kernel does not compute the divisor.
        weight: Dtype of the weight; None without one.
        classes: Number of classes.
        ignore_index: Target of the rows that do not count.
        keeps: True where the divisor is written, too.
    """

    rows: int
    accumulator: str
    result: str | None = None
    divides: bool = False
    target: str | None = None
    weight: str | None = None
    classes: int = 0
    ignore_index: int = -100
    keeps: bool = False

    @property
    def tensors(self) -> dict[str, str]:
        """Dtype of each tensor that the kernel is given besides the main result, by name."""
        given = {"losses": self.result and self.accumulator, "target": self.target, "weight": self.weight}
        given["count"] = self.accumulator if self.divides else None
        given["divisor"] = self.accumulator if self.keeps else None
        return {name: dtype for name, dtype in given.items() if dtype}
