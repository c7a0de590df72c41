"""The routing of torch tensors: by a kernel, or in PyTorch's operations; recorded by autograd, or as an operator."""

from __future__ import annotations

from typing import Any

import torch

from ..core.processes import has_processes
from ..torch.arguments import is_lazy
from ..torch.fast_path import is_transformed
from ..torch.formulas import PLAIN_TYPES
from ..torch.gradients import gradient_by_pytorch, is_traced, reads_cuda
from ..torch.namespace import NAMESPACE
from . import eager, losses
from .results import Losses, Routed, losses_of, with_losses
from .rules import Call, Gradients, LossGradients, Rule

Tensor = torch.Tensor


def route(call: Call, rows: tuple[int, ...], dense: bool) -> Routed:
    """The results of a call, in the shapes that the caller has.

    Args:
        call: The call.
        rows: Shape of the logits without the dimension of experts.
        dense: True to return the weight of every expert.
    """
    x = call.x
    transformed = is_transformed()
    # The operator has no derivative of forward mode, and no rule for vmap.
    if is_traced(x) and not transformed:
        found = _by_operator(call)
    elif type(x) not in PLAIN_TYPES or transformed or not x.numel():
        found = eager.found_at(call, eager.choose(call))
    else:
        found = recorded(training(call)) if torch.is_grad_enabled() and x.requires_grad else found_of(call)
    return in_shape(found, call.rule, rows, dense)


def in_shape(found: Routed, rule: Rule, rows: tuple[int, ...], dense: bool) -> Routed:
    """The results of flat rows in the shapes that the caller has; arguments as of `route`."""
    weights, indices, counts, sums, lse, _ = found
    experts, k = rule.experts, rule.k
    whole = None
    if dense:
        places = indices.clamp(min=0).long()
        whole = weights.new_zeros(weights.shape[0], experts).scatter_add(1, places, weights).reshape(*rows, experts)
    of_sequences = (*rows[:-1], experts)
    counts = None if counts is None else counts.reshape(of_sequences)
    sums = None if sums is None else sums.reshape(of_sequences)
    if len(rows) != 1:
        weights, indices, lse = weights.reshape(*rows, k), indices.reshape(*rows, k), lse.reshape(rows)
    return with_losses(Routed(weights, indices, counts, sums, lse, whole), losses_of(found))


def found_of(call: Call) -> Routed:
    """The results of a call on flat rows, without a gradient and without `dense`."""
    found = None
    if reads_cuda(call.x):
        from .kernels import route_launch

        found = route_launch.route(call)
    return eager.found_of(call) if found is None else found


def gradient_of(
    call: Call, found: Routed, given: Gradients, complete: bool = False, losses: LossGradients | None = None
) -> Tensor:  # fmt: skip
    """The gradient of the logits, (T, experts) in their dtype.

    Args:
        call: The call.
        found: Its results; weights, indices and lse are read.
        given: Gradients of the results.
        complete: True where the caller knows that no index is -1.
        losses: Gradients of the losses; None where the kernel of the call has computed none.
    """
    dx = _gradient_by_kernel(call, found, given, losses)
    if dx is not None:
        return dx
    given = given if losses is None else losses.added(given, call, found.lse)
    return eager.gradient_of(call, found, given, complete)


def training(call: Call) -> Call:
    """The call of a training step, which may want the losses of its kernel.

    Not of several sequences, which are added first, and not where collectives may change its results.
    """
    wants = call.counts and call.prob_sums and call.sequences == 1
    return call._replace(losses=wants and not has_processes())


def bound(call: Call) -> Any:
    """The function run(x, bias, mask, indices) of a kernel for the calls that are like one; None without a kernel."""
    aligned = call.bias is None or call.bias.data_ptr() % 16 == 0
    if not reads_cuda(call.x) or call.x.stride(1) != 1 or not aligned:
        return None
    from .kernels import route_launch

    return route_launch.run_of(call)


