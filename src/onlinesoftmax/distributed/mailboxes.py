"""Peer memory: mailboxes through which the kernels of several GPUs of one host exchange the states of rows.

A GPU writes to the memory of another one, through NVLink or PCIe.  So one kernel reads a shard, exchanges the states,
and writes its results, without a collective and while the row is still on chip (kernels/cuda/channel/processes.cuh).

All processes must choose the same way, because their kernels wait for each other.  So the choice uses only properties
that are equal on all processes.
"""

from __future__ import annotations

import hashlib
import math
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..core.processes import device_of_small_exchanges, gathered, timeout_of
from ..core.task import ANY, ITEMSIZE, MOST_PROCESSES, Choice, ColumnRange
from ..kernels import registry
from ..kernels.cuda.process_mailboxes import MAIL, ShardMail, words_of_mail
from ..planner.strategies import TABLE
from ..torch.fast_path import is_transformed
from ..torch.formulas import PLAIN_TYPES
from ..torch.prepare import DTYPE_NAMES
from ..torch.reasons import DTYPES

Tensor = torch.Tensor

PEER_MEMORY, COLLECTIVE = "peer_memory", "collective"
"""Values of the argument `exchange` of the public functions."""

MESSAGE_WORDS = {4: 6, 8: 12}
"""Largest number of 64-bit words of a message, by the bytes of the accumulator's dtype.

A message has 64 bits for each 32 bits of m, of two sums that are twice as wide, and of a score.
"""

_STRATEGIES = tuple(strategy for backend, strategy, _ in TABLE if backend == "cuda")
"""Strategies of the CUDA kernels."""

LEAST_BYTES, MOST_BYTES = 1 << 20, 64 << 20
"""Smallest and largest size of the mailboxes of a process; a call that needs more uses a collective."""

_CAPTURED = "a CUDA graph is captured; make a call of this size once before the capture, which makes the mailboxes"
"""Why a captured call that needs new mailboxes uses a collective."""


class Peers(NamedTuple):
    """The mailboxes of one process group, as this process knows them.

    Attributes:
        group: The process group.
        reason: Why its GPUs cannot use peer memory, or why the mailboxes could not be made larger; empty if they can.
        mail: Name of the mailboxes; empty if there are none.
        bytes: Bytes of the mailboxes of each process.
    """

    group: Any
    reason: str
    mail: str = ""
    bytes: int = 0


_PEERS: dict[str, Peers] = {}
"""The mailboxes of each group by its name, or the reason why it has none.

A new group may have the name of one that was destroyed.
"""


def checked_exchange(name: str, exchange: Any) -> str | None:
    """The argument `exchange` of a public function.

    Raises:
        ValueError: it is unknown.
    """
    if exchange not in (None, PEER_MEMORY, COLLECTIVE):
        raise ValueError(f"{name}(): exchange must be {PEER_MEMORY!r}, {COLLECTIVE!r} or None, got {exchange!r}")
    found: str | None = exchange
    return found


def check_peer_memory(exchange: str | None, reason: str) -> None:
    """Raise an error if the caller asks for peer memory, and there is a reason why it cannot be used.

    Args:
        exchange: The argument of the public function.
        reason: The reason; empty if peer memory can be used.

    Raises:
        ValueError: peer memory cannot be used.
    """
    if reason and exchange == PEER_MEMORY:
        raise ValueError(f"exchange={PEER_MEMORY!r} cannot be used: {reason}")


