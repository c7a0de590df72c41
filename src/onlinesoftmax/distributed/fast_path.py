"""Prepared calls of sharded rows in the cache of torch/fast_path.py, and the keys under which repeated calls find them.

Losses and log-probabilities are kept for either way of exchange, softmax and log-softmax where peer memory is used.
Only properties that are the same on every process decide whether a call is kept.  So all processes merge by the same
kernels and get the same bits.  Other calls take the general way (collective_eager.py), which sends the same numbers.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ..core.processes import group_or_default, has_processes
from ..core.task import ColumnRange
from ..torch.arguments import autocasts
from ..torch.fast_path import PREPARED_CALLS, keep
from ..torch.fast_path import key_of as key_of_tensors
from ..torch.formulas import PLAIN_TYPES
from ..torch.loss_arguments import MOST_EXACT_INDEX
from ..torch.reasons import DTYPES
from ..torch.small_kernels import backend_for
from .collective import CollectiveLaunches
from .mailboxes import COLLECTIVE, check_peer_memory, columns_of, is_plain, known_exchange
from .peer_memory import PeerLaunches, losses_of_chunk
from .shards import ANNOUNCEMENTS, Operands, ShardedInput, Shards, ShardSignature, agreed

Tensor = torch.Tensor


class Known(NamedTuple):
    """The facts about a call that are known before its arguments are checked.

    Attributes:
        shards, key, announced: As in ShardedInput; the shards are None where the processes have still to agree.
        results: Its results; None where the call is to be prepared.
    """

    shards: Any
    key: tuple[Any, ...] = ()
    announced: tuple[Any, ...] = ()
    results: tuple[Tensor, ...] | None = None


def look_up(name: str, operands: Operands, arguments: tuple[Any, ...], shards: Any, group: Any) -> Known:
    """The facts about a call of a public function, after an exchange if it is announced.

    Args:
        name: Name of the public function.
        operands: Its tensors.
        arguments: All other arguments except `shards` and `group`.
        shards, group: Its arguments of these names; shards that are given are returned.
    """
    if torch.compiler.is_compiling():
        return Known(shards)
    # An equal number of a wrong type, as 1.0 for 1, must not find the call of the right one.
    arguments = *arguments, *map(type, arguments)
    announced: tuple[Any, ...] = ()
    if shards is None:
        shards, announced = _agree(name, operands, arguments, group)
    if type(shards) is not Shards or (group is None and not has_processes()):
        return Known(shards, (), announced)
    group = group_or_default(group)
    way = known_exchange(group) if getattr(operands.x, "is_cuda", False) else COLLECTIVE
    key = key_of(operands, (name, arguments, shards, group.size(), way)) if way else ()
    try:
        run = PREPARED_CALLS.get(key) if key else None
    except TypeError:
        # An argument that has no hash is of a wrong type, and the check of the arguments names it.
        return Known(shards, (), announced)
    return Known(shards, key, announced, None if run is None else run(operands, (group,)))


def _agree(name: str, operands: Operands, arguments: tuple[Any, ...], group: Any) -> tuple[Any, tuple[Any, ...]]:
    """(the shards of a call, its key in ANNOUNCEMENTS).  Without an announcement under the key, the shards are None:
    the caller then checks the arguments, and `shards_of` agrees with the other processes.
    """
    x, alike = operands.x, (operands.x, operands.target, operands.weight)
    if not all(t is None or type(t) in PLAIN_TYPES for t in alike):
        return None, ()
    key = name, arguments, *(None if t is None else (t.shape, t.dtype) for t in alike)
    try:
        found = ANNOUNCEMENTS.get(key)
    except TypeError:
        return None, ()
    return None if found is None else agreed(found[0], x, found[1], group_or_default(group)), key


def key_of(operands: Operands, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The key of a call in PREPARED_CALLS, which holds its function (operands, process groups).

    () where the kernels cannot take its tensors, or the call is traced.
    """
    x, mask, target, weight = operands.x, operands.mask, operands.target, operands.weight
    if not is_plain(x) or x.layout is not torch.strided or x.is_nested or x.is_neg():
        return ()
    if target is not None and (type(target) not in PLAIN_TYPES or not target.is_contiguous()):
        return ()
    if mask is not None and type(mask) not in PLAIN_TYPES:
        return ()
    recorded = [x.requires_grad and torch.is_grad_enabled()]
    if weight is not None:
        if type(weight) not in PLAIN_TYPES or weight.is_neg() or not weight.is_contiguous():
            return ()
        # A weight that needs a gradient has a key of its own: the general way raises the error.
        recorded.append(weight.requires_grad and torch.is_grad_enabled())
    return key_of_tensors((arguments, *recorded, autocasts(x)), x, target, mask, weight)