def _gradient_by_kernel(
    call: Call, found: Routed, given: Gradients, losses: LossGradients | None
) -> Tensor | None:  # fmt: skip
    """The gradient of a call by a kernel; None where none takes the call."""
    if not reads_cuda(call.x):
        return None
    from .kernels import gradient_launch

    return gradient_launch.gradient(call, found, given, losses)


def recorded(call: Call, run: Any = None) -> Routed:
    """The results of a call on flat rows, recorded by autograd; by the function of `bound`, if there is one."""
    *found, balance, z_loss = _Recorded.apply(call.x, call, run)
    return with_losses(Routed(*found), None if balance is None else Losses(balance, z_loss, None))


class _Recorded(torch.autograd.Function):
    """The results of a call, recorded by autograd; it saves the logits and what is (T, k), (T,) or (experts,)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call, run: Any) -> Any:
        found = run(x, call.bias, call.mask, call.indices) if run is not None else found_of(call)
        ctx.complete = call.complete
        ctx.how = call._replace(x=None, bias=None, mask=None, indices=None)
        losses = losses_of(found) or Losses(None, None, None)
        ctx.save_for_backward(x, call.bias, call.mask, found.weights, found.indices, found.lse, losses.slopes)
        ctx.mark_non_differentiable(*[t for t in (found.indices, found.counts) if t is not None])
        ctx.set_materialize_grads(False)
        return *found, losses.balance, losses.z_loss

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> Any:
        x, bias, mask, weights, indices, lse, slopes = ctx.saved_tensors
        given, balance, z_loss = Gradients(dys[0], dys[3], dys[4]), dys[6], dys[7]
        wanted = *given, balance, z_loss
        if all(dy is None for dy in wanted):
            return None, None, None
        call = ctx.how._replace(x=x, bias=bias, mask=mask)
        # A kernel's gradient has no derivative, and a kernel cannot read a lazy tensor.
        if torch.is_grad_enabled() or any(map(is_lazy, wanted)):
            return _gradient_by_pytorch(call, indices, wanted), None, None
        found = Routed(weights, indices, None, None, lse)
        of_losses = None if slopes is None else LossGradients(balance, z_loss, slopes)
        return gradient_of(call, found, given, ctx.complete, of_losses), None, None


def _gradient_by_pytorch(call: Call, indices: Tensor, given: tuple[Tensor | None, ...]) -> Tensor:
    """The gradient by PyTorch's operations.

    Args:
        call, indices: The call, and its result.
        given: Gradients of weights, prob_sums, lse, and of both losses.
    """

    def results(x: Tensor) -> list[Any]:
        found = eager.found_at(call._replace(x=x), indices)
        flat = in_shape(found, call.rule, (call.tokens,), False) if call.sequences == 1 else found
        functions = (
            lambda: found.weights, lambda: found.prob_sums, lambda: found.lse,
            lambda: losses.load_balancing_loss(flat, losses.KINDS[0]), lambda: losses.router_z_loss(flat),
        )  # fmt: skip
        return [function() for function, dy in zip(functions, given, strict=True) if dy is not None]

    return gradient_by_pytorch(call.x, results, [dy for dy in given if dy is not None])


def _by_operator(call: Call) -> Routed:
    """The results in a trace, which records the shape of a tensor, and no number that is computed from it."""
    operator = getattr(torch.ops, NAMESPACE).route
    x = call.x.reshape(call.sequences, call.tokens, call.rule.experts)
    found = operator(x, call.bias, call.mask, call.indices, *flat_rule(call))
    weights, indices, counts, sums, lse = found
    return Routed(weights, indices, counts if call.counts else None, sums if call.prob_sums else None, lse)


def flat_rule(call: Call) -> tuple[str, list[int], float]:
    """The rule and the flags of a call, as operators take them: `torch.jit.trace` takes no list of bools."""
    rule = call.rule
    numbers = rule.k, rule.groups, rule.group_k, rule.group_top
    flags = rule.topk_first, rule.renormalize, call.counts, call.prob_sums
    return rule.score.value, [*numbers, *map(int, flags)], rule.scale
