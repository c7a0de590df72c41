"""The function of each operation, as the check calls it: function(x, dim, **how) gives one tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ... import api
from ...core.operations import Operation
from ...jax import bridge

Function = Callable[..., Any]


def pytorch(operation: Operation) -> Function:
    """PyTorch's function for a forward operation."""
    import torch
    from torch.nn import functional

    def losses(x: Any, dim: int) -> Any:
        return functional.cross_entropy(_classes_second(x, dim), target_of(x, dim), reduction="none")

    def log_probabilities(x: Any, dim: int) -> Any:
        return torch.log_softmax(x, dim).gather(dim, target_of(x, dim).unsqueeze(dim)).squeeze(dim)

    functions = {"cross_entropy": losses, "token_logprobs": log_probabilities}
    return functions.get(operation.name) or getattr(torch, operation.name)


def ours(backend: str, operation: Operation) -> Function:
    """Our public function for a forward operation, through a backend."""
    if backend == "pallas":
        return _in_jax(operation)

    def losses(x: Any, dim: int, **how: Any) -> Any:
        return api.cross_entropy(_classes_second(x, dim), target_of(x, dim), reduction="none", **how)

    def log_probabilities(x: Any, dim: int, **how: Any) -> Any:
        # Ours are in float32, PyTorch's in the dtype of the logits.
        return api.token_logprobs(x, target_of(x, dim), dim, **how).logprob.to(x.dtype)

    functions = {"cross_entropy": losses, "token_logprobs": log_probabilities}
    return functions.get(operation.name) or getattr(api, operation.name)


def _in_jax(operation: Operation) -> Function:
    """Our public function for JAX, on tensors."""
    function = bridge.forward(operation.name)
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
