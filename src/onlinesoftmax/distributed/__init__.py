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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any

from ..core.annotations import Backend, Reduction, Strategy
from ..core.call import Call, Settings
from ..core.options import PLAIN, ScoreOptions, checked_options
from ..core.processes import group_or_default
from ..core.task import Choice
from ..core.wrong_calls import hinting
from ..kernels.registry import needing
from ..ops import OPERATIONS

with needing("torch", "onlinesoftmax.distributed"):
    import torch

    from ..torch.arguments import check_dtype, check_options, checked_numbers
    from ..torch.formulas import accumulator_of
    from ..torch.loss_arguments import Loss
    from ..torch.loss_run import without_ignored
    from . import losses
    from . import softmax as _softmax
    from .fast_path import look_up
    from .linear import linear_cross_entropy, linear_token_logprobs, linear_token_loss
    from .mailboxes import checked_exchange
    from .sampling import sample, topk_logprobs
    from .shards import Operands, ShardedInput, Shards

if TYPE_CHECKING:
    from ..core.annotations import TokenLogprobs

__all__ = [
    "Shards", "cross_entropy", "linear_cross_entropy", "linear_token_logprobs", "linear_token_loss", "log_softmax",
    "logsumexp", "one_process", "sample", "softmax", "token_logprobs", "topk_logprobs",
]  # fmt: skip

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
    (y,) = _run(
        "softmax", Operands(local, mask), (dim,), (scale, softcap), (exchange, backend, strategy, shards, group),
        lambda call: (_softmax.softmax("softmax", local, dim, call),),
    )  # fmt: skip
    return y


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
    (y,) = _run(
        "log_softmax", Operands(local, mask), (dim,), (scale, softcap), (exchange, backend, strategy, shards, group),
        lambda call: (_softmax.softmax("log_softmax", local, dim, call),),
    )  # fmt: skip
    return y


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
    (y,) = _run(
        "logsumexp", Operands(local, mask), (dim,), (scale, softcap), (exchange, backend, strategy, shards, group),
        lambda call: (losses.logsumexp(local, dim, call),),
    )  # fmt: skip
    return y.unsqueeze(dim) if keepdim else y


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

    def checked() -> tuple[Loss, bool]:
        check_dtype("cross_entropy()", dtype)
        if dtype is not None and accumulator_of(local.dtype, dtype) != accumulator_of(local.dtype, local.dtype):
            raise NotImplementedError(
                f"cross_entropy(): dtype={dtype} is not available if the softmax dimension is sharded"
            )
        loss = Loss(Settings(1, dtype), ignore_index, reduction, label_smoothing, z_loss)
        numbers = checked_numbers(loss)
        return numbers, numbers is loss

    def run(call: ShardedInput) -> tuple[Tensor, ...]:
        loss, has_numbers = checked()
        # A tensor among the numbers may change its value, so it is no part of a key.
        return (losses.cross_entropy(local, target, weight, loss, call if has_numbers else call.without_key),)

    (y,) = _run(
        "cross_entropy", Operands(local, None, target, weight),
        (ignore_index, reduction, label_smoothing, z_loss, dtype), (scale, softcap),
        (exchange, backend, strategy, shards, group), run, checked,
    )  # fmt: skip
    return y


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
    found = losses.named(
        _run(
            "token_logprobs", Operands(local, mask, index), (dim, entropy), (scale, softcap),
            (exchange, backend, strategy, shards, group),
            lambda call: losses.log_probabilities(local, index, dim, entropy, call),
        )
    )  # fmt: skip
    result: Any = found if ignore_index is None else without_ignored(found, index, ignore_index)
    return result


def _run(
    name: str, operands: Operands, special: tuple[Any, ...], scores: tuple[Any, Any], how: tuple[Any, ...],
    run: Callable[[ShardedInput], tuple[Tensor, ...]], check: Callable[[], Any] | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The results of a call: of a prepared one, or of the function `run`, once the arguments are checked.

    Args:
        name: Name of the public function.
        operands: Its tensors.
        special: The arguments that only this function has.
        scores: scale and softcap.
        how: exchange, backend, strategy, shards and group.
        run: The function.
        check: Checks the special arguments; None if `run` does.
    """
    exchange, backend, strategy, shards, group = how
    known = look_up(name, operands, (*special, *scores, exchange, backend, strategy), shards, group)
    if known.results is not None:
        return known.results
    options = _checked(name, operands.x, *scores, operands.mask)
    if check is not None:
        check()
    exchange, groups, choice = checked_exchange(name, exchange), (group_or_default(group),), Choice(backend, strategy)
    return run(ShardedInput(groups, options, choice, known.shards, exchange, known.key, known.announced))


def _checked(name: str, local: Any, scale: Any, softcap: Any, mask: Any) -> ScoreOptions:
    """The score options, after the checks of the input."""
    if not isinstance(local, Tensor):
        raise TypeError(f"{name}(): argument 'local' must be Tensor, not {type(local).__name__}")
    if not local.is_floating_point():
        raise RuntimeError(f"{name}(): local must be floating point, got {local.dtype}")
    if not local.dim():
        raise ValueError(f"{name}(): local needs a softmax dimension, got shape ()")
    if type(local).__name__ == "DTensor":
        raise TypeError(f"{name}(): local is a DTensor: call onlinesoftmax.{name}, or pass local.to_local()")
    if not isinstance(scale, (int, float)):
        raise TypeError(f"{name}(): scale must be a number, not {type(scale).__name__}")
    options = checked_options(name, scale, softcap, None, mask, False, "nan")
    check_options(Call(OPERATIONS[name], local, Settings(-1), options))
    return options or PLAIN


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


for _name in __all__:
    if isinstance(_function := globals()[_name], FunctionType):
        globals()[_name] = hinting(_function, __name__)
