"""Routing of tokens to the experts of a mixture: choice, weights, counts and the sums of the losses.

    route                 the experts of each token
    load_balancing_loss   teaches a router to use all experts evenly
    router_z_loss         keeps the logits small

rules.py checks the numbers and the arrays; selection.py says which experts a token chooses, to the last bit of a score;
formulas.py has weights, probabilities and logsumexp.  For torch tensors, eager.py has all of it with the gradient,
and run.py takes a kernel or eager.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..core.annotations import A
from ..core.arguments import check_flags
from ..core.arrays import check_no_jax, is_dtensor, quiet
from ..core.processes import group_or_default
from ..kernels.registry import needing
from . import losses
from .presets import PRESETS
from .results import Routed
from .rules import checked_rule

if TYPE_CHECKING:
    import torch

__all__ = ["PRESETS", "Routed", "load_balancing_loss", "route", "router_z_loss"]


def route(
    logits: A, k: int, *, score: Literal["softmax", "sigmoid", "sqrtsoftplus", "identity"] = "softmax",
    order: Literal["score_first", "topk_first"] = "score_first", bias: A | None = None, groups: int | None = None,
    group_k: int | None = None, group_score: Literal["top2_sum", "max"] | int = "top2_sum", renormalize: bool = True,
    scale: float = 1.0, indices: A | None = None, mask: A | None = None, counts: bool = True, prob_sums: bool = False,
    dense: bool = False,
) -> Routed:  # fmt: skip
    """Choose k experts for each token of a mixture of experts, and weight them.

    The score of an expert is a function of its logit x: its softmax over the experts, sigmoid(x), sqrt(log(1 +
    exp(x))), or x itself.  The k experts with the largest scores are chosen; of equal scores, that of the lower expert.
    Their weights are their scores, divided by their sum with `renormalize`, times `scale`.  With the order
    "topk_first", the k largest logits are chosen, and the scores are those of the k logits alone.

    Everything is computed in float32 (float64 for float64 logits).  Whatever the logits are, the experts of a token are
    different ones from 0 to E - 1: a NaN counts as the largest score.  An expert whose logit or bias is -inf is chosen
    only if too few others are left, and its weight is 0.  If the scores to divide by add up to 0, the weights are 0.
    The same call gives the same bits.

    Args:
        logits: Floating-point tensor or NumPy array (..., tokens, E) of E experts, at most 8192.  Axes before the
            tokens are sequences: each has its own counts and prob_sums.  A DTensor gives DTensors that are sharded as
            its tokens are; counts and prob_sums have partial sums.  Sharded experts are gathered first.
        k: Number of experts of a token, from 1 to E.
        score: The score.
        order: "score_first", or "topk_first" to choose by logits and compute the scores of the chosen ones.
        bias: One number for each expert, (E,), added to the scores (to the logits, if they choose) for the choice
            alone.  It has no gradient.
        groups: Number of groups that the experts are divided into, neighbours in one group.
        group_k: Number of groups that a token can choose from: those with the largest scores.
        group_score: Score of a group: the sum of its two largest scores, bias included ("top2_sum"); of its n largest
            (n); or the largest ("max").
        renormalize: Divide the weights of a token by their sum.
        scale: Factor of the weights.
        indices: Experts to take instead of choosing them, integers (..., tokens, k), as in the replay of a routing;
            bias, groups and order choose nothing then.  A number that is no expert, as -1, has weight 0; a token
            without an expert is masked.
        mask: Boolean, broadcasts to (..., tokens): False for a token that is not routed.  Its experts are -1, its
            weights and its lse are 0, and it is not counted.
        counts: Return how many tokens chose each expert.
        prob_sums: Return the probability of each expert, added over the tokens of a sequence: the softmax; for sigmoid
            and sqrtsoftplus, the score divided by the sum of all scores; for identity, the logit.
        dense: Return the weights of all experts too, 0 where an expert is not chosen.

    Returns:
        The named tuple `Routed` (weights, indices, counts, prob_sums, lse, dense).  Weights, prob_sums, lse and dense
        are differentiable in the logits; for this, nothing as large as the logits is kept but the logits.

    Raises:
        TypeError, RuntimeError, ValueError: an argument has the wrong type, dtype, device, shape or value; groups do
            not divide the experts, or the chosen groups have fewer than k.  The values of tensors are not read.

    Source:
        Shazeer et al., "Outrageously Large Neural Networks", arXiv:1701.06538; bias and groups: DeepSeek-AI,
        "DeepSeek-V3 Technical Report", arXiv:2412.19437.

    Example:
        >>> import torch
        >>> found = route(torch.tensor([[0.0, 2.0, 1.0, 2.0], [3.0, 0.0, 0.0, 0.0]]), 2)
        >>> found.indices, found.counts
        (tensor([[1, 3],
                [0, 1]], dtype=torch.int32), tensor([1, 2, 0, 1], dtype=torch.int32))
        >>> found.weights
        tensor([[0.5000, 0.5000],
                [0.9526, 0.0474]])
    """
    given = (
        "route", k, score, order, groups, group_k, group_score, renormalize, scale, counts, prob_sums, dense,
        # True equals 1, which some arguments may not be.
        type(k), type(groups), type(group_k), type(renormalize), type(scale), type(counts), type(prob_sums),
        type(dense),
    )  # fmt: skip
    if _PREPARED and indices is None:
        _, prepared = _PREPARED[0].look_up(given, logits, bias, mask)
        if prepared is not None:
            ready: Routed = prepared(logits, bias, mask)
            return ready
    if is_dtensor(type(logits)):
        options = {
            "score": score, "order": order, "groups": groups, "group_k": group_k, "group_score": group_score,
            "renormalize": renormalize, "scale": scale, "counts": counts, "prob_sums": prob_sums, "dense": dense,
        }  # fmt: skip
        return _of_dtensor(logits, k, {"bias": bias, "mask": mask, "indices": indices}, options)
    arguments, run = _modules("route", logits)
    arguments.check_logits(logits)
    shape, of_groups = logits.shape, (groups, group_k, group_score)
    rule = checked_rule("route()", shape[-1], k, score, order, of_groups, renormalize, scale)
    check_flags("route()", counts=counts, prob_sums=prob_sums, dense=dense)
    call = arguments.checked_call(logits, bias, mask, indices, rule, counts, prob_sums)
    found: Routed = run.route(call, tuple(shape[:-1]), dense)
    if indices is None and not isinstance(logits, np.ndarray):
        from . import prepared

        if prepared.prepare(logits, bias, mask, given, call, dense) and not _PREPARED:
            _PREPARED.append(prepared)
    return found


def _of_dtensor(logits: Any, k: int, operands: dict[str, Any], options: dict[str, Any]) -> Routed:
    """`route` of a DTensor, from bias, mask and indices and the other arguments by name."""
    from ..distributed import routing

    here = routing.local_call(logits, k, operands, options)
    return here.results(route(here.logits, k, **here.operands, **options))


_PREPARED: list[Any] = []
"""The module prepared.py, once it has prepared a call: an import statement takes the host a microsecond."""


def load_balancing_loss(
    routed: Routed,
    kind: Literal["switch", "sequence"] = "switch",
    *,
    group: torch.distributed.ProcessGroup | None = None,
) -> Any:
    """The loss that teaches a router to use all experts evenly: 1 where it does.

    It is E * sum over the E experts of f * p: f is the part of the choices that fell on the expert, counts / (k *
    tokens), a constant; p is its mean probability, prob_sums / tokens.  If the router takes the same k experts for
    every token, and their probabilities add up to 1, the loss is E / k.

    Args:
        routed: Result of `route` with `prob_sums=True`.
        kind: "switch" for one loss over the tokens of all sequences; "sequence" for the mean of the losses of the
            sequences, of logits (sequences, tokens, E).
        group: Process group whose processes have other tokens of the batch, or, for "sequence", other tokens of the
            same sequences.  Its counts are added up, and each process gets its share: the mean of the losses of the
            processes is the loss of all tokens, so that the mean of their gradients is its gradient, as
            DistributedDataParallel takes it.  For "sequence", leave it out if each process has sequences of its own.

    Returns:
        A scalar, differentiable in the logits; 0 without a token.  Of DTensors, a DTensor that every process has.  On a
        GPU and without process groups, `route` has computed it; then a change of the results through `.data` counts for
        nothing.

    Raises:
        TypeError, ValueError: routed is no result of `route`, or has no counts or no prob_sums; kind is unknown; a
            group is given beside DTensors.

    Source:
        Fedus, Zoph and Shazeer, "Switch Transformers", arXiv:2101.03961, equation 4; for sequences: DeepSeek-AI,
        "DeepSeek-V3 Technical Report", arXiv:2412.19437, equation 17.

    Example:
        >>> import torch
        >>> load_balancing_loss(route(torch.tensor([[20.0, 0.0], [0.0, 20.0]]), 1, prob_sums=True))
        tensor(1.)
    """

    def loss(routed: Any) -> Any:
        return losses.load_balancing_loss(routed, kind, lambda counts: total(counts, group), _fused_of(routed, group))

    if _is_numpy(routed):
        return _of_numpy(routed, loss)
    return loss(routed) if not _has_dtensors(routed) else _of_processes(routed, group, loss)


def router_z_loss(routed: Routed, *, group: torch.distributed.ProcessGroup | None = None) -> Any:
    """The mean of lse^2 over the tokens, which keeps the logits of a router small.

    Args:
        routed: Result of `route`.
        group: Process group whose processes have other tokens, as for `load_balancing_loss`: the mean of the losses of
            its processes is the loss of all tokens.

    Returns:
        A scalar, differentiable in the logits; 0 without a token.  Of DTensors, a DTensor that every process has.

    Raises:
        TypeError, ValueError: routed is no result of `route`, or has no counts; a group is given beside DTensors.

    Source:
        Zoph et al., "ST-MoE: Designing Stable and Transferable Sparse Expert Models", arXiv:2202.08906, equation 5.

    Example:
        >>> import torch
        >>> router_z_loss(route(torch.zeros(3, 4), 1))
        tensor(1.9218)
    """

    def loss(routed: Any) -> Any:
        fused = _fused_of(routed, group)
        return losses.router_z_loss(routed, lambda counts: total(counts, group, together=True), fused)

    if _is_numpy(routed):
        return _of_numpy(routed, loss)
    return loss(routed) if not _has_dtensors(routed) else _of_processes(routed, group, loss, over_tokens=True)


def _is_numpy(routed: Any) -> bool:
    return isinstance(routed, Routed) and isinstance(routed.lse, (np.ndarray, np.generic))


@quiet
def _of_numpy(routed: Routed, loss: Callable[[Routed], Any]) -> Any:
    """The loss of NumPy arrays in the dtype of lse: a product of int32 and float32 is float64 there."""
    return routed.lse.dtype.type(loss(routed))


def _has_dtensors(routed: Any) -> bool:
    return isinstance(routed, Routed) and is_dtensor(type(routed.lse))


def _of_processes(routed: Routed, group: Any, loss: Callable[[Routed], Any], over_tokens: bool = False) -> Any:
    """The loss of all tokens as a DTensor; `over_tokens` where it adds numbers of tokens, and not only their sums."""
    from ..distributed import routing

    check_no_group(group)
    return routing.number(loss(routing.whole(routed)), routed, over_tokens)


def check_no_group(group: Any) -> None:
    """Raise an error for a process group beside DTensors."""
    if group is not None:
        raise ValueError("group: the counts are a DTensor, which is of all processes of its mesh: leave group out")


def _fused_of(routed: Any, group: Any) -> losses.Fused | None:
    """The function that computes a loss of torch tensors by a kernel; None for arrays of NumPy."""
    if not isinstance(routed, Routed) or _is_numpy(routed):
        return None
    from . import loss_run

    return loss_run.fused if group is not None else lambda *given: loss_run.own_loss(routed, *given)


def total(counts: Any, group: Any, together: bool = False) -> tuple[Any, int]:
    """The counts of all processes of a group, and the number of processes.

    With `together`, those of all sequences, of which processes may have different numbers.
    """
    if group is None:
        return counts, 1
    if isinstance(counts, np.ndarray):
        raise TypeError("group: the counts are a NumPy array, and processes add up torch tensors: leave group out")
    import torch.distributed as dist

    group = group_or_default(group)
    # The counts of one sequence are int32, and sums over several are int64: processes may have either.
    found = counts.long().clone()
    if together and found.ndim > 1:
        found = found.flatten(0, -2).sum(0)
    dist.all_reduce(found, group=group)
    return found.to(counts.dtype), dist.get_world_size(group)


def _modules(function: str, logits: Any) -> tuple[Any, Any]:
    """The modules that check the arguments and compute, for NumPy arrays or torch tensors."""
    if isinstance(logits, np.ndarray):
        from ..numpy import routing

        return routing, routing
    check_no_jax(function, type(logits))
    with needing("torch", "routing"):
        from . import arguments, run

        return arguments, run
