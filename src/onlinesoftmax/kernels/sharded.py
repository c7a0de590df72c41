"""Rows whose softmax dimension is sharded: the small kernels between the passes over a shard, without the data.

merge      after the all-gather: merges the states of all processes, and writes the results of each row
incoming   in backward: turns the gradient of the results into the operands of the gradient kernel of the shard
"""

from __future__ import annotations

from typing import NamedTuple

STATES = ("m", "l", "logprob")
"""Numbers that every process sends for each row; then "entropy" and "weighted" where a call needs them."""

OUTPUTS = ("y", "lse", "entropy", "m", "l")
"""Outputs of `merge`: the loss or the log-probability, two statistics, and the state of the whole row."""

TENSORS = ("states", "target", "weight", *OUTPUTS, "dy", "dlse", "count", "to_y", "to_lse", "to_flat")
"""Tensors of both kernels, in the order of their parameters; a launch has only some of them."""

INTEGERS = ("rows", "processes", "first", "cols", "classes", "ignore_index")
"""Integer parameters of both kernels, fields of ShardedRows."""

FLOATS = ("smoothing", "z_loss", "scale")
"""Float64 parameters of both kernels, fields of ShardedRows."""


class ShardedRows(NamedTuple):
    """The rows of one call, for one of the two kernels; equal descriptions share a prepared kernel.

    The tensors have these names.  All are contiguous.
        states: [process][number][row], the numbers of STATES, in the accumulator dtype.
        target: Column of each row, counted over all processes.
        weight: Factor of each class of all processes.
        y, lse, entropy, m, l: OUTPUTS; `incoming` reads m and l.
        dy, dlse: Gradients of y and of lse; one number if `scalar`, else one per row.
        count: (1 / divisor, divisor) of a mean; dy is divided by the divisor.
        to_y, to_lse: Results of `incoming`: the operands dy and dlse of the gradient.  If another
            process has the target, that kernel leaves out -dy * p, so to_lse has -dy, too.
        to_flat: A number to subtract from the gradient of every element of the row, because of the label smoothing.

    Attributes:
        rows: Number of rows, at least 1.
        processes: Number of states of each row.
        accumulator: Dtype of states and statistics: "float32" or "float64".
        result: Dtype of y, lse, dy and dlse.
        target: Dtype of the targets.
        weight: Dtype of the weight; None without one.
        loss: True for a cross-entropy, False for log-probabilities.
        scalar: True where dy is one number.
        first, cols, classes: The local columns in the whole row, as in distributed.Shards.
        ignore_index: Target of the rows that do not count.
        smoothing, z_loss, scale: Numbers of the loss, and the scale of its scores.
        names: Names of the tensors that a launch is given.
    """

    rows: int
    processes: int
    accumulator: str
    result: str
    target: str
    weight: str | None = None
    loss: bool = False
    scalar: bool = False
    first: int = 0
    cols: int = 0
    classes: int = 0
    ignore_index: int = -100
    smoothing: float = 0.0
    z_loss: float = 0.0
    scale: float = 1.0
    names: tuple[str, ...] = ()

    @property
    def sent(self) -> tuple[str, ...]:
        """Names of the numbers that a process sends for each row."""
        entropy = ("entropy",) if "entropy" in self.names else ()
        return (*STATES, *entropy, *(("weighted",) if self.smoothing else ()))

    @property
    def kind(self) -> ShardedRows:
        """The rows without the numbers that are arguments of a kernel: equal kinds share machine code."""
        return self._replace(
            rows=0, processes=0, first=0, cols=0, classes=0, ignore_index=0, scale=1.0,
            smoothing=float(self.smoothing != 0), z_loss=float(self.z_loss != 0),
        )  # fmt: skip