def columns_of(
    groups: tuple[Any, ...], x: Tensor, dim: int, first: int, total: int, exchange: str | None, choice: Choice = ANY
) -> ColumnRange | None:
    """The position of a shard for kernels that exchange states through peer memory; None for a collective.

    Args:
        groups: Process groups over which the softmax dimension is sharded.
        x: The shard.
        dim: The softmax dimension.
        first: Number of columns before the shard.
        total: Number of columns of a whole row.
        exchange: What the caller asks for: PEER_MEMORY, COLLECTIVE, or None for either.
        choice: What the caller forces of the plan.

    Raises:
        ValueError: peer memory is asked for and cannot be used.
    """
    if exchange == COLLECTIVE:
        return None
    rows = math.prod(x.shape[:dim]) * math.prod(x.shape[dim + 1 :])
    reason = _why_not(groups, x, rows, total, choice)
    if not reason:
        (group,) = groups
        peers = _peers(group, x.device, _mail_bytes(x, rows, group))
        reason = peers.reason
    check_peer_memory(exchange, reason)
    if reason:
        return None
    return ColumnRange(first if x.shape[dim] else total, total, group.rank(), group.size(), peers.mail)


def known_exchange(group: Any) -> str:
    """The way of exchange of a group for the key of a call: its mailboxes, or a collective.

    Empty before the first call of the group.  In that call all processes find out about the group together; a process
    that found a kept launch would not take part.  A group whose size rules out mailboxes has nothing to find out.
    """
    if not 1 < group.size() <= MOST_PROCESSES:
        return COLLECTIVE
    found = _found(group)
    return "" if found is None else found.mail or COLLECTIVE


def _found(group: Any) -> Peers | None:
    """The entry of a group in _PEERS; None before its first call."""
    found = _PEERS.get(group.group_name)
    return found if found is not None and found.group is group else None


def is_plain(x: Any) -> bool:
    """True for a tensor without functions of its own, outside of traces, functorch transforms and forward mode."""
    return type(x) in PLAIN_TYPES and not torch.compiler.is_compiling() and not is_transformed()


def with_a_column(x: Tensor, dim: int) -> Tensor:
    """The shard, or a copy with one column if it has none; kernels neither read nor write it (`ColumnRange`)."""
    if x.shape[dim]:
        return x
    found = torch.cat([x, x.new_zeros(*x.shape[:dim], 1, *x.shape[dim + 1 :])], dim)
    if found.requires_grad:
        # The kernel of the gradient does not write this column.
        found.register_hook(torch.zeros_like)
    return found


def _mail_bytes(x: Tensor, rows: int, group: Any) -> int:
    """Bytes of the mailboxes of a process for a call."""
    return 8 * words_of_mail(rows * group.size() * MESSAGE_WORDS[max(4, ITEMSIZE[DTYPE_NAMES[x.dtype]])])


def _why_not(groups: tuple[Any, ...], x: Tensor, rows: int, total: int, choice: Choice) -> str:
    """Why a call cannot use peer memory, the same on every process; empty if it can.

    The answer needs no exchange; whether the GPUs reach each other is not asked here.
    """
    if torch.compiler.is_compiling():
        return "torch.compile traces the collective"
    if not x.is_cuda:
        return "the shard is not on a GPU"
    if choice.backend not in (None, "cuda"):
        return f"only CUDA kernels exchange states with other GPUs, and backend is {choice.backend!r}"
    if choice.strategy not in (None, *_STRATEGIES):
        return f"CUDA kernels have no strategy {choice.strategy!r}"
    if not is_plain(x) or x.layout is not torch.strided:
        return "the shard is no plain tensor, or the call is transformed"
    if x.dtype not in DTYPES:
        return f"the dtype is {x.dtype}"
    if not rows or not total:
        return "there are no rows or no columns"
    if len(groups) > 1:
        return "several process groups share the softmax dimension"
    size = groups[0].size()
    if not 1 < size <= MOST_PROCESSES:
        return f"the group has {size} process{'es' if size > 1 else ''}, not 2 to {MOST_PROCESSES}"
    if _mail_bytes(x, rows, groups[0]) > MOST_BYTES:
        return f"the messages of {rows} rows take more than {MOST_BYTES >> 20} MiB"
    return ""


