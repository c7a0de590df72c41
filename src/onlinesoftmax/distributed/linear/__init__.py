"""The head of a language model and its loss, without all logits, if the classes are sharded over processes.

Each process has the weight of its classes, and the whole input.  Per chunk of logits, the states of the tokens are
exchanged, as for losses of sharded logits.  The gradient of the input is added up over the processes in float32, while
the next products run; that of the weight needs no exchange.

    team.py      the processes, and what they exchange
    run.py       cross-entropy; the other functions are those of onlinesoftmax/linear with these exchanges
    dtensor.py   DTensors: sharded classes, sharded tokens, or both
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...core.agreement import kind_of
from ...core.annotations import Reduction
from ...core.call import TokenLogprobs
from ..shards import Shards
from .run import cross_entropy, token_logprobs, token_loss
from .team import agreed

__all__ = ["linear_cross_entropy", "linear_token_logprobs", "linear_token_loss"]

Tensor = torch.Tensor


def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
    weight: Tensor | None = None, reduction: Reduction = "mean", ignore_index: int | None = -100,
    label_smoothing: float = 0.0, group: Any = None, z_loss: float = 0.0, scale: float = 1.0,
    softcap: float | None = None, token_weight: Tensor | None = None, dtype: torch.dtype | None = None,
    memory: int | None = None, acc_dtype: torch.dtype | None = None, shards: Shards | None = None,
) -> Tensor:  # fmt: skip
    """Cross-entropy of the logits input · linear_weightᵀ + linear_bias, whose classes are sharded over processes.

    The loss is the same on every process.  So is the gradient of the input: it is already added up over the processes.
    Each process gets the gradients of its own weight and bias.

    Args:
        input: Hidden states (..., hidden), the same on every process.
        linear_weight: Weight of the classes of this process, (local classes, hidden); there may be no class.
        target: Class of each token, counted over all processes; integers, the same on every process.
        linear_bias: Bias (local classes,).
        weight: Factor of each class of all processes, the same on every process.
        scale: Factor of the logits, a number.
        group: Process group; the default group if None.
        reduction, ignore_index, label_smoothing, z_loss, softcap, token_weight, dtype, acc_dtype: As for
            `onlinesoftmax.linear_cross_entropy`.
        memory: Most bytes of the logits and sums that exist at a time on the process with most classes.
        shards: Position of the local classes, if the caller knows it: the calls of the processes are then not compared.
            The plan is made for as many classes as a process has on average.

    Returns:
        The loss: a scalar, or with "none" of the shape (...).

    Raises:
        TypeError, RuntimeError, ValueError: as for `onlinesoftmax.linear_cross_entropy`; or the processes make
            different calls, or `shards` does not fit `linear_weight`.

    Example:
        >>> from onlinesoftmax.distributed import one_process
        >>> with one_process() as group:  # it has all classes; torchrun starts more processes
        ...     linear_cross_entropy(torch.ones(2, 3), torch.zeros(4, 3), torch.tensor([0, 3]), group=group)
        tensor(1.3863)
    """
    tensors, name = (input, linear_weight, target, linear_bias), "linear_cross_entropy"
    numbers = {
        "reduction": reduction, "ignore_index": -100 if ignore_index is None else ignore_index,
        "label_smoothing": label_smoothing, "z_loss": z_loss, "scale": scale, "softcap": softcap,
    }  # fmt: skip
    bounds = {"memory": memory, "acc_dtype": acc_dtype}
    more = {"weight": weight, "token_weight": token_weight, "dtype": dtype, **bounds}
    team = agreed(name, tensors, shards, group, numbers | more)
    found: Tensor = cross_entropy(tensors, tuple(numbers.values()), weight, token_weight, dtype, team, **bounds)
    return found


def linear_token_logprobs(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
    ignore_index: int | None = None, group: Any = None, scale: float = 1.0, softcap: float | None = None,
    memory: int | None = None, shards: Shards | None = None,
) -> TokenLogprobs:  # fmt: skip
    """Log-probability of each target, entropy and logsumexp of each token, if the classes are sharded over processes.

    Args:
        input, linear_weight, target, linear_bias, group, memory, shards: As for `linear_cross_entropy`.
        ignore_index, scale, softcap: As for `onlinesoftmax.linear_token_logprobs`.

    Returns:
        (logprob, entropy, lse), each of the shape (...), the same on every process.

    Raises:
        TypeError, RuntimeError, ValueError: as for `linear_cross_entropy`.

    Example:
        >>> from onlinesoftmax.distributed import one_process
        >>> with one_process() as group:
        ...     linear_token_logprobs(torch.ones(1, 3), torch.zeros(4, 3), torch.tensor([3]), group=group).logprob
        tensor([-1.3863])
    """
    tensors, name = (input, linear_weight, target, linear_bias), "linear_token_logprobs"
    numbers = {"ignore_index": ignore_index, "scale": scale, "softcap": softcap, "memory": memory}
    team = agreed(name, tensors, shards, group, numbers)
    found: TokenLogprobs = token_logprobs(tensors, *numbers.values(), team.sharing)
    return found


def linear_token_loss(
    input: Tensor, linear_weight: Tensor, target: Tensor, loss: Callable[..., Tensor], *per_token: Tensor,
    linear_bias: Tensor | None = None, reduction: str = "mean", ignore_index: int = -100, group: Any = None,
    scale: float = 1.0, softcap: float | None = None, memory: int | None = None, acc_dtype: torch.dtype | None = None,
    shards: Shards | None = None,
) -> Tensor:  # fmt: skip
    """A loss of the log-probability, entropy and logsumexp of each token, if the classes are sharded over processes.

    Args:
        input, linear_weight, target, linear_bias, group, memory, shards: As for `linear_cross_entropy`.
        loss: As for `onlinesoftmax.linear_token_loss`.  Every process calls it, and must get the same numbers.
        per_token: Tensors with a number for each token, the same on every process.
        reduction, ignore_index, scale, softcap, acc_dtype: As for `onlinesoftmax.linear_token_loss`.

    Returns:
        The loss, a float32 scalar (float64 in float64), the same on every process.

    Raises:
        TypeError, RuntimeError, ValueError: as for `linear_cross_entropy`; or the loss returns no number for each
            token.

    Example:
        >>> from onlinesoftmax.distributed import one_process
        >>> with one_process() as group:
        ...     x, weight, target = torch.ones(1, 3), torch.zeros(4, 3), torch.tensor([3])
        ...     linear_token_loss(x, weight, target, lambda logprob, entropy, lse: -logprob, group=group)
        tensor(1.3863)
    """
    tensors, name = (input, linear_weight, target, linear_bias), "linear_token_loss"
    numbers = {"reduction": reduction, "ignore_index": ignore_index, "scale": scale, "softcap": softcap}
    more = {"per_token": [kind_of(t) for t in per_token], "memory": memory, "acc_dtype": acc_dtype}
    team = agreed(name, tensors, shards, group, numbers | more)
    given = tensors, loss, per_token, tuple(numbers.values()), memory
    found: Tensor = token_loss(*given, team.sharing, acc_dtype)
    return found
