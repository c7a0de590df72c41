"""The routing of flat rows of torch tensors: by a kernel, or in PyTorch's operations."""

from __future__ import annotations

from . import reference
from .reference import Call, Gradients, Tensor
from .results import Routed


def found_of(call: Call) -> Routed:
    """The results of a call, without a gradient and without `dense`."""
    found = _by_kernel(call)
    return reference.found_at(call, reference.choose(call)) if found is None else found


def gradient_of(call: Call, found: Routed, given: Gradients) -> Tensor:
    """The gradient of the logits, (T, experts) in their dtype; `found` holds weights, indices and lse of the call."""
    dx = _gradient_by_kernel(call, found, given)
    return reference.gradient(call, found.indices, given) if dx is None else dx


def _by_kernel(call: Call) -> Routed | None:
    """The results of a call by a kernel; None where none takes the call."""
    return None


def _gradient_by_kernel(call: Call, found: Routed, given: Gradients) -> Tensor | None:
    """The gradient of a call by a kernel; None where none takes the call."""
    return None
