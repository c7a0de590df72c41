"""PyTorch's and other libraries' functions with a target column per row, and calls with a gradient through autograd.

A forward function takes the operands of the operation and returns its main output, with its statistics in a tuple
where a call returns statistics too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from .cases import STATISTIC_WEIGHT, Case

Function = Callable[..., Any]
"""From the tensors of a case, in the order of `Case.tensors`, to the result."""


def with_gradient(case: Case, forward: Function) -> Function:
    """The forward function and its gradient, as a user calls them: (gradient, output, …).

    Autograd returns the gradient and adds it to nothing, so each call computes a fresh one.  The first tensor must
    require a gradient.
    """
    import torch

    count, grad = len(case.without_gradient.tensors), torch.autograd.grad

    def function(*tensors: Any) -> Any:
        found = forward(*tensors[:count])
        outputs = found if isinstance(found, tuple) else (found,)
        (dx,) = grad(outputs, tensors[0], incoming(tensors[count:], len(outputs)))
        return dx, *(y.detach() for y in outputs)

    return function


def incoming(given: tuple[Any, ...], outputs: int) -> Any:
    """The incoming gradient of each output; None for a scalar loss."""
    if not given:
        return None
    return (given[0], *(STATISTIC_WEIGHT * given[0] for _ in range(outputs - 1)))


def by_pytorch(case: Case) -> Function:
    """PyTorch's function for an operation with a target; written out where PyTorch has none."""
    return _BY_PYTORCH[case.operation](case)


def _loss_by_pytorch(case: Case) -> Function:
    from torch.nn import functional

    reduction, cross_entropy = case.reduction, functional.cross_entropy
    return lambda x, target: cross_entropy(x, target, reduction=reduction)


def _log_probabilities_by_pytorch(case: Case) -> Function:
    """The operations of libraries for reinforcement learning: float32 logarithms of all probabilities."""
    import torch

    dim, wide = case.dim, getattr(torch, case.accumulator)

    def function(x: Any, target: Any) -> Any:
        log_p = torch.log_softmax(x.to(wide), dim)
        logprob = log_p.gather(dim, target.unsqueeze(dim)).squeeze(dim)
        return logprob, -(log_p.exp() * log_p).sum(dim)

    return function


_BY_PYTORCH = {"cross_entropy": _loss_by_pytorch, "token_logprobs": _log_probabilities_by_pytorch}


def by_ours(case: Case, forced: dict[str, Any]) -> Function:
    """Our public function; `forced` has the backend and the strategy where they are forced."""
    return _BY_OURS[case.operation](case, forced)


def _loss_by_ours(case: Case, forced: dict[str, Any]) -> Function:
    from ... import api

    function = api.cross_entropy
    # Users leave out what has its default value.
    options = forced if case.reduces_rows else {"reduction": case.reduction, **forced}
    return lambda x, target: function(x, target, **options)


def _log_probabilities_by_ours(case: Case, forced: dict[str, Any]) -> Function:
    from ... import api

    function, dim = api.token_logprobs, case.dim
    return lambda x, target: function(x, target, dim, **forced)[:2]


_BY_OURS = {"cross_entropy": _loss_by_ours, "token_logprobs": _log_probabilities_by_ours}


def loss_by_liger(case: Case) -> Function:
    """The loss of Liger-Kernel, without the results that it returns beside the loss."""
    # The package itself chooses the implementation, as it does for Liger's modules.
    apply = importlib.import_module("liger_kernel.ops").LigerCrossEntropyFunction.apply
    # No weight; ignore_index, z-loss and smoothing at their defaults.
    before = (None, -100, 0.0, 0.0, case.reduction)
    return lambda x, target: apply(x, target, *before)[0]


def loss_by_quack(case: Case) -> Function:
    """The loss of quack."""
    # `quack.cross_entropy` is the function; the module of this name is reached by its import name only.
    function, reduction = importlib.import_module("quack.cross_entropy").cross_entropy, case.reduction
    return lambda x, target: function(x, target, reduction=reduction)
