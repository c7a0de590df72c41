"""The check before any speed is shown: every output against float64, in pieces that fit memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

from ..core.operations import OPERATIONS
from .cases import Case
from .exact import exact, of_row, pieces

OTHERS_SLACK = 4
"""Others may be this much less exact than the framework before they count as wrong: their choice, not a fault."""


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
    """The float64 result of a case."""

    def __init__(self, case: Case, *inputs: Any) -> None:
        self.case, self._exact = case, exact(case, inputs)

    def judge(self, y: Any, allowed: float = 0.0, ours: bool = True) -> Verdict:
        """Whether an output is right.

        The rule is the tests': no element is further off than the framework's largest error (`allowed`)
        plus one unit in the last place; others have OTHERS_SLACK times that, and so has float64,
        as this reference rounds like it.  A gradient is a difference, and no more exact than its terms
        were as they were accumulated: one unit of theirs is allowed too.
        """
        import torch

        case, dtype = self.case, getattr(torch, self.case.dtype)
        per_row = OPERATIONS[case.operation].per_row
        expected = _output_shape(case)
        if y.dtype != dtype or y.shape != expected:
            return Verdict(inf, f"gives {tuple(y.shape)} {y.dtype}, expected {expected} {dtype}")
        if per_row:
            y = y.unsqueeze(case.dim)
        accumulated = torch.promote_types(dtype, torch.float32)
        slack = 1 if ours and dtype != torch.float64 else OTHERS_SLACK
        worst, excess = 0.0, -inf
        for place in pieces(case):
            right, terms = self._exact(place)
            error = (y[of_row(case, place) if per_row else place].double() - right).abs()
            error.nan_to_num_(nan=inf, posinf=inf)
            worst = max(worst, error.max().item())
            unit = _ulp(right, dtype) if terms is None else _ulp(right, dtype) + _ulp(terms, accumulated)
            excess = max(excess, (error - slack * (allowed + unit)).max().item())
        if excess <= 0:
            return Verdict(worst, None)
        shown = f"error {worst:.1e}" if isfinite(worst) else "gives NaN or infinity"
        return Verdict(worst, f"{shown}; the framework's own {allowed:.1e}")


def poison(case: Case, device: Any) -> None:
    """Leave NaN where the allocator will put the next output, lest the last right answer pass for a new one."""
    import torch

    torch.full(_output_shape(case), torch.nan, dtype=getattr(torch, case.dtype), device=device)


def _output_shape(case: Case) -> tuple[int, ...]:
    if not OPERATIONS[case.operation].per_row:
        return case.shape
    return (*case.shape[: case.dim], *case.shape[case.dim + 1 :])


def _ulp(value: Any, dtype: Any) -> Any:
    """One unit in the last place of `dtype` at each value."""
    import torch

    info = torch.finfo(dtype)
    return value.abs().clamp_(info.smallest_normal, info.max).log2_().floor_().exp2_().mul_(info.eps)
