"""Softmax and its family if the softmax dimension is sharded over the processes of a group, as a vocabulary is.

Each process passes its columns of every row.  Shards may be uneven, and empty on some processes.  Forward exchanges one
state per row: on 2 to 8 GPUs of one host from kernel to kernel, through peer memory, and otherwise in one collective.
The backward pass of a loss exchanges nothing, that of softmax one state or number per row.  Results per row are the
same on every process, and all results are the same on every run.

Every process of the group must make the same calls in the same order.  A call first compares the calls of all processes
and exchanges their numbers of columns; it does not with `shards=`, which says where the local columns are::

    # torchrun --nproc-per-node 2 train.py
    loss = onlinesoftmax.distributed.cross_entropy(local_logits, target, group=group)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "onlinesoftmax.distributed needs torch, which is not installed: pip install 'onlinesoftmax[torch]'",
        name="torch",
    ) from None

from ..core.annotations import Backend, Reduction, Strategy
from ..core.call import Call, Settings
from ..core.options import PLAIN, ScoreOptions, checked_options
from ..core.processes import group_or_default
from ..core.task import Choice
from ..ops import OPERATIONS
from ..torch.check import check_options
from ..torch.gradients import accumulator_of
from ..torch.loss import Loss
from ..torch.loss_arguments import check_dtype, checked_numbers
from ..torch.losses import without_ignored
from . import losses, usual
from . import softmax as _softmax
from .launches import Given
from .local import Sharded
from .peers import checked_exchange
from .shards import Shards

if TYPE_CHECKING:
    from ..core.annotations import TokenLogprobs

__all__ = ["Shards", "cross_entropy", "log_softmax", "logsumexp", "one_process", "softmax", "token_logprobs"]

Tensor = torch.Tensor


def softmax(
    local: Tensor, dim: int = -1, group: Any = None, *, scale: float = 1.0, softcap: float | None = None,
    mask: Tensor | None = None, shards: Shards | None = None, exchange: str | None = None,
    backend: Backend | None = None, strategy: Strategy | None = None,
) -> Tensor:  # fmt: skip
    """Softmax if the softmax dimension is sharded.

    Args:
        local: The columns of this process: floating-point, of any shape; other processes have the same dtype, and may
            differ in `dim` alone.
        dim: The softmax dimension.
        group: Process group; the default group if None.
        scale: Factor of the logits.
        softcap: Soft bound on the magnitude of scale * local: a positive number.
        mask: Boolean, broadcasts to the shape of `local`: False excludes an element.
        shards: Position of the local columns in the whole row, if the caller knows it: the calls of the
            processes are then not compared.
        exchange: How the states of rows travel.  "peer_memory": from kernel to kernel, which needs 2 to 8 GPUs of one
            host and the CUDA kernels.  "collective": by a collective of the process group.  None: through peer memory
            where that can be used.
        backend, strategy: Who computes the states and the gradients of the shard, as for `onlinesoftmax.softmax`.

    Returns:
        The local part of the softmax, in the shape of `local`.  Its dtype is that of `local`, or under autocast the
        dtype of `torch.softmax`.

    Raises:
        TypeError: an argument is of the wrong type.
        IndexError: dim is out of range.
        ValueError: the processes have different rows or dtypes, `shards` does not fit `local`, softcap is not
            positive, or `exchange` is unknown or cannot be used.
        RuntimeError: no process group is initialised, this process is not part of the group, another process has
            ended, or the mask does not broadcast to `local`.

    Example:
        >>> with one_process() as group:  # it holds the whole rows; torchrun starts more processes
        ...     softmax(torch.zeros(1, 4), group=group)
        tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    compared = dim, scale, softcap, exchange, backend, strategy
    shards, announced = usual.agree("softmax", (local,), compared, shards, group)
    arguments = dim, scale, softcap, mask, shards, exchange, backend, strategy
    key, found = usual.look_up_softmax(OPERATIONS["softmax"], local, arguments, group)
    if found is not None:
        return found
    options = _checked("softmax", local, scale, softcap, mask)
    call = _call("softmax", options, group, backend, strategy, shards, exchange)
    return _softmax.softmax("softmax", local, dim, call._replace(key=key, announced=announced))


