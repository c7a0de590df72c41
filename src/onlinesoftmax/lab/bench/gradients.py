"""The float64 gradient of a case with a gradient through autograd, computed piece by piece as the outputs are."""

from __future__ import annotations

from typing import Any

from .cases import INCOMING, STATISTIC_WEIGHT, STATISTICS, Case
from .exact import Exact, Inputs, exact, of_operands, whole


def exact_gradient(case: Case, inputs: Inputs) -> Exact:
    """The function from a piece to the exact gradient of a case with a gradient.

    The outputs of the forward call that the gradient reads are exact too; they are not rounded in between.
    """
    import torch

    forward, gradient = case.without_gradient, case.gradient
    known: dict[str, Any] = dict(zip(case.tensors, inputs, strict=True))
    before = tuple(known[name] for name in forward.tensors)
    if INCOMING not in known:
        # The loss is a mean over the rows.
        where = {"dtype": torch.float64, "device": inputs[0].device}
        known[INCOMING] = torch.full(case.row_shape, 1 / case.rows, **where)
    statistics = STATISTICS.get(case.operation, ())
    known |= {f"d{name}": STATISTIC_WEIGHT * known[INCOMING] for name in statistics}
    operands = {operand.name: operand for operand in gradient.declaration.operands}
    for output in forward.declaration.outputs:
        kept = output.name in operands and (output.name in statistics or not operands[output.name].optional)
        if kept and operands[output.name].kind == "row":
            known[output.name] = whole(forward, exact(forward, before, output.name))
    if not gradient.declaration.scores:
        at = exact(forward, before)
        known["x"] = lambda place: at(place)[0]
    used = {name: value for name, value in known.items() if name in operands}
    return of_operands(gradient, used, gradient.declaration.result.name)
