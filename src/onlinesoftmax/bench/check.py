"""The check before any speed is shown: every output against float64, in pieces that fit memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

from ..operation import OPERATIONS
from .cases import Case

PIECE = 1 << 23
"""Elements that are compared at once: 64 MB in float64."""

OTHERS_SLACK = 4
"""Others may be this much less exact than PyTorch before they count as wrong: their choice, not a fault."""


@dataclass(frozen=True)
class Verdict:
    """How far an output is from float64.

    Attributes:
        error: Largest absolute error; infinite where a number should be and is not.
        wrong: What is wrong, in one sentence; None when it is right.
    """

    error: float
    wrong: str | None


class Reference:
    """The float64 result of a case, made again piece by piece: a row of 2^28 would take 2 GB at once."""

    def __init__(self, case: Case, x: Any) -> None:
        import torch

        self.case, self.x = case, x
        # The maximum is exact in any dtype.
        self.m = x.amax(case.dim, keepdim=True).double()
        self.l = torch.zeros_like(self.m)
        for place in self._pieces():
            there = self._of_row(place)
            self.l[there] += (x[place].double() - self.m[there]).exp().sum(case.dim, keepdim=True)

    def _pieces(self) -> Iterator[tuple[slice, ...]]:
        """Slices of the input: some of the first outer dimension, and of a row where even one is too long."""
        shape, dim = self.case.shape, self.case.dim
        outer = next((i for i in range(len(shape)) if i != dim), None)
        rows = shape[outer] if outer is not None else 1
        each = self.case.elements // rows
        row_step, col_step = max(1, PIECE // each), max(1, shape[dim] * PIECE // max(each, PIECE))
        for row in range(0, rows, row_step):
            for col in range(0, shape[dim], col_step):
                place = [slice(None)] * len(shape)
                if outer is not None:
                    place[outer] = slice(row, row + row_step)
                place[dim] = slice(col, col + col_step)
                yield tuple(place)

    def _of_row(self, place: tuple[slice, ...]) -> tuple[slice, ...]:
        """The same piece of what has one number for each row."""
        return (*place[: self.case.dim], slice(None), *place[self.case.dim + 1 :])

    def _exact(self, place: tuple[slice, ...]) -> Any:
        there = self._of_row(place)
        m, l = self.m[there], self.l[there]
        if self.case.operation == "logsumexp":
            return m + l.log()
        shifted = self.x[place].double() - m
        return shifted.exp() / l if self.case.operation == "softmax" else shifted - l.log()

    def judge(self, y: Any, allowed: float = 0.0, ours: bool = True) -> Verdict:
        """Whether an output is right.

        The rule is the tests': no element is further off than PyTorch's largest error (`allowed`)
        plus one unit in the last place; others have OTHERS_SLACK times that, and so has float64,
        as this reference rounds like it.
        """
        import torch

        per_row = OPERATIONS[self.case.operation].per_row
        dtype = getattr(torch, self.case.dtype)
        expected = self.m.squeeze(self.case.dim).shape if per_row else self.x.shape
        if y.dtype != dtype or y.shape != expected:
            return Verdict(inf, f"gives {tuple(y.shape)} {y.dtype}, expected {tuple(expected)} {dtype}")
        if per_row:
            y = y.unsqueeze(self.case.dim)
        slack = 1 if ours and dtype != torch.float64 else OTHERS_SLACK
        worst, excess = 0.0, -inf
        for place in self._pieces():
            exact = self._exact(place)
            error = (y[self._of_row(place) if per_row else place].double() - exact).abs()
            error.nan_to_num_(nan=inf, posinf=inf)
            worst = max(worst, error.max().item())
            excess = max(excess, (error - slack * (allowed + _ulp(exact, dtype))).max().item())
        if excess <= 0:
            return Verdict(worst, None)
        shown = f"error {worst:.1e}" if isfinite(worst) else "gives NaN or infinity"
        return Verdict(worst, f"{shown}; PyTorch's own {allowed:.1e}")


def poison(case: Case, device: Any) -> None:
    """Leave NaN where the allocator will put the next output, lest the last right answer pass for a new one."""
    import torch

    shape = list(case.shape)
    if OPERATIONS[case.operation].per_row:
        del shape[case.dim]
    torch.full(shape, torch.nan, dtype=getattr(torch, case.dtype), device=device)


def _ulp(value: Any, dtype: Any) -> Any:
    """One unit in the last place of `dtype` at each value."""
    import torch

    info = torch.finfo(dtype)
    return value.abs().clamp_(info.smallest_normal, info.max).log2_().floor_().exp2_().mul_(info.eps)
