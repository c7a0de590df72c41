"""The check before any time is shown: every result against float64, in pieces that fit in memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import frexp, inf, isfinite
from typing import Any, NamedTuple

from .cases import GRADIENT, STATISTICS, Case, Returned
from .exact import Exact, Inputs, Place, exact, exact_gradient, pieces, whole

OTHERS_SLACK = 4
"""Factor of the tolerance of other libraries, which may choose to be a little less exact than the framework."""


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
        entropy, log(l) or sum((m - z) * p), which is at most the entropy itself.
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
    size = value if returned.name in STATISTICS[case.operation] else None
    return Part(returned, [()], lambda _: (value, size))


def _judge(part: Part, y: Any, allowed: float, ours: bool) -> tuple[float, str | None]:
    """(largest error, sentence that says what is wrong or None) of one tensor."""
    import torch

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
    import torch

    # All of them are held at once, so that no two share their memory.
    held = [
        torch.full(returned.shape, torch.nan, dtype=getattr(torch, returned.dtype), device=device)
        for returned in case.returned
    ]
    del held


def _ulp(value: Any, dtype: Any) -> Any:
    """One unit in the last place of `dtype` at each value."""
    import torch

    info = torch.finfo(dtype)
    exponent = value.abs().clamp_(info.smallest_normal, info.max).log2_().floor_()
    # In float64 the logarithm of the largest number is rounded up, to the exponent of infinity.
    return exponent.clamp_(max=frexp(info.max)[1] - 1).exp2_().mul_(info.eps)
