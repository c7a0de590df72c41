"""The check before any time is shown: every result against float64, in pieces that fit in memory.

A row of 2^28 elements would take 2 GB in float64 at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import frexp, inf, isfinite
from typing import Any, NamedTuple

import torch

from ...core.arrays import namespace
from ...core.formulas import picked
from ...core.options import Functions, scores
from ...ops.reference import size_of_terms
from .cases import GRADIENT, INCOMING, OTHERS_SLACK, STATISTIC_WEIGHT, STATISTICS, Case, Inputs, Returned

PIECE = 1 << 23
"""Elements that are computed at once: 64 MB in float64."""

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
    numbers = torch.arange(case.shape[axis], device=device)[place[axis]]
    return numbers.view([-1 if i == axis else 1 for i in range(len(case.shape))])


def wide(t: Any) -> Any:
    """A floating tensor in float64; integers and booleans as they are."""
    return t.double() if t.is_floating_point() else t


def _per_row(case: Case, like: Any, value: float) -> Any:
    shape = [1 if i == case.dim else n for i, n in enumerate(case.shape)]
    return torch.full(shape, value, dtype=torch.float64, device=like.device)


@dataclass(frozen=True)
class Verdict:
    """The distance of a result from float64.

    Attributes:
        errors: Largest absolute error of each tensor of the result; infinite where a tensor has NaN or infinity
            instead of a number.
        wrong: One sentence that says what is wrong; None when the result is right.
    """

    errors: tuple[float, ...]
    wrong: str | None

    @property
    def error(self) -> float:
        """The error of the first tensor: the gradient where there is one, else the main output."""
        return self.errors[0]


class Part(NamedTuple):
    """One tensor of the result, and its exact values.

    Attributes:
        returned: Its name, shape and dtype.
        places: The pieces in which it is compared.
        at: The function from a piece to the exact values.
    """

    returned: Returned
    places: list[Place]
    at: Exact


class Reference:
    """The float64 result of a case."""

    def __init__(self, case: Case, *inputs: Any) -> None:
        self._parts = [_part(case, returned, inputs) for returned in case.returned]

    def allowed(self, y: Any) -> tuple[float, ...]:
        """The error that each tensor of a result may have: that of `y`, which the framework's own function returned.

        It is 0 where `y` has NaN or infinity instead of a number.
        """
        return tuple(error if isfinite(error) else 0.0 for error in self.judge(y, inf, ours=False).errors)

    def judge(self, y: Any, allowed: float | tuple[float, ...] = 0.0, ours: bool = True) -> Verdict:
        """Judge a result: a tensor, or a tuple with the tensors of `Case.returned`.

        The rule is that of the tests: no element is further off than the framework's largest error in this tensor
        (`allowed`) plus one unit in the last place.  Other libraries have OTHERS_SLACK times that; so has float64,
        because this reference rounds like it.  A gradient is a difference, and no more exact than its two terms were
        as they were accumulated: one unit of the larger term is allowed too.  So is one of the larger term of an
        entropy, log(l) or sum((m - z) * p), which is at most the entropy itself.  One unit of l moves log(l) by as much
        as one unit of 1, so this is the least that is allowed.
        """
        found = y if isinstance(y, tuple) else (y,)
        count = len(self._parts)
        limits = allowed if isinstance(allowed, tuple) else (allowed,) * count
        if len(found) != count:
            return Verdict((inf,) * count, f"gives {len(found)} tensors, expected {count}")
        pairs = [
            _judge(part, tensor, limit, ours)
            for part, tensor, limit in zip(self._parts, found, limits, strict=True)
        ]  # fmt: skip
        names = [f"{part.returned.name}: " if count > 1 else "" for part in self._parts]
        wrong = [name + reason for name, (_, reason) in zip(names, pairs, strict=True) if reason]
        return Verdict(tuple(error for error, _ in pairs), wrong[0] if wrong else None)


def _part(case: Case, returned: Returned, inputs: Inputs) -> Part:
    if returned.name == GRADIENT:
        return Part(returned, list(pieces(case)), exact_gradient(case, inputs))
    forward, given = case.without_gradient, dict(zip(case.tensors, inputs, strict=True))
    operands = tuple(given[name] for name in forward.tensors)
    at = exact(forward, operands, returned.name)
    if returned.kind == "element":
        return Part(returned, list(pieces(case)), at)
    rows = whole(forward, at)
    value = rows.mean() if returned.kind == "call" else rows
    size = value.clamp(min=1.0) if returned.name in STATISTICS[case.operation] else None
    return Part(returned, [()], lambda _: (value, size))


def _judge(part: Part, y: Any, allowed: float, ours: bool) -> tuple[float, str | None]:
    """(largest error, sentence that says what is wrong or None) of one tensor."""
    _, kind, expected, name = part.returned
    dtype = getattr(torch, name)
    accumulated = torch.promote_types(dtype, torch.float32)
    # Other libraries may return a loss as they accumulated it.
    dtypes = (dtype,) if ours or kind == "element" else (dtype, accumulated)
    if y.dtype not in dtypes or y.shape != expected:
        return inf, f"gives {tuple(y.shape)} {y.dtype}, expected {expected} {dtype}"
    slack = 1 if ours and dtype != torch.float64 else OTHERS_SLACK
    worst, excess = 0.0, -inf
    for place in part.places:
        right, size = part.at(place)
        found = y[place].double()
        # Equal infinities have no error: the logarithm of a masked element is -inf.
        error = (found - right).abs().masked_fill_(found == right, 0.0)
        error.nan_to_num_(nan=inf, posinf=inf)
        worst = max(worst, error.max().item())
        unit = _ulp(right, dtype) if size is None else _ulp(right, dtype) + _ulp(size, accumulated)
        excess = max(excess, (error - slack * (allowed + unit)).max().item())
    if excess <= 0:
        return worst, None
    shown = f"error {worst:.1e}" if isfinite(worst) else "gives NaN or infinity"
    return worst, f"{shown}; the framework's own {allowed:.1e}"


def poison(case: Case, device: Any) -> None:
    """Leave NaN in the memory that the allocator will give to the next result: an old right result must not count."""
    # All of them are held at once, so that no two share their memory.
    held = [
        torch.full(returned.shape, torch.nan, dtype=getattr(torch, returned.dtype), device=device)
        for returned in case.returned
    ]
    del held


def _ulp(value: Any, dtype: Any) -> Any:
    """One unit in the last place of `dtype` at each value."""
    info = torch.finfo(dtype)
    exponent = value.abs().clamp_(info.smallest_normal, info.max).log2_().floor_()
    # In float64 the logarithm of the largest number is rounded up, to the exponent of infinity.
    return exponent.clamp_(max=frexp(info.max)[1] - 1).exp2_().mul_(info.eps)
