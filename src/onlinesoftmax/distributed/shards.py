"""Position of this process's columns in the whole row: given by the caller, or found by an exchange.

The exchange also compares the calls of the processes: different calls would otherwise end in an exchange of states that
fails, hangs or mixes results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..core.agreement import Announcement, name_of, numbers_of_all
from ..core.processes import group_or_default
from ..torch.check import checked_dim
from ..torch.fast_path import keep, new_cache

Tensor = torch.Tensor

ANNOUNCEMENTS: dict[tuple[Any, ...], tuple[Announcement, int]] = new_cache()
"""The announcements of calls without `shards=`, and their softmax dimensions, by the keys of usual.py."""


class Shards(NamedTuple):
    """The position of this process's columns in the whole row.

    A call without `shards=` compares the calls of all processes and exchanges their numbers of columns, every time,
    because another process may have changed its shape, and this process cannot see that.  A call with `shards=`
    exchanges and compares nothing.

    Attributes:
        first: Number of columns on the processes before this one.
        cols: Number of columns here; it may be 0.
        total: Number of columns on all processes.

    Example:
        >>> Shards(first=64000, cols=64256, total=128256)  # the second of two processes
        Shards(first=64000, cols=64256, total=128256)
    """

    first: int
    cols: int
    total: int

    @classmethod
    def of(cls, local: Tensor, dim: int = -1, group: Any = None) -> Shards:
        """The shards of a tensor, by an exchange of the shapes of all processes.

        Args:
            local: The columns of this process.
            dim: The softmax dimension.
            group: Process group; the default group if None.

        Raises:
            ValueError: the processes have different rows or dtypes, or make different calls; the message has the shape
                and the dtype of each process, or the different calls.
            RuntimeError: no process group is initialised, or another process has ended.
        """
        dim = checked_dim("Shards.of", dim, local.dim())
        return agreed(announced("Shards.of", local, dim, {}), local, dim, group_or_default(group))


def shards_of(
    name: str, x: Tensor, dim: int, groups: tuple[Any, ...], given: Shards | None,
    same: Callable[[], Mapping[str, Any]], key: tuple[Any, ...] = (),
) -> Shards:  # fmt: skip
    """The shards of a tensor: those that the caller gives, else those of an exchange, which waits for all processes.

    Args:
        name: Name of the public function, for errors.
        x: The local tensor.
        dim: The softmax dimension, counted from 0.
        groups: Process groups; there is one group if no shards are given.
        given: The argument `shards` of the public function.
        same: Function that returns the arguments that every process must give alike, by name; an exchange compares
            them.
        key: Key of the call in ANNOUNCEMENTS; () where it has none.

    Raises:
        TypeError: the given shards are no `Shards`.
        ValueError: the given shards do not fit the tensor, or the processes have different rows, dtypes or arguments.
    """
    if given is None:
        if torch.compiler.is_dynamo_compiling():
            # With fullgraph=True this is an error, which shows the sentence.
            torch._dynamo.graph_break(msg="pass shards=: without it, the host reads the shapes of all processes")
        (group,) = groups
        call = announced(name, x, dim, same())
        # A tensor among the arguments may change its value.
        if key and not any(isinstance(argument, Tensor) for argument in key[1]):
            keep(ANNOUNCEMENTS, key, (call, dim))
        return agreed(call, x, dim, group)
    if not isinstance(given, Shards):
        raise TypeError(f"{name}(): argument 'shards' must be Shards, not {type(given).__name__}")
    if given.cols != x.shape[dim] or not 0 <= given.first <= given.first + given.cols <= given.total:
        raise ValueError(
            f"{name}(): {given} does not fit a local tensor with {x.shape[dim]} columns: cols must be their number, "
            "first at least 0, and first + cols at most total"
        )
    return given


def to_local_columns(target: Tensor, shards: Shards) -> Tensor:
    """The targets counted from the first local column, in int64: a narrower difference could overflow."""
    return target.long() - shards.first if shards.first else target.long()


def announced(name: str, x: Tensor, dim: int, same: Mapping[str, Any]) -> Announcement:
    """The announcement of a call; arguments as for `shards_of`."""
    dtype, shape = name_of(x.dtype), tuple(x.shape)
    rows = dtype, dim, shape[:dim] + shape[dim + 1 :]
    return Announcement.of(name, same, rows, f"{shape} {dtype} with dim {dim}")


def agreed(call: Announcement, x: Tensor, dim: int, group: Any) -> Shards:
    """The shards of a tensor, if all processes of a group make the same call.

    Raises:
        ValueError: the processes have different rows, dtypes or arguments.
    """
    sizes, here = numbers_of_all(call, x.shape[dim], (group,), x.device), group.rank()
    return Shards(sum(sizes[:here]), sizes[here], sum(sizes))
