"""The float64 result of a case, computed piece by piece: a row of 2^28 elements would take 2 GB at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import Any

from ...core.arrays import namespace
from ...core.formulas import picked
from ...core.options import Functions, scores
from ...ops.reference import size_of_terms
from .cases import INCOMING, STATISTIC_WEIGHT, STATISTICS, Case

PIECE = 1 << 23
"""Elements that are computed at once: 64 MB in float64."""

Inputs = tuple[Any, ...]
"""Torch tensors, in the order of `Case.tensors`."""

Place = tuple[slice, ...]
"""The slices of the input that make a piece."""

Exact = Callable[[Place], tuple[Any, Any]]
"""From a piece to the exact output there, and the size of the terms whose difference it is (None where there are none).

A per-row output has size 1 along the softmax dimension.
"""


def pieces(case: Case) -> Iterator[Place]:
    """Pieces that cover the input: slices of the first outer dimension, and of a row where one row is too long."""
    shape, dim = case.shape, case.dim
    outer = next((i for i in range(len(shape)) if i != dim), None)
    rows = shape[outer] if outer is not None else 1
    each = case.elements // rows
    row_step, col_step = max(1, PIECE // each), max(1, shape[dim] * PIECE // max(each, PIECE))
    for row in range(0, rows, row_step):
        for col in range(0, shape[dim], col_step):
            place = [slice(None)] * len(shape)
            if outer is not None:
                place[outer] = slice(row, row + row_step)
            place[dim] = slice(col, col + col_step)
            yield tuple(place)


def rows_of(case: Case, place: Place) -> Place:
    """The rows of a piece, in a tensor with one value per row and size 1 along the softmax dimension."""
    return (*place[: case.dim], slice(None), *place[case.dim + 1 :])


def exact(case: Case, inputs: Inputs, output: str | None = None) -> Exact:
    """The function from a piece to the exact output.  Row maxima and sums are computed now, outputs when asked for.

    Args:
        case: The case without a gradient through autograd, for which there is `exact_gradient`.
        inputs: Its tensors.
        output: Name of the output; the main output by default.
    """
    return of_operands(case, dict(zip(case.tensors, inputs, strict=True)), output or case.declaration.result.name)


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
    statistics = STATISTICS[case.operation]
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


def whole(case: Case, at: Exact) -> Any:
    """All values of an exact output with one value per row, in float64, of `case.row_shape`."""
    found = None
    for place in pieces(case):
        value, _ = at(place)
        found = _per_row(case, value, 0.0) if found is None else found
        found[rows_of(case, place)] = value
    assert found is not None
    return found.squeeze(case.dim)


def of_operands(case: Case, known: Mapping[str, Any], name: str) -> Exact:
    """`exact` of one output for operands and score options by name; an element operand may be a function of a piece."""
    operation, formula = case.declaration, case.declaration.formula
    rows = {name: known[name].unsqueeze(case.dim) for name in operation.row_operands if name in known}
    # The first operand that is a tensor: the logits, or the incoming gradient.
    like = next(t for t in known.values() if not callable(t))
    xp, elements = namespace(like), _elements(case, known, like.device)

    def values(place: Place) -> dict[str, Any]:
        there = rows_of(case, place)
        return elements(place) | {name: wide(t[there]) for name, t in rows.items()}

    sums = operation.summed((name,))
    if any(accumulator.rescaled for accumulator in sums):
        m = _per_row(case, like, -inf)
        for place in pieces(case):
            there = rows_of(case, place)
            m[there] = xp.maximum(m[there], xp.max(elements(place)["x"], case.dim))
        rows["m"] = m
    of_target = operation.has_target and not operation.backward
    totals = {each: _per_row(case, like, 0.0) for each in (*(a.name for a in sums), *("z_target",) * of_target)}
    for place in pieces(case) if totals else ():
        found = values(place)
        chosen = picked(xp, found, found["columns"], lambda t: xp.sum(t, case.dim)) if of_target else {}
        for each, total in totals.items():
            there = rows_of(case, place)
            total[there] += chosen[each] if each in chosen else xp.sum(formula.sums[each](xp, **found), case.dim)
    rows |= totals

    def at(place: Place) -> tuple[Any, Any]:
        found = values(place)
        return formula.outputs[name](xp, **found), size_of_terms(case.operation, xp, found)

    return at


def _elements(case: Case, known: Mapping[str, Any], device: Any) -> Callable[[Place], dict[str, Any]]:
    """The function from a piece to the element operands there: x is the score where the operation takes logits.

    Where rows have a target, the numbers of the columns and their count are among them.
    """
    import torch

    functions = Functions(torch.tanh, torch.where)
    names = (*case.declaration.element_operands, *case.option_tensors)
    tensors = {name: known[name] for name in names}

    def value(name: str, place: Place) -> Any:
        t = tensors[name]
        return t(place) if callable(t) else wide(t.expand(case.shape)[place])

    def at(place: Place) -> dict[str, Any]:
        found = {name: value(name, place) for name in case.declaration.element_operands}
        options = case.score_options({name: value(name, place) for name in case.option_tensors})
        seen = _seen(case, place, device) if options.causal else None
        found["x"] = scores(functions, found["x"], options, seen)
        if case.declaration.has_target:
            found |= {"columns": _index(case, case.dim, place, device), "cols": case.shape[case.dim]}
        return found

    return at


def _seen(case: Case, place: Place, device: Any) -> Any:
    """The causal mask of a piece: True where a query may see a key."""
    query, key = (_index(case, axis, place, device) for axis in (case.dim - 1, case.dim))
    return key <= query + case.shape[case.dim] - case.shape[case.dim - 1]


def _index(case: Case, axis: int, place: Place, device: Any) -> Any:
    """Positions along an axis at a piece, of a shape that broadcasts to it."""
    import torch

    numbers = torch.arange(case.shape[axis], device=device)[place[axis]]
    return numbers.view([-1 if i == axis else 1 for i in range(len(case.shape))])


def wide(t: Any) -> Any:
    """A floating tensor in float64; integers and booleans as they are."""
    return t.double() if t.is_floating_point() else t


def _per_row(case: Case, like: Any, value: float) -> Any:
    import torch

    shape = [1 if i == case.dim else n for i, n in enumerate(case.shape)]
    return torch.full(shape, value, dtype=torch.float64, device=like.device)