def log_softmax(
    local: Tensor, dim: int = -1, group: Any = None, *, scale: float = 1.0, softcap: float | None = None,
    mask: Tensor | None = None, shards: Shards | None = None, exchange: str | None = None,
    backend: Backend | None = None, strategy: Strategy | None = None,
) -> Tensor:  # fmt: skip
    """Log-softmax if the softmax dimension is sharded.  The arguments are those of `softmax`.

    Example:
        >>> with one_process() as group:
        ...     log_softmax(torch.zeros(1, 2), group=group)
        tensor([[-0.6931, -0.6931]])
    """
    compared = dim, scale, softcap, exchange, backend, strategy
    shards, announced = usual.agree("log_softmax", (local,), compared, shards, group)
    arguments = dim, scale, softcap, mask, shards, exchange, backend, strategy
    key, found = usual.look_up_softmax(OPERATIONS["log_softmax"], local, arguments, group)
    if found is not None:
        return found
    options = _checked("log_softmax", local, scale, softcap, mask)
    call = _call("log_softmax", options, group, backend, strategy, shards, exchange)
    return _softmax.softmax("log_softmax", local, dim, call._replace(key=key, announced=announced))


def logsumexp(
    local: Tensor, dim: int = -1, keepdim: bool = False, group: Any = None, *, scale: float = 1.0,
    softcap: float | None = None, mask: Tensor | None = None, shards: Shards | None = None, exchange: str | None = None,
    backend: Backend | None = None, strategy: Strategy | None = None,
) -> Tensor:  # fmt: skip
    """Logsumexp if the softmax dimension is sharded: the same on every process.

    The dtype is that of `local`, or under autocast the dtype of `torch.logsumexp`.  The arguments are those of
    `softmax`; with `keepdim` the result keeps `dim` with size 1.

    Example:
        >>> with one_process() as group:
        ...     logsumexp(torch.zeros(2, 4), group=group)
        tensor([1.3863, 1.3863])
    """
    compared = dim, scale, softcap, exchange, backend, strategy
    shards, announced = usual.agree("logsumexp", (local,), compared, shards, group)
    options = _checked("logsumexp", local, scale, softcap, mask)
    call = _call("logsumexp", options, group, backend, strategy, shards, exchange)
    return losses.logsumexp(local, dim, keepdim, call._replace(announced=announced))


def cross_entropy(
    local: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100,
    reduction: Reduction = "mean", label_smoothing: float = 0.0, group: Any = None, *, z_loss: float = 0.0,
    scale: float = 1.0, softcap: float | None = None, dtype: torch.dtype | None = None, shards: Shards | None = None,
    exchange: str | None = None, backend: Backend | None = None, strategy: Strategy | None = None,
) -> Tensor:  # fmt: skip
    """Cross-entropy if the softmax dimension, that of the classes, is sharded: the same loss on every process.

    Args:
        local: Logits of the classes of this process, of shape (C_local), (N, C_local) or (N, C_local, d1, ...).
        target: Class of each row, counted over all processes; integers, the same on every process.
        weight: A factor for each class of all processes, of shape (C), the same on every process.
        ignore_index, reduction, label_smoothing, z_loss, scale, softcap: As for `onlinesoftmax.cross_entropy`.
        group: Process group; the default group if None.
        dtype: Dtype of the loss: float32 for that of 16-bit logits; float64 needs float64 logits.
        shards, exchange, backend, strategy: As for `softmax`.

    Returns:
        The loss in `dtype`, in the dtype of `local`, or in float32 under autocast: a scalar, or with "none" in the
        shape of the rows.  A row whose target is no class has the loss NaN and no gradient.

    Raises:
        TypeError: an argument is of the wrong type.
        RuntimeError: the dtype of `target`, the shape of `weight` or `label_smoothing` is wrong.
        ValueError: the processes have different rows or dtypes, the shape of `target` is wrong, or reduction is
            unknown.

    Example:
        >>> with one_process() as group:
        ...     cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3]), group=group)
        tensor(1.3863)
    """
    given = Given(local, None, target, weight)
    arguments = ignore_index, reduction, label_smoothing, z_loss, scale, softcap, dtype, exchange, backend, strategy
    shards, announced = usual.agree("cross_entropy", (local, target, weight), arguments, shards, group)
    key, found = usual.look_up("cross_entropy", given, arguments, shards, group)
    if found is not None:
        return found[0]
    options = _checked("cross_entropy", local, scale, softcap, None)
    check_dtype("cross_entropy()", dtype)
    if dtype is not None and accumulator_of(local.dtype, dtype) != accumulator_of(local.dtype, local.dtype):
        raise NotImplementedError(
            f"cross_entropy(): dtype={dtype} is not available if the softmax dimension is sharded"
        )
    loss = Loss(Settings(1, dtype), ignore_index, reduction, label_smoothing, z_loss, options)
    numbers = checked_numbers(loss)
    # A tensor among the numbers may change its value, so it is no part of a key.
    key = key if numbers is loss else ()
    call = _call("cross_entropy", options, group, backend, strategy, shards, exchange)
    return losses.cross_entropy(local, target, weight, numbers, call._replace(key=key, announced=announced))