def _peers(group: Any, device: torch.device, size: int) -> Peers:
    """The mailboxes of a group, with at least `size` bytes for each process.

    All processes make them together, in the first call and in a call that needs more.
    """
    found = _found(group)
    if found is not None and found.bytes >= size:
        return found._replace(reason="")
    if found is not None and found.reason:
        return found
    if torch.cuda.is_current_stream_capturing():
        return Peers(group, _CAPTURED)
    if found is None and (reason := _why_unreachable(group, device)):
        made = Peers(group, reason)
    else:
        made = _make_mailboxes(group, device, max(LEAST_BYTES, 1 << (size - 1).bit_length()))
        if made.reason and found is not None:
            # Smaller calls keep their mailboxes.
            made = found._replace(reason=made.reason)
    _PEERS[group.group_name] = made
    return made


def _why_unreachable(group: Any, device: torch.device) -> str:
    """Why the GPUs of a group cannot reach each other's memory; empty if they can.  The same on every process."""
    here = registry.unavailable("cuda") or ""
    properties = torch.cuda.get_device_properties(device)
    # Containers with different host names count as different hosts, because they may not be able to share memory.
    host = f"{socket.gethostname()} {_boot_id()}"
    told = [not here, _hashed(host), _hashed(str(properties.uuid))]
    message = torch.tensor(told, dtype=torch.int64, device=device_of_small_exchanges(group, device))
    each = gathered(message, group).tolist()
    if not all(can for can, _, _ in each):
        return here or "the CUDA kernels cannot run on another process"
    if len({host for _, host, _ in each}) > 1:
        return "the processes run on several hosts"
    if len({gpu for _, _, gpu in each}) < len(each):
        return "several processes share a GPU"
    return ""


def _boot_id() -> str:
    """The boot id of the kernel, which differs between hosts of one name; empty if it cannot be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _hashed(text: str) -> int:
    """The first 63 bits of a hash of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _make_mailboxes(group: Any, device: torch.device, size: int) -> Peers:
    """New mailboxes of so many bytes in the memory of each process, filled with zeros."""
    memory, reason = _on_all_processes(group, device, lambda: _allocate(device, size))
    if not reason:
        # All processes have memory now, so all of them come to the exchange of addresses.
        found, reason = _on_all_processes(group, device, lambda: _rendezvous(memory, group))
    if reason:
        return Peers(group, reason)
    handle, addresses = found
    name = f"{group.group_name} {len(MAIL)}"
    MAIL[name] = ShardMail(addresses, memory, timeout_of(group, device), handle)
    return Peers(group, "", name, size)


def _on_all_processes(group: Any, device: torch.device, step: Callable[[], Any]) -> tuple[Any, str]:
    """(the result of a step, "") where it succeeds on every process; else (None, the reason)."""
    found, reason = None, ""
    try:
        found = step()
    except Exception as error:
        # Some builds of PyTorch lack these functions, and not every machine lets GPUs reach each other.  Whatever the
        # error is, the other processes wait to hear of it.
        reason = f"PyTorch's symmetric memory failed: {error}"
    failed = torch.tensor([bool(reason)], device=device_of_small_exchanges(group, device))
    if gathered(failed, group).any():
        return None, reason or "PyTorch's symmetric memory failed on another process"
    return found, ""


def _allocate(device: torch.device, size: int) -> Any:
    """Memory that other GPUs can reach, in a tensor of zeros."""
    from torch.distributed import _symmetric_memory as symmetric

    # The first call may be made in inference mode, and a graph that adds to this tensor captured outside of it.
    with torch.inference_mode(False):
        memory = symmetric.empty(size // 8, dtype=torch.int64, device=device)
    memory.zero_()
    # Another process may write as soon as it has the address.
    torch.cuda.synchronize(device)
    return memory


def _rendezvous(memory: Any, group: Any) -> tuple[Any, list[int]]:
    """(PyTorch's handle of the memory of all processes, the address of the memory of each)."""
    from torch.distributed import _symmetric_memory as symmetric

    handle = symmetric.rendezvous(memory, group.group_name)
    # Some versions of PyTorch give the addresses of the segments in which the memory lies.
    offset = getattr(handle, "offset", 0)
    return handle, [address + offset for address in handle.buffer_ptrs]
