"""Prepared calls (torch/fast_path.py) of sharded rows: losses, log-probabilities, and softmax by peer memory.

Only properties that are the same on every process decide whether a call is usual.  So all processes merge by the
same kernels and get the same bits.  A call that is not usual runs on the general path (statistics.py), which sends the
same numbers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from ..core.operations import Operation
from ..core.processes import group_or_default
from ..torch.check import autocasts, check_first_derivative
from ..torch.dispatch import DTYPES
from ..torch.fast_path import PREPARED_CALLS, is_cacheable, keep, new_cache
from ..torch.fast_path import key_of as key_of_tensors
from ..torch.loss import MOST_EXACT_INDEX
from ..torch.ops import PLAIN_TYPES
from ..torch.reductions import backend_for, may_count
from .launches import Given, Launches, SavedForShards, ShardedKind
from .local import Sharded
from .peer_launches import PeerLaunches
from .peers import COLLECTIVE, check_peer_memory, is_plain, known_exchange, known_mail, part_of, with_a_column
from .shards import ANNOUNCEMENTS, Shards, agreed

Tensor = torch.Tensor

LAUNCHES: dict[tuple[Any, ...], Launches | PeerLaunches] = new_cache()
"""The launches of usual calls by `key_of`."""


def agree(
    name: str, tensors: tuple[Any, ...], arguments: tuple[Any, ...], shards: Any, group: Any
) -> tuple[Any, tuple[Any, ...]]:
    """(the shards of a call, its key in ANNOUNCEMENTS).  Without an announcement under the key, the shards are None:
    the caller then checks the arguments, and `shards_of` agrees with the other processes.

    Args:
        name: Name of the public function.
        tensors: The shard, and the tensors that every process gives alike, or None for absent ones.
        arguments: All other arguments except the mask, `shards` and `group`.
        shards, group: Its arguments of these names; shards that are given are returned.
    """
    if shards is not None or torch.compiler.is_compiling():
        return shards, ()
    if not all(t is None or type(t) in PLAIN_TYPES for t in tensors):
        return None, ()
    key = name, arguments, *(None if t is None else (t.shape, t.dtype) for t in tensors)
    try:
        found = ANNOUNCEMENTS.get(key)
    except TypeError:
        return None, ()
    return None if found is None else agreed(found[0], tensors[0], found[1], group_or_default(group)), key


def look_up(
    name: str, given: Given, arguments: tuple[Any, ...], shards: Any, group: Any
) -> tuple[tuple[Any, ...], tuple[Tensor, ...] | None]:
    """(key, results) of a call of a public function.  Without launches under the key, the results are None: the caller
    then checks the arguments.

    Args:
        name: Name of the public function.
        given: Its tensors.
        arguments: All other arguments except `shards` and `group`.
        shards, group: Its arguments of these names.
    """
    if type(shards) is not Shards or torch.compiler.is_compiling():
        return (), None
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return (), None
    group = group_or_default(group)
    way = known_exchange(group) if getattr(given.x, "is_cuda", False) else COLLECTIVE
    key = key_of(given, (name, arguments, shards, group.size(), way)) if way else ()
    try:
        launches = LAUNCHES.get(key) if key else None
    except TypeError:
        # An argument that has no hash is of a wrong type, and the check of the arguments names it.
        return (), None
    return key, None if launches is None else _run(launches, given, (group,))


def look_up_softmax(operation: Operation, x: Any, arguments: tuple[Any, ...], group: Any) -> Any:
    """(key, result) of a softmax or log-softmax.  Without a launch under the key, the result is None.

    Args:
        operation: Its declaration.
        x: The shard.
        arguments: dim, scale, softcap, mask, shards, exchange, backend and strategy.
        group: The argument of the public function.
    """
    key = key_of_softmax(operation, x, arguments, group)
    try:
        prepared_call = PREPARED_CALLS.get(key) if key else None
    except TypeError:
        return (), None
    return key, None if prepared_call is None else prepared_call(x, None)


def key_of_softmax(operation: Operation, x: Any, arguments: tuple[Any, ...], group: Any) -> tuple[Any, ...]:
    """The key of a call in PREPARED_CALLS, with the mailboxes.

    () where there are score options, the launch does not follow from the key, or the group has no mailboxes yet.
    """
    _, scale, softcap, mask, shards, *_ = arguments
    plain = type(scale) is float and scale == 1.0 and softcap is None and mask is None
    if not plain or type(x) is not Tensor or type(shards) is not Shards or torch.compiler.is_compiling():
        return ()
    if not is_cacheable(x) or not (dist.is_available() and dist.is_initialized()):
        return ()
    mail = known_mail(group_or_default(group))
    if not mail:
        return ()
    return key_of_tensors((operation, arguments, mail, x.requires_grad and torch.is_grad_enabled()), x)


def key_of(given: Given, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The key of a call in LAUNCHES; () where the kernels cannot take its tensors, or the call is traced."""
    x, mask, target, weight = given
    if not is_plain(x) or type(target) not in PLAIN_TYPES or x.is_neg() or not target.is_contiguous():
        return ()
    if mask is not None and type(mask) not in PLAIN_TYPES:
        return ()
    recorded = [x.requires_grad and torch.is_grad_enabled()]
    if weight is not None:
        if type(weight) not in PLAIN_TYPES or weight.is_neg() or not weight.is_contiguous():
            return ()
        # A weight that needs a gradient has a key of its own: the general path raises the error.
        recorded.append(weight.requires_grad and torch.is_grad_enabled())
    return key_of_tensors((arguments, *recorded, autocasts(x)), x, (target, mask, weight))


