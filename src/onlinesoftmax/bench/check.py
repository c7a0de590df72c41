"""The check before any time is shown: every result against float64, in pieces that fit in memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import frexp, inf, isfinite
from typing import Any

from .cases import Case
from .exact import exact, pieces, rows_of

OTHERS_SLACK = 4
"""Factor of the tolerance of other libraries, which may choose to be a little less exact than the framework."""


@dataclass(frozen=True)
class Verdict:
    """The distance of a result from float64.

    Attributes:
        error: Largest absolute error; infinite where the result has NaN or infinity instead of a number.
        wrong: One sentence that says what is wrong; None when the result is right.
    """

    error: float
    wrong: str | None


class Reference:
    """The float64 result of a case."""

    def __init__(self, case: Case, *inputs: Any) -> None:
        self.case, self._exact = case, exact(case, inputs)

    def judge(self, y: Any, allowed: float = 0.0, ours: bool = True) -> Verdict:
        """Judge a result.

        The rule is that of the tests: no element is further off than the framework's largest error (`allowed`) plus
        one unit in the last place.  Other libraries have OTHERS_SLACK times that; so has float64, because this
        reference rounds like it.  A gradient is a difference, and no more exact than its two terms were as they were
        accumulated: one unit of the larger term is allowed too.
        """
        import torch

        case, dtype = self.case, getattr(torch, self.case.dtype)
        per_row, expected = case.declaration.per_row, case.result_shape
        if y.dtype != dtype or y.shape != expected:
            return Verdict(inf, f"gives {tuple(y.shape)} {y.dtype}, expected {expected} {dtype}")
        if per_row:
            y = y.unsqueeze(case.dim)
        accumulated = torch.promote_types(dtype, torch.float32)
        slack = 1 if ours and dtype != torch.float64 else OTHERS_SLACK
        worst, excess = 0.0, -inf
        for place in pieces(case):
            right, size = self._exact(place)
            found = y[rows_of(case, place) if per_row else place].double()
            # Equal infinities have no error: the logarithm of a masked element is -inf.
            error = (found - right).abs().masked_fill_(found == right, 0.0)
            error.nan_to_num_(nan=inf, posinf=inf)
            worst = max(worst, error.max().item())
            unit = _ulp(right, dtype) if size is None else _ulp(right, dtype) + _ulp(size, accumulated)
            excess = max(excess, (error - slack * (allowed + unit)).max().item())
        if excess <= 0:
            return Verdict(worst, None)
        shown = f"error {worst:.1e}" if isfinite(worst) else "gives NaN or infinity"
        return Verdict(worst, f"{shown}; the framework's own {allowed:.1e}")


def poison(case: Case, device: Any) -> None:
    """Leave NaN in the memory that the allocator will give to the next result: an old right result must not count."""
    import torch

    torch.full(case.result_shape, torch.nan, dtype=getattr(torch, case.dtype), device=device)


def _ulp(value: Any, dtype: Any) -> Any:
    """One unit in the last place of `dtype` at each value."""
    import torch

    info = torch.finfo(dtype)
    exponent = value.abs().clamp_(info.smallest_normal, info.max).log2_().floor_()
    # In float64 the logarithm of the largest number is rounded up, to the exponent of infinity.
    return exponent.clamp_(max=frexp(info.max)[1] - 1).exp2_().mul_(info.eps)
