"""The declaration of cross-entropy and of its gradient."""

from __future__ import annotations

from ...core.accumulators import Argmax, PlainSum
from ...core.declaration import INEXACT_STATISTICS, STATE, SUMS, TARGET, Accumulator, Operand, Operation, Output, X
from . import formulas

CLASSES = (
    Operand("weight", "element", optional=True),
    Operand("weight_sum", "call", optional=True),
    Operand("smoothing", "call", optional=True, number=True),
    Operand("z_loss", "call", optional=True, number=True),
    Operand("ignore_index", "call", "integer", optional=True, number=True),
)
"""Optional operands of cross-entropy.

weight: A factor for each class, broadcast over the rows.
weight_sum: Sum of the weights, given where `smoothing` is given, and the number of classes without weights.
smoothing: Part of the target that is spread over all classes.
z_loss: Factor of lse², which is added to the loss.
ignore_index: Target of the rows that count for nothing.
"""

LOSSES_REDUCED = tuple(
    Output(name, "call", needs=("l", "wz"), on_request=True, exact=False) for name in ("mean_loss", "total_loss")
)
"""The scalars to which losses are reduced.

If one of them is written, y is the gradient of that scalar, and the call has no dy.  The mean divides everything by the
sum of the weights.  A caller with weights and z_loss scales the weights first, so that this sum is the number of rows
that count (`scaled_weight` in torch/loss_arguments.py).
"""

LARGEST = Output("largest", "row", "index", needs=("l", "largest"), on_request=True, exact=False)
"""The class with the largest logit, in the order of the scores; the first of equals, and of NaN.

A softcap keeps the order, but may round the scores of different logits to one number.
"""

OPTIONS = ("scale", "softcap", "mask")

# The loss of every row.  With dy, the gradient of the row's loss, a call also writes the gradient with respect to the
# input, while the row is on chip.
FORWARD = Operation(
    "cross_entropy", (X, TARGET, Operand("dy", "row", optional=True), *CLASSES),
    (*SUMS, Accumulator("wz", PlainSum, only_with="smoothing"), Accumulator("largest", Argmax)),
    (
        Output("loss", "row", "accumulator", needs=("l", "wz"), exact=False),
        *LOSSES_REDUCED,
        Output("y", "element", "input", on_request=True),
        *INEXACT_STATISTICS,
        LARGEST,
    ),
    OPTIONS, formulas.FORWARD, gradient_name="cross_entropy_backward", saved=("x", "target", "m", "l"),
    may_keep_terms=True,
)  # fmt: skip

BACKWARD = Operation(
    "cross_entropy_backward", (X, TARGET, Operand("dy", "row"), *STATE, *CLASSES), (),
    (Output("y", "element", needs=()),), OPTIONS, formulas.BACKWARD,
)  # fmt: skip
