"""A call on sharded rows, and the position of its columns in the whole row, from the caller or an exchange.

The exchange also compares the calls of the processes: different calls would otherwise end in an exchange of states that
fails, hangs or mixes results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..core.agreement import Announcement, numbers_of_all
from ..core.arguments import checked_dim
from ..core.arrays import dtype_name
from ..core.options import PLAIN, ScoreOptions
from ..core.processes import group_or_default
from ..core.task import ANY, Choice
from ..torch.fast_path import keep, new_cache
from ..torch.loss_arguments import Loss

Tensor = torch.Tensor

ANNOUNCEMENTS: dict[tuple[Any, ...], tuple[Announcement, int]] = new_cache()
"""The announcements of calls without `shards=`, and their softmax dimensions, by the keys of fast_path.py."""


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


class Operands(NamedTuple):
    """The tensors of a call: local logits and mask; targets and weights of all processes.

    Softmax and logsumexp have no targets.
    """

    x: Tensor
    mask: Tensor | None = None
    target: Any = None
    weight: Tensor | None = None

    def with_target(self, dim: int) -> Operands:
        """The tensors with a target for each row: without targets, one that is no column anywhere."""
        if self.target is not None:
            return self
        shape = self.x.shape
        return self._replace(target=torch.full((*shape[:dim], *shape[dim + 1 :]), -1, device=self.x.device))


class ShardedInput(NamedTuple):
    """The arguments of a call whose softmax dimension is sharded, without the tensors of rows.

    Attributes:
        groups: Process groups over which the softmax dimension is sharded; several are the axes of a grid of processes.
        options: Scale, softcap and mask of the scores; PLAIN where there is none.
        choice: What the caller forces of the local plan.
        shards: The local columns as the caller gives them; None where an exchange finds them.
        exchange: How the caller wants states to be exchanged (mailboxes.py); None for either way.
        key: Key of the prepared call (fast_path.py); () where it has none.
        announced: Key of the call in ANNOUNCEMENTS; () where it has none.
    """

    groups: tuple[Any, ...]
    options: ScoreOptions = PLAIN
    choice: Choice = ANY
    shards: Shards | None = None
    exchange: str | None = None
    key: tuple[Any, ...] = ()
    announced: tuple[Any, ...] = ()

    @property
    def without_key(self) -> ShardedInput:
        """The call with other operands than those that its key stands for."""
        return self._replace(key=())

    def same(self) -> dict[str, Any]:
        """The arguments that every process must give alike.

        The value of a tensor is not read, because that would wait for a GPU.
        """
        scale, softcap = self.options.scale, self.options.softcap
        return {
            "scale": "a tensor" if isinstance(scale, Tensor) else float(scale),
            "softcap": softcap if softcap is None else float(softcap),
            "exchange": self.exchange, "backend": self.choice.backend, "strategy": self.choice.strategy,
        }  # fmt: skip


class ShardSignature(NamedTuple):
    """Properties of a call for statistics of sharded rows that do not depend on its tensors' values; hashable.

    Attributes:
        dim: The softmax dimension.
        shards: Position of the local columns in the whole row.
        options: Scale and softcap of the scores.
        choice: What the caller forces of the local plan.
        loss: The arguments of a cross-entropy; None for log-probabilities.
        outputs: Names of the results: "y" (the loss, or the log-probability), "lse", "entropy".
        result: Dtype of "y" and "lse".
    """

    dim: int
    shards: Shards
    options: ScoreOptions
    choice: Choice
    loss: Loss | None
    outputs: tuple[str, ...]
    result: torch.dtype

    @property
    def reduces(self) -> bool:
        """True where the losses are reduced to a scalar."""
        return self.loss is not None and self.loss.reduction != "none"

    @property
    def smoothed(self) -> bool:
        """True where the loss has label smoothing."""
        return self.loss is not None and self.loss.smoothing != 0


def shards_of(
    name: str, x: Tensor, dim: int, call: ShardedInput, more: Callable[[], Mapping[str, Any]] = dict
) -> Shards:
    """The shards of a tensor: those that the caller gives, else those of an exchange, which waits for all processes.

    Args:
        name: Name of the public function, for errors.
        x: The local tensor.
        dim: The softmax dimension, counted from 0.
        call: The call; it has one process group if no shards are given.
        more: Function that returns further arguments that every process must give alike, by name; an exchange compares
            them.

    Raises:
        TypeError: the given shards are no `Shards`.
        ValueError: the given shards do not fit the tensor, or the processes have different rows, dtypes or arguments.
    """
    given, key = call.shards, call.announced
    if given is None:
        if torch.compiler.is_dynamo_compiling():
            # With fullgraph=True this is an error, which shows the sentence.
            torch._dynamo.graph_break(msg="pass shards=: without it, the host reads the shapes of all processes")
        (group,) = call.groups
        announcement = announced(name, x, dim, {**more(), **call.same()})
        # A tensor among the arguments may change its value.
        if key and not any(isinstance(argument, Tensor) for argument in key[1]):
            keep(ANNOUNCEMENTS, key, (announcement, dim))
        return agreed(announcement, x, dim, group)
    return checked_shards(name, given, x.shape[dim])


def checked_shards(name: str, given: Any, cols: int) -> Shards:
    """The argument `shards` of a public function whose local tensor has so many columns.

    Raises:
        TypeError, ValueError: as for `shards_of`.
    """
    if not isinstance(given, Shards):
        raise TypeError(f"{name}(): argument 'shards' must be Shards, not {type(given).__name__}")
    if given.cols != cols or not 0 <= given.first <= given.first + given.cols <= given.total:
        raise ValueError(
            f"{name}(): {given} does not fit a local tensor with {cols} columns: cols must be their number, "
            "first at least 0, and first + cols at most total"
        )
    return given


def to_local_columns(target: Tensor, shards: Shards) -> Tensor:
    """The targets counted from the first local column, in int64: a narrower difference could overflow."""
    return target.long() - shards.first if shards.first else target.long()


def announced(name: str, x: Tensor, dim: int, same: Mapping[str, Any]) -> Announcement:
    """The announcement of a call; arguments as for `shards_of`."""
    dtype, shape = dtype_name(x.dtype), tuple(x.shape)
    rows = dtype, dim, shape[:dim] + shape[dim + 1 :]
    return Announcement.of(name, same, rows, f"{shape} {dtype} with dim {dim}")


def agreed(call: Announcement, x: Tensor, dim: int, group: Any) -> Shards:
    """The shards of a tensor, if all processes of a group make the same call.

    Raises:
        ValueError: the processes have different rows, dtypes or arguments.
    """
    sizes, here = numbers_of_all(call, x.shape[dim], (group,), x.device), group.rank()
    return Shards(sum(sizes[:here]), sizes[here], sum(sizes))
