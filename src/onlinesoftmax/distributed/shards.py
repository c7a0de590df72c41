"""Position of this process's columns in the whole row: given by the caller, or found by an exchange of shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..core.processes import device_of_small_exchanges, gathered, group_or_default
from ..core.task import ITEMSIZE
from ..torch.check import checked_dim

Tensor = torch.Tensor

MOST_DIMENSIONS = 64
"""PyTorch's own limit of a tensor's dimensions."""

_NAMES = (*ITEMSIZE, "another dtype")
"""Names of the dtypes of shards; a name is sent as its position."""


class Shards(NamedTuple):
    """The position of this process's columns in the whole row.

    A call without `shards=` exchanges the shapes every time, because another process may have changed its shape, and
    this process cannot see that.  A call with `shards=` exchanges no shapes, so it neither waits for a GPU nor compares
    the rows of the processes.

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
            ValueError: the processes have different rows or dtypes; the message has the shape and the dtype of each
                process.
            RuntimeError: no process group is initialised, or another process has ended.
        """
        return _exchanged("Shards.of", local, checked_dim("Shards.of", dim, local.dim()), group_or_default(group))


def shards_of(name: str, x: Tensor, dim: int, groups: tuple[Any, ...], given: Shards | None) -> Shards:
    """The shards of a tensor: those that the caller gives, else those of an exchange, which waits for all processes.

    Args:
        name: Name of the public function, for errors.
        x: The local tensor.
        dim: The softmax dimension, counted from 0.
        groups: Process groups; there is one group if no shards are given.
        given: The argument `shards` of the public function.

    Raises:
        TypeError: the given shards are no `Shards`.
        ValueError: the given shards do not fit the tensor, or the processes have different rows or dtypes.
    """
    if given is None:
        (group,) = groups
        return _exchanged(name, x, dim, group)
    if not isinstance(given, Shards):
        raise TypeError(f"{name}(): argument 'shards' must be Shards, not {type(given).__name__}")
    if given.cols != x.shape[dim] or not 0 <= given.first <= given.first + given.cols <= given.total:
        raise ValueError(f"{name}(): {given} does not fit a local tensor with {x.shape[dim]} columns")
    return given


def to_local_columns(target: Tensor, shards: Shards) -> Tensor:
    """The targets counted from the first local column, in int64: a narrower difference could overflow."""
    return target.long() - shards.first if shards.first else target.long()


def _name_of(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return name if name in ITEMSIZE else _NAMES[-1]


def _exchanged(name: str, x: Tensor, dim: int, group: Any) -> Shards:
    told = (_NAMES.index(_name_of(x.dtype)), x.dim(), dim, *x.shape)
    # Every process sends the same number of integers, so processes with different shapes make the same exchange.
    message = torch.zeros(3 + MOST_DIMENSIONS, dtype=torch.int64)
    message[: len(told)] = torch.tensor(told)
    found = gathered(message.to(device_of_small_exchanges(group, x.device)), group).tolist()
    shapes = [(_NAMES[dtype], axis, tuple(more[:ndim])) for dtype, ndim, axis, *more in found]
    rows = {(dtype, len(shape), axis, shape[:axis] + shape[axis + 1 :]) for dtype, axis, shape in shapes}
    if len(rows) > 1:
        each = [f"rank {rank}: {shape} {dtype} with dim {axis}" for rank, (dtype, axis, shape) in enumerate(shapes)]
        raise ValueError(
            f"{name}(): the shards must have the same dtype, and the same shape except in the softmax dimension; "
            + ", ".join(each)
        )
    sizes = [shape[axis] for _, axis, shape in shapes]
    here = group.rank()
    return Shards(sum(sizes[:here]), sizes[here], sum(sizes))