def token_logprobs(
    local: Tensor, index: Tensor, dim: int = -1, group: Any = None, *, ignore_index: int | None = None,
    scale: float = 1.0, softcap: float | None = None, mask: Tensor | None = None, entropy: bool = True,
    shards: Shards | None = None, exchange: str | None = None, backend: Backend | None = None,
    strategy: Strategy | None = None,
) -> TokenLogprobs[Tensor]:  # fmt: skip
    """Log-probability of the chosen token, entropy and logsumexp if the softmax dimension is sharded.

    Args:
        local: Logits of the tokens of this process; `dim` is the dimension of the tokens.
        index: The chosen token of each row, counted over all processes; the same on every process.
        dim, group, scale, softcap, mask: As for `softmax`; the mask is that of the local tokens.
        ignore_index, entropy: As for `onlinesoftmax.token_logprobs`.
        shards, exchange, backend, strategy: As for `softmax`.

    Returns:
        The named tuple (logprob, entropy, lse) of `onlinesoftmax.token_logprobs`, the same on every process.

    Example:
        >>> with one_process() as group:
        ...     token_logprobs(torch.zeros(1, 4), torch.tensor([3]), group=group).logprob
        tensor([-1.3863])
    """
    given = Given(local, mask, index, None)
    arguments = dim, scale, softcap, entropy, exchange, backend, strategy
    shards, announced = usual.agree("token_logprobs", (local, index), arguments, shards, group)
    key, found = usual.look_up("token_logprobs", given, arguments, shards, group)
    if found is None:
        options = _checked("token_logprobs", local, scale, softcap, mask)
        call = _call("token_logprobs", options, group, backend, strategy, shards, exchange)
        named = losses.token_logprobs(local, index, dim, entropy, call._replace(key=key, announced=announced))
    else:
        named = losses.named(found)
    result: Any = named if ignore_index is None else without_ignored(named, index, ignore_index)
    return result


def _checked(name: str, local: Any, scale: Any, softcap: Any, mask: Any) -> ScoreOptions | None:
    if not isinstance(local, Tensor):
        raise TypeError(f"{name}(): argument 'local' must be Tensor, not {type(local).__name__}")
    if not local.is_floating_point():
        raise RuntimeError(f"{name}(): local must be floating point, got {local.dtype}")
    if not local.dim():
        raise ValueError(f"{name}(): local needs a softmax dimension, got shape ()")
    if type(local).__name__ == "DTensor":
        raise TypeError(f"{name}(): local is a DTensor: call onlinesoftmax.{name}, or pass local.to_local()")
    if not isinstance(scale, int | float):
        raise TypeError(f"{name}(): scale must be a number, not {type(scale).__name__}")
    options = checked_options(name, scale, softcap, None, mask, False, "nan")
    check_options(Call(OPERATIONS[name], local, Settings(-1), options))
    return options


def _call(
    name: str, options: ScoreOptions | None, group: Any, backend: Backend | None, strategy: Strategy | None,
    shards: Shards | None, exchange: str | None,
) -> Sharded:  # fmt: skip
    exchange = checked_exchange(name, exchange)
    return Sharded((group_or_default(group),), options or PLAIN, Choice(backend, strategy), shards, exchange=exchange)


@contextmanager
def one_process() -> Iterator[Any]:
    """A group of this process alone, for trials and examples; it ends with the block.

    >>> with one_process() as group:
    ...     torch.distributed.get_world_size(group)
    1
    """
    distributed: Any = torch.distributed
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield distributed.group.WORLD
    finally:
        distributed.destroy_process_group()
