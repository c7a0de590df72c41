"""The exact result of an input in long double, beside PyTorch's: what every strategy is held against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..core.operations import OPERATIONS
from .inputs import Case


class Outcome(NamedTuple):
    """A result, what it should be, and the unit that the contract counts in, for each element."""

    result: Any
    exact: np.ndarray
    unit: np.ndarray


@dataclass(frozen=True)
class Exact:
    """One input, and dy where a gradient is asked for, with PyTorch's result and the exact one.

    Attributes:
        operation: Name in OPERATIONS.
        x, before: The input, and a copy of it: nobody may change it.
        dim: The softmax dimension.
        dy: The gradient of the forward operation's output; None where that is the result itself.
        theirs, theirs_wide: PyTorch's outcome, and its result in long double.
        finite: Where there are numbers to compare; elsewhere there must be what PyTorch has.
    """

    operation: str
    x: Any
    before: Any
    dim: int
    dy: Any
    theirs: Outcome
    theirs_wide: np.ndarray
    finite: np.ndarray

    @classmethod
    def of(cls, case: Case, operation: str, dtype: str, device: str) -> Exact:
        """Compute them."""
        import torch

        x, dy = case.tensor(getattr(torch, dtype), device), None
        function = getattr(torch, OPERATIONS[operation].forward.name)
        if OPERATIONS[operation].backward:
            like = function(x, case.dim)
            dy = torch.randn(like.shape, generator=torch.Generator().manual_seed(x.numel())).to(like)
        theirs = _outcome(operation, function, x, case.dim, dy)
        theirs_wide = wide(theirs.result)
        finite = np.isfinite(theirs.exact) & np.isfinite(theirs_wide)
        return cls(operation, x, x.clone(), case.dim, dy, theirs, theirs_wide, finite)

    @property
    def allowed(self) -> float:
        """PyTorch's largest error: the contract adds one unit of each element."""
        return float(np.max(np.abs(self.theirs_wide - self.theirs.exact)[self.finite], initial=0))

    def outcome(self, function: Callable[..., Any], **how: Any) -> Outcome:
        """That of another's forward function, or of its gradient."""
        return _outcome(self.operation, function, self.x, self.dim, self.dy, **how)


def _outcome(operation: str, function: Callable[..., Any], x: Any, dim: int, dy: Any, **how: Any) -> Outcome:
    import torch

    if dy is None:
        result, exact = function(x, dim, **how), exact_result(operation, wide(x), dim)
        return Outcome(result, exact, ulp(exact, x.dtype))
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        saved = function(leaf, dim, **how)
        (result,) = torch.autograd.grad(saved, leaf, dy)
    kept = wide(saved.detach())
    if operation == "logsumexp_backward" and how:
        # Ours keeps the logsumexp of each row in float32 or wider, or its state; PyTorch keeps what it returns.
        kept = exact_result("logsumexp", wide(x), dim)
    exact, terms = exact_gradient(operation, wide(x), kept, wide(dy), dim)
    # A difference is no more exact than its terms were as they were accumulated.
    return Outcome(result, exact, ulp(exact, x.dtype) + ulp(terms, torch.promote_types(x.dtype, torch.float32)))


def wide(x: Any) -> np.ndarray:
    """A tensor in long double."""
    return np.asarray(x.double().cpu().numpy(), np.longdouble)


def exact_result(operation: str, x: np.ndarray, dim: int) -> np.ndarray:
    """The operation in NumPy's long double: float64 itself is on trial too."""
    m = np.max(x, dim, keepdims=True)
    e = np.exp(x - m)
    l = np.sum(e, dim, keepdims=True)
    if operation == "softmax":
        return np.asarray(e / l)
    if operation == "log_softmax":
        return np.asarray(x - m - np.log(l))
    return np.squeeze(np.where(np.isinf(m), m, m + np.log(l)), dim)


def exact_gradient(
    operation: str, x: np.ndarray, saved: np.ndarray, dy: np.ndarray, dim: int
) -> tuple[np.ndarray, np.ndarray]:
    """The gradient in x, in long double, and the size of what is subtracted to get it.

    It is taken from the forward output as it was rounded and saved: dy - dot cancels, so that the last place
    of an output decides over every digit of some gradients, and the output is judged by itself.
    """
    if operation == "softmax_backward":
        terms = saved * dy, saved * np.sum(saved * dy, dim, keepdims=True)
    elif operation == "log_softmax_backward":
        terms = dy, np.exp(saved) * np.sum(dy, dim, keepdims=True)
    else:
        saved, dy = np.expand_dims(saved, dim), np.expand_dims(dy, dim)
        terms = dy * np.exp(x - saved), np.zeros_like(x)
    return terms[0] - terms[1], np.maximum(np.abs(terms[0]), np.abs(terms[1]))


def ulp(value: np.ndarray, dtype: Any) -> np.ndarray:
    """One unit in the last place of `dtype` at each value."""
    import torch

    info = torch.finfo(dtype)
    size = np.clip(np.nan_to_num(np.abs(value), nan=1.0), info.smallest_normal, info.max)
    return np.asarray(np.exp2(np.floor(np.log2(size))) * info.eps)