def public_key(call: ShardedInput, columns: ColumnRange | None) -> tuple[Any, ...]:
    """The key under which the public function looks for a call; () where another way of exchange ends the key.

    Args:
        call: The call.
        columns: The position of the shard for an exchange through peer memory; None for a collective.
    """
    # The key ends its arguments with the way of exchange that was known before this call.
    return call.key if columns is None or (call.key and call.key[0][0][-1] == columns.mail) else ()


def run_if_possible(signature: ShardSignature, operands: Operands, call: ShardedInput) -> tuple[Tensor, ...] | None:
    """The results of a checked call by kernels, the same on every process; None where it takes the general way."""
    reason = _why_general(signature, operands)
    check_peer_memory(call.exchange, reason)
    if reason:
        return None
    # Processes may have different strides, and negations that are pending on one of them.
    weight = None if operands.weight is None else operands.weight.resolve_neg().contiguous()
    operands = Operands(operands.x.resolve_neg(), operands.mask, operands.target.contiguous(), weight)
    groups, x, columns, loss = call.groups, operands.x, None, signature.loss
    if loss is None or abs(loss.ignore_index) <= MOST_EXACT_INDEX:
        first, total = signature.shards.first, signature.shards.total
        columns = columns_of(groups, x, signature.dim, first, total, call.exchange, signature.choice)
    else:
        check_peer_memory(call.exchange, "the kernels take an ignore_index as a float64")
    if columns is None and not _merges(signature, operands):
        return None
    processes = math.prod(group.size() for group in groups)
    key = public_key(call, columns) or key_of(operands, (signature, processes, columns))
    run = PREPARED_CALLS.get(key)
    if run is None:
        with_gradient = x.requires_grad and torch.is_grad_enabled()
        run = keep(
            PREPARED_CALLS, key,
            CollectiveLaunches(signature, operands, processes, with_gradient) if columns is None
            else PeerLaunches(signature, operands, columns, with_gradient),
        )  # fmt: skip
    return run(operands, groups)


def run_chunk_if_possible(
    signature: ShardSignature, operands: Operands, groups: tuple[Any, ...], factor: Tensor | None
) -> tuple[Tensor, Tensor | None] | None:
    """(losses, gradient of the sum of factor · loss) of a chunk of the logits of a head, by kernels in their place.

    None where the chunk takes the general way.  Autograd does not see these kernels.

    Args:
        signature, operands: Those of the chunk; the loss is that of each row, and the tensors are contiguous.
        groups: Process groups over which the classes are sharded.
        factor: Factor of the loss of each row; None for no gradient.
    """
    loss, x, shards = signature.loss, operands.x, signature.shards
    if loss is None or abs(loss.ignore_index) > MOST_EXACT_INDEX or _why_general(signature, operands):
        return None
    columns = columns_of(groups, x, signature.dim, shards.first, shards.total, None, signature.choice)
    if columns is not None:
        return losses_of_chunk(signature, operands, columns, factor)
    if not _merges(signature, operands):
        return None
    processes = math.prod(group.size() for group in groups)
    key = key_of(operands, (signature, processes, "chunk", factor is None))
    launches = PREPARED_CALLS.get(key)
    if launches is None:
        made = CollectiveLaunches(signature, operands, processes, factor is not None)
        launches = keep(PREPARED_CALLS, key, made)
    (rows,), saved = launches.forward(operands, groups)
    return rows, None if factor is None else launches.backward(x, saved, (factor,), x)


def _merges(signature: ShardSignature, operands: Operands) -> bool:
    """True where a kernel can merge gathered states: it has no smoothing with weights, and none with a softcap."""
    merges = not signature.smoothed or (operands.weight is None and signature.options.softcap is None)
    return merges and backend_for(operands.x) is not None


def _why_general(signature: ShardSignature, operands: Operands) -> str:
    """Why kernels cannot take a call; empty if they can.  The same on every process."""
    x, target, weight, choice = operands.x, operands.target, operands.weight, signature.choice
    if not is_plain(x) or not all(t is None or type(t) in PLAIN_TYPES for t in operands):
        return "a tensor has functions of its own, or the call is transformed"
    # On a CPU, Triton's interpreter runs the kernels if the caller forces them.
    if not (x.is_cuda or choice.backend == "triton") or choice.backend == "eager" or choice.batch_invariant:
        return "the call runs PyTorch's operations"
    if x.dtype not in DTYPES or (weight is not None and weight.dtype not in DTYPES):
        return f"the kernels do not take a dtype of {x.dtype} and {None if weight is None else weight.dtype}"
    if not target.numel() or not signature.shards.total:
        return "there are no rows or no columns"
    if signature.loss is not None and not -(2**63) <= signature.loss.ignore_index < 2**63:
        return f"the kernels do not take ignore_index={signature.loss.ignore_index}"
    return ""