def run_if_possible(kind: ShardedKind, given: Given, call: Sharded) -> tuple[Tensor, ...] | None:
    """The results of a checked call, the same on every process; None where it is not usual."""
    reason = _why_not_plain(given)
    check_peer_memory(call.exchange, reason)
    if reason:
        return None
    # Processes may have different strides, and negations that are pending on one of them.
    weight = None if given.weight is None else given.weight.resolve_neg().contiguous()
    given = Given(given.x.resolve_neg(), given.mask, given.target.contiguous(), weight)
    reason = _why_not_usual(kind, given)
    check_peer_memory(call.exchange, reason)
    if reason:
        return None
    groups, (first, _, total) = call.groups, kind.shards
    part = None
    if _is_exact(kind):
        part = part_of(groups, given.x, kind.dim, first, total, call.exchange, kind.choice)
    else:
        check_peer_memory(call.exchange, "the kernels take an ignore_index as a float64")
    if part is None and (backend_for(given.x) is None or not _merges(kind, weight)):
        return None
    processes = math.prod(group.size() for group in groups)
    # The key of the public function ends its arguments with the way of exchange that was known before this call.
    known = part is None or (call.key and call.key[0][0][-1] == part.mail)
    key = (known and call.key) or key_of(given, (kind, processes, part))
    launches = LAUNCHES.get(key)
    if launches is None:
        with_gradient = given.x.requires_grad and torch.is_grad_enabled()
        launches = keep(
            LAUNCHES, key,
            Launches(kind, given, processes, with_gradient) if part is None
            else PeerLaunches(kind, _with_a_column(given, kind.dim), part, with_gradient),
        )  # fmt: skip
    return _run(launches, given, groups)


def _with_a_column(given: Given, dim: int) -> Given:
    """The tensors of a call; a shard without columns gets one (peers.py)."""
    if given.x.shape[dim]:
        return given
    return given._replace(x=with_a_column(given.x, dim), mask=None)


def _why_not_plain(given: Given) -> str:
    """Why kernels cannot take the tensors of a call; empty if they can."""
    plain = all(t is None or type(t) in PLAIN_TYPES for t in given)
    return "" if plain and is_plain(given.x) else "a tensor has functions of its own, or the call is transformed"


def _why_not_usual(kind: ShardedKind, given: Given) -> str:
    """Why kernels cannot take a call; empty if they can.  The same on every process."""
    x, _, target, weight = given
    backend, _, batch_invariant = kind.choice
    # On a CPU, Triton's interpreter runs the kernels if the caller forces them.
    if not (x.is_cuda or backend == "triton") or backend == "eager" or batch_invariant:
        return "the call runs PyTorch's operations"
    if x.dtype not in DTYPES or (weight is not None and weight.dtype not in DTYPES):
        return f"the kernels do not take a dtype of {x.dtype} and {None if weight is None else weight.dtype}"
    if not target.numel() or not kind.shards.total:
        return "there are no rows or no columns"
    if kind.loss is not None and not may_count(target, weight, kind.loss):
        return f"the kernels do not take ignore_index={kind.loss.ignore_index}"
    return ""


def _is_exact(kind: ShardedKind) -> bool:
    """True where a float64, as which the loss kernel takes `ignore_index`, is exact."""
    return kind.loss is None or abs(kind.loss.ignore_index) <= MOST_EXACT_INDEX


def _merges(kind: ShardedKind, weight: Tensor | None) -> bool:
    """True where the kernel that merges gathered states has the options of a call.

    It has no smoothing with weights, and no smoothing with a softcap.
    """
    loss = kind.loss
    return loss is None or loss.smoothing == 0 or (weight is None and kind.options.softcap is None)


def _run(launches: Launches | PeerLaunches, given: Given, groups: tuple[Any, ...]) -> tuple[Tensor, ...]:
    if isinstance(launches, PeerLaunches):
        return launches(_with_a_column(given, launches.dim))
    if not launches.with_gradient:
        return launches.forward(given, groups)[0]
    # The other tensors travel in a tuple, so that autograd need not look at them.
    y: tuple[Tensor, ...] = _apply(given.x, launches, given, groups)
    return y


class _Rows(torch.autograd.Function):
    """The results of a call, with a gradient.

    Backward needs no exchange, because all processes get the same incoming gradients.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, launches: Launches, given: Given, groups: tuple[Any, ...]) -> Any:
        y, saved = launches.forward(given._replace(x=x), groups)
        assert saved is not None
        ctx.save_for_backward(x, *saved)
        ctx.launches = launches
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        check_first_derivative("the gradient of numbers of sharded rows")
        if all(dy is None for dy in dys):
            return None, None, None, None
        x, *saved = ctx.saved_tensors
        return ctx.launches.backward(x, SavedForShards(*saved), dys), None, None, None


# `apply` of the base class in C++, without the check for transforms in torch.autograd.Function.
_apply = super(torch.autograd.Function, _Rows).apply
