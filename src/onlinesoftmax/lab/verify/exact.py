"""The exact result of an input in NumPy's long double, and PyTorch's result: every strategy is compared with both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import namespace
from ...ops import OPERATIONS
from ...ops.reference import evaluate, size_of_terms, with_sums
from . import functions
from .inputs import Case

KEEPS_STATES = ("pallas",)
"""Backends that keep the state (m, l) of each row for a gradient, of which no digit is rounded away."""


class Outcome(NamedTuple):
    """A result, and for each of its elements the exact value and the unit that the contract counts in."""

    result: Any
    exact: np.ndarray
    unit: np.ndarray


@dataclass(frozen=True)
class Exact:
    """One input, and dy where a gradient is asked for, with PyTorch's result and the exact one.

    Attributes:
        operation: Name in OPERATIONS.
        x, before: The input, and a copy of it, which shows whether somebody changed the input.
        dim: The softmax dimension.
        dy: The gradient of the forward operation's result; None for a forward operation.
        theirs, theirs_wide: PyTorch's outcome, and its result in long double.
        finite: True for each element that is finite in the exact result and in PyTorch's; the other elements must be
            the same as PyTorch's.
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
        """Compute PyTorch's result and the exact one."""
        import torch

        x, dy = case.tensor(getattr(torch, dtype), device), None
        function = functions.pytorch(OPERATIONS[operation].forward)
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
        """The outcome of another forward function, or of its gradient; `how` names its backend and strategy."""
        return _outcome(self.operation, function, self.x, self.dim, self.dy, **how)


def _outcome(operation: str, function: Callable[..., Any], x: Any, dim: int, dy: Any, **how: Any) -> Outcome:
    import torch

    if dy is None:
        target = _target(operation, x, dim)
        result, exact = function(x, dim, **how), exact_result(operation, wide(x), dim, target)
        unit = ulp(exact, x.dtype)
        if OPERATIONS[operation].per_row:
            # What a row gives is its logsumexp, or the difference of it and a score, which is no more exact.
            lse = _evaluate(operation, {"x": wide(x), "target": target}, dim, "lse")
            unit = unit + np.squeeze(ulp(lse, torch.promote_types(x.dtype, torch.float32)), dim)
        return Outcome(result, exact, unit)
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        y = function(leaf, dim, **how)
        (result,) = torch.autograd.grad(y, leaf, dy)
    saved = _saved(operation, x, y.detach(), dim, how.get("backend"))
    exact, size = exact_gradient(operation, wide(x), saved, wide(dy), dim, _target(operation, x, dim))
    # A difference is no more exact than its two terms were as they were accumulated.
    return Outcome(result, exact, ulp(exact, x.dtype) + ulp(size, torch.promote_types(x.dtype, torch.float32)))


def _saved(operation: str, x: Any, y: Any, dim: int, backend: str | None) -> np.ndarray:
    """The output that a forward call kept for its gradient, in long double.

    Args:
        operation: Name of the gradient.
        x, y: Input and result of the forward call.
        dim: The softmax dimension.
        backend: Our backend; None for PyTorch's own function.
    """
    forward = OPERATIONS[operation].forward
    kept = [output for output in forward.written(forward.saved) if output.dtype == "accumulator"]
    # PyTorch keeps its rounded result.  Our functions keep a per-row output in float32 or wider.  If the result is as
    # wide, they keep the result.  For a 16-bit result they keep a number whose rounding error is far below a unit of
    # the gradient.
    rounded = backend is None or (y.element_size() >= 4 and backend not in KEEPS_STATES)
    if backend == "eager" and y.element_size() < 4 and not kept and not forward.has_target:
        from ...torch.formulas import is_long

        # Autograd keeps the 16-bit result of passes over long rows before it is rounded.
        if is_long(x, dim):
            return _evaluate(forward.name, {"x": wide(x)}, dim, forward.always[0])
    # An operation with a target keeps states, which `exact_gradient` computes.
    if forward.has_target or not kept or rounded:
        return wide(y)
    return np.squeeze(_evaluate(forward.name, {"x": wide(x)}, dim, kept[0].name), dim)


def _target(operation: str, x: Any, dim: int) -> np.ndarray | None:
    """The target of each row of an input, with size 1 along `dim`; None for an operation without targets."""
    if not OPERATIONS[operation].has_target:
        return None
    return np.expand_dims(functions.target_of(x, dim).cpu().numpy(), dim)


def wide(x: Any) -> np.ndarray:
    """A tensor in long double."""
    return np.asarray(x.double().cpu().numpy(), np.longdouble)


def exact_result(operation: str, x: np.ndarray, dim: int, target: np.ndarray | None = None) -> np.ndarray:
    """The result of a forward operation in NumPy's long double, because float64 is tested too.

    `target` has the targets of the rows, with size 1 along `dim`; None for an operation without targets.
    """
    declaration = OPERATIONS[operation]
    y = _evaluate(operation, {"x": x, "target": target}, dim, declaration.result.name)
    return np.squeeze(y, dim) if declaration.per_row else y


def exact_gradient(
    operation: str, x: np.ndarray, saved: np.ndarray, dy: np.ndarray, dim: int, target: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The gradient in x, in long double, and the size of the terms whose difference it is.

    The gradient is computed from the forward output as it was rounded and saved.  The difference of its terms cancels,
    so the last digit of a saved output decides over every digit of some gradients; the forward output has its own
    check.

    Args:
        operation: Name of the gradient.
        x: Input of the forward call.
        saved: The output that the forward call kept.
        dy: Gradient of the forward result.
        dim: The softmax dimension.
        target: As for `exact_result`.
    """
    declaration = OPERATIONS[operation]
    known: dict[str, Any] = {"x": x if declaration.scores else saved, "dy": dy}
    forward = declaration.forward
    if target is not None:
        kept = {output.name for output in forward.outputs} & set(declaration.row_operands)
        exact = {name: _evaluate(forward.name, {"x": x, "target": target}, dim, name) for name in kept}
        known |= {name: np.squeeze(value, dim) for name, value in exact.items()}
    names = [operand.name for operand in declaration.operands if not operand.optional and operand.name != "target"]
    values: dict[str, Any] = {name: known.get(name, saved) for name in names}
    values |= {name: np.expand_dims(values[name], dim) for name in names if name in declaration.row_operands}
    values["target"] = target
    result, xp = _evaluate(operation, values, dim, declaration.result.name), namespace(x)
    size = size_of_terms(operation, xp, with_sums(operation, xp, _given(values), dim))
    # A gradient without two terms has an exponent that is a difference; its own size stands for the terms.
    return result, np.abs(result) if size is None else np.asarray(size)


def _evaluate(operation: str, values: dict[str, Any], dim: int, output: str) -> np.ndarray:
    return np.asarray(evaluate(operation, namespace(values["x"]), _given(values), dim, output))


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def ulp(value: np.ndarray, dtype: Any) -> np.ndarray:
    """One unit in the last place of `dtype` at each value."""
    import torch

    info = torch.finfo(dtype)
    size = np.clip(np.nan_to_num(np.abs(value), nan=1.0), info.smallest_normal, info.max)
    return np.asarray(np.exp2(np.floor(np.log2(size))) * info.eps)
