"""A case's result in float64, made again piece by piece: a row of 2^28 would take 2 GB at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from typing import Any

from .cases import Case
from .inputs import SCALE, SOFTCAP, Inputs

PIECE = 1 << 23
"""Elements that are computed at once: 64 MB in float64."""

Place = tuple[slice, ...]
"""Where a piece lies in the input."""

Exact = Callable[[Place], tuple[Any, Any]]
"""At a piece, the exact result, and the size of what was subtracted to get it; None where nothing was."""


def pieces(case: Case) -> Iterator[Place]:
    """Slices of the input: some of the first outer dimension, and of a row where even one is too long."""
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


def of_row(case: Case, place: Place) -> Place:
    """The same piece of what has one number for each row, its dimension kept with size 1."""
    return (*place[: case.dim], slice(None), *place[case.dim + 1 :])


def exact(case: Case, inputs: Inputs) -> Exact:
    """What every row needs as a whole is computed now, the pieces when they are asked for."""
    return _gradient(case, inputs) if case.backward else _forward(case, inputs)


def _forward(case: Case, inputs: Inputs) -> Exact:
    import torch

    dim, scores = case.dim, _scores(case, inputs)
    m = _per_row(case, inputs[0], -inf)
    for place in pieces(case):
        there = of_row(case, place)
        m[there] = torch.maximum(m[there], scores(place).amax(dim, keepdim=True))
    l = _per_row(case, inputs[0])
    for place in pieces(case):
        there = of_row(case, place)
        l[there] += (scores(place) - m[there]).exp().sum(dim, keepdim=True)

    def at(place: Place) -> tuple[Any, Any]:
        there = of_row(case, place)
        if case.operation == "logsumexp":
            return m[there] + l[there].log(), None
        shifted = scores(place) - m[there]
        return (shifted.exp() / l[there] if case.operation == "softmax" else shifted - l[there].log()), None

    return at


def _scores(case: Case, inputs: Inputs) -> Callable[[Place], Any]:
    x, *beside = (t.expand(case.shape) for t in inputs)

    def at(place: Place) -> Any:
        z, more = x[place].double(), iter(beside)
        if "scale" in case.fused:
            z = z * SCALE
        if "softcap" in case.fused:
            z = SOFTCAP * (z / SOFTCAP).tanh()
        if "bias" in case.fused:
            z = z + next(more)[place]
        if "mask" in case.fused:
            z = z.masked_fill(~next(more)[place], -inf)
        if "causal" in case.fused:
            query, key = (_index(case, axis, place, x.device) for axis in (case.dim - 1, case.dim))
            z = z.masked_fill(key > query + case.shape[case.dim] - case.shape[case.dim - 1], -inf)
        return z

    return at


def _index(case: Case, axis: int, place: Place, device: Any) -> Any:
    """Positions along an axis at a piece, of a shape that broadcasts to it."""
    import torch

    numbers = torch.arange(case.shape[axis], device=device)[place[axis]]
    return numbers.view([-1 if i == axis else 1 for i in range(len(case.shape))])


def _gradient(case: Case, inputs: Inputs) -> Exact:
    dim = case.dim
    if case.forward == "logsumexp":
        x, lse, dlse = inputs[0], inputs[1].unsqueeze(dim), inputs[2].unsqueeze(dim)

        def of_logsumexp(place: Place) -> tuple[Any, Any]:
            there = of_row(case, place)
            return dlse[there].double() * (x[place].double() - lse[there].double()).exp(), None

        return of_logsumexp

    y, dy = inputs
    softmax = case.forward == "softmax"
    total = _per_row(case, y)
    for place in pieces(case):
        part = dy[place].double()
        total[of_row(case, place)] += (part * y[place] if softmax else part).sum(dim, keepdim=True)

    def at(place: Place) -> tuple[Any, Any]:
        there = of_row(case, place)
        wide, part = y[place].double(), dy[place].double()
        part, whole = (wide * part, wide * total[there]) if softmax else (part, wide.exp() * total[there])
        return part - whole, part.abs().maximum(whole.abs())

    return at


def _per_row(case: Case, like: Any, value: float = 0.0) -> Any:
    import torch

    shape = [1 if i == case.dim else n for i, n in enumerate(case.shape)]
    return torch.full(shape, value, dtype=torch.float64, device=like.device)
