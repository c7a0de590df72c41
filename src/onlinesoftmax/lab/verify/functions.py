"""The function of each operation, as the check calls it: function(x, dim, **how) gives one tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ... import api
from ...core.declaration import Operation
from .. import jax_on_torch

Function = Callable[..., Any]


def pytorch(operation: Operation) -> Function:
    """PyTorch's function for a forward operation, or its formula in PyTorch's operations."""
    import torch
    from torch.nn import functional

    def log_probabilities(x: Any, dim: int) -> Any:
        return torch.log_softmax(x, dim).gather(dim, target_of(x, dim).unsqueeze(dim)).squeeze(dim)

    if not operation.runs_on("eager"):
        return partial(getattr(api, operation.name), backend="eager")
    if not operation.has_target:
        function: Function = getattr(torch, operation.name)
        return function
    return _losses(getattr(functional, operation.name)) if operation.call_outputs else log_probabilities


def ours(backend: str, operation: Operation) -> Function:
    """Our public function for a forward operation, through a backend."""
    if backend == "pallas":
        return in_jax(operation)
    function: Function = getattr(api, operation.name)

    def log_probabilities(x: Any, dim: int, **how: Any) -> Any:
        # Ours are in float32, PyTorch's in the dtype of the logits.
        return function(x, target_of(x, dim), dim, **how)[0].to(x.dtype)

    if not operation.has_target:
        return function
    return _losses(function) if operation.call_outputs else log_probabilities


def _losses(function: Function) -> Function:
    """The losses of the rows, by a function that reduces them to a scalar unless it is told not to."""

    def losses(x: Any, dim: int, **how: Any) -> Any:
        return function(_classes_second(x, dim), target_of(x, dim), reduction="none", **how)

    return losses


def in_jax(operation: Operation) -> Function:
    """Our public function for JAX, on tensors."""
    function = jax_on_torch.forward(operation.name)
    if not operation.has_target:
        return function

    def of_targets(x: Any, dim: int, **how: Any) -> Any:
        # A logarithm of a probability is in float32, PyTorch's in the dtype of the logits.
        return function(x, dim, target_of(x, dim), **how).to(x.dtype)

    return of_targets


def target_of(x: Any, dim: int) -> Any:
    """The targets of an input: other columns in neighbouring rows."""
    import torch

    rows = list(x.shape)
    cols = rows.pop(dim) if rows else 1
    count = x.numel() // max(cols, 1)
    return (torch.arange(count, device=x.device) * 7919 % cols).reshape(rows)


def _classes_second(x: Any, dim: int) -> Any:
    """The input as cross-entropy takes it: the dimension of the classes is the second, or the only one."""
    return x.movedim(dim, 1) if x.dim() > 1 else x
