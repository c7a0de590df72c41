"""Exchanges between the processes of torch process groups.

Every exchange uses one collective function, shared by all callers.  torch is imported when the first exchange is made.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np

from .arrays import Array, array_kind

Group = Any
"""A process group of torch.distributed."""


class ExchangeError(RuntimeError):
    """An exchange has failed: another process has ended, or did not make the same call within the timeout."""


def has_processes() -> bool:
    """True where torch.distributed has process groups, so that a collective may run."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def group_or_default(group: Group | None) -> Group:
    """The group itself, or the default group if it is None.

    Raises:
        RuntimeError: no process group is initialised, or this process is not part of the group.
        TypeError: the group is no process group.
    """
    import torch
    import torch.distributed as dist

    available = dist.is_available()
    # torch.compile knows the class of a group that it traces by another name.
    if group is not None and not torch.compiler.is_compiling() and not (available and _is_group(group, dist)):
        instead = "; pass its get_group()" if hasattr(group, "get_group") else ""
        raise TypeError(
            f"group must be a process group of torch.distributed or None, not {type(group).__name__}{instead}"
        )
    if not has_processes():
        raise RuntimeError("no process group: call torch.distributed.init_process_group, or start with torchrun")
    return dist.group.WORLD if group is None else group


def _is_group(group: Any, dist: Any) -> bool:
    """True for a process group; an error for the group of other processes, which PyTorch gives as a number."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise RuntimeError("this process is not part of the group, so it must not make the call")
    return isinstance(group, dist.ProcessGroup)


def gathered(t: Any, *groups: Group) -> Any:
    """The tensors of all processes, stacked along a new first dimension; the same bits on every process.

    Args:
        t: A tensor; its shape and its dtype are the same on every process.
        groups: Process groups that are the axes of a grid of processes.  There is one collective for each.

    Raises:
        ExchangeError: another process has ended, or did not make the same call within the group's timeout.
    """
    found = t.unsqueeze(0)
    for group in reversed(groups):
        found = _gathered_over_group(found, group).flatten(0, 1)
    return found


def _gathered_over_group(t: Any, group: Group) -> Any:
    import torch

    size = group.size()
    t = t.contiguous()
    if torch.compiler.is_compiling():
        ops = torch.ops._c10d_functional
        flat = ops.wait_tensor(ops.all_gather_into_tensor(t.view(-1), size, group.group_name))
    else:
        flat = gathered_flat(t.view(-1), group)
    return flat.view(size, *t.shape)


def gathered_flat(t: Any, *groups: Group) -> Any:
    """The tensors of all processes, one after the other, without a trace.  Arguments and errors as for `gathered`.

    Args:
        t: A contiguous tensor of one dimension.
        groups: The process groups.
    """
    for group in reversed(groups):
        found = t.new_empty(group.size() * t.numel())
        try:
            _all_gather()(found, t, group=group)
        except RuntimeError as error:
            raise failure(group, error) from error
        t = found
    return t


def start_gathering(t: Any, *groups: Group) -> Callable[[], Any]:
    """Starts `gathered_flat`, and returns the function that waits for it and returns its result.

    What is computed before that function is called overlaps the exchange over the last group.
    """
    *others, group = groups
    found = t.new_empty(group.size() * t.numel())
    try:
        work = _all_gather()(found, t, group=group, async_op=True)
    except RuntimeError as error:
        raise failure(group, error) from error

    def finish() -> Any:
        try:
            work.wait()
        except RuntimeError as error:
            raise failure(group, error) from error
        return gathered_flat(found, *others)

    return finish


def start_adding(t: Any, *groups: Group) -> Callable[[], Any]:
    """Starts to add a tensor over the processes, in place, and returns the function that waits and returns the tensor.

    Only the sum over the last group overlaps what is computed before that function is called.

    Args:
        t: A contiguous tensor.
        groups: Process groups that are the axes of a grid of processes; without one, nothing is added.
    """
    import torch.distributed as dist

    work = None
    for i, group in enumerate(groups):
        try:
            work = dist.all_reduce(t, group=group, async_op=i == len(groups) - 1)
        except RuntimeError as error:
            raise failure(group, error) from error

    def finish() -> Any:
        try:
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise failure(groups[-1], error) from error
        return t

    return finish


def _all_gather() -> Callable[..., Any]:
    import torch.distributed as dist

    # PyTorch renamed all_gather_into_tensor to all_gather_single.
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def failure(group: Group, error: Exception) -> ExchangeError:
    """The error of an exchange that has failed."""
    import torch.distributed as dist

    return ExchangeError(
        f"an exchange between {group.size()} processes failed on rank {dist.get_rank(group)}: another process has "
        f"ended, or did not make the same call within the group's timeout ({error})"
    )


def gathered_arrays(arrays: list[Array], group: Group) -> list[list[Array]]:
    """The arrays of every process, in the order of the ranks, by one collective for each dtype.

    Args:
        arrays: NumPy arrays or torch tensors of one shape, the same on every process.
        group: A process group; one that exchanges CPU tensors, as gloo does, for NumPy arrays.
    """
    import torch

    of_torch, found = array_kind(arrays[0]) == "torch", dict[int, Array]()
    for dtype in dict.fromkeys(t.dtype for t in arrays):
        places = [i for i, t in enumerate(arrays) if t.dtype == dtype]
        chosen = [arrays[i] for i in places]
        together = gathered(torch.stack(chosen) if of_torch else torch.from_numpy(np.stack(chosen)), group)
        found |= zip(places, (together if of_torch else together.numpy()).swapaxes(0, 1), strict=True)
    return [list(process) for process in zip(*(found[i] for i in range(len(arrays))), strict=True)]


def device_of_array(x: Array) -> Any:
    """Device of a torch tensor; the CPU for a NumPy array.

    Raises:
        TypeError: the array is of another kind.
    """
    kind = array_kind(x)
    if kind not in ("torch", "numpy"):
        raise TypeError(f"all_reduce: torch tensors and NumPy arrays travel between processes, {kind} arrays do not")
    return x.device if kind == "torch" else "cpu"


def device_of_small_exchanges(group: Group, device: Any) -> Any:
    """The CPU if the group can exchange tensors of the CPU, which waits for no GPU; else `device`."""
    import torch.distributed as dist

    return "cpu" if "cpu:" in dist.get_backend_config(group) else device


def timeout_of(group: Group, device: Any) -> float:
    """Seconds for which the collectives of a group wait; 10 minutes where the backend does not say.

    Args:
        group: The group.
        device: Device of the tensors that are exchanged.
    """
    import torch

    options = getattr(group._get_backend(torch.device(device)), "options", None)
    timeout: timedelta = getattr(options, "_timeout", None) or timedelta(minutes=10)
    return timeout.total_seconds()
