"""Position of this process's columns in the whole row, found by an exchange of shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

Tensor = torch.Tensor


class Shards(NamedTuple):
    """The position of this process's columns in the whole row.

    Attributes:
        first: Number of columns on the processes before this one.
        cols: Number of columns here; it may be 0.
        total: Number of columns on all processes.
    """

    first: int
    cols: int
    total: int


_SHARDS: dict[tuple[Any, ...], Shards] = {}
"""Shards by group, shape, dimension and type of device."""

MOST_SHARDS = 4096


def shards_of(name: str, x: Tensor, dim: int, group: Any) -> Shards:
    """The shards of a tensor.  The first call with a shape exchanges the shapes of all processes, and waits for them.

    Later calls with the same shape here use the same answer.  So tensors that have one shape on this process and
    different shapes on another process need different groups.

    Args:
        name: Name of the public function, for errors.
        x: The local tensor.
        dim: The sharded dimension, counted from 0.
        group: Process group.

    Raises:
        ValueError: the processes have different rows; the message has the shape of each process.
    """
    key = (group.group_name, tuple(x.shape), dim, x.device.type)
    found = _SHARDS.get(key)
    if found is None:
        if len(_SHARDS) >= MOST_SHARDS:
            _SHARDS.clear()
        found = _SHARDS[key] = _exchanged(name, x, dim, group)
    return found


def _exchanged(name: str, x: Tensor, dim: int, group: Any) -> Shards:
    shapes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(shapes, (tuple(x.shape), dim), group=group)
    rows = {(len(shape), axis, shape[:axis] + shape[axis + 1 :]) for shape, axis in shapes}
    if len(rows) > 1:
        each = ", ".join(f"rank {rank}: {shape} with dim {axis}" for rank, (shape, axis) in enumerate(shapes))
        raise ValueError(f"{name}(): the shards must have the same shape except in the sharded dimension; {each}")
    sizes = [shape[axis] for shape, axis in shapes]
    here = dist.get_rank(group)
    return Shards(sum(sizes[:here]), sizes[here], sum(sizes))
