"""Statistics of sharded rows by kernels that exchange states through peer memory.

    a mean or a sum     a small kernel counts the targets (for a mean); one kernel reads the shard, exchanges states,
    with its gradient   and writes the losses and the gradient of the shard; a small kernel adds the losses
    other results       one kernel reads the shard, exchanges states, and writes the results of the rows; a small
                        kernel adds the losses (for a mean or a sum); backward is one kernel, which exchanges nothing
    a chunk of a head   one kernel reads the logits, exchanges states, and writes the losses of the rows, and the
                        gradient over the logits

The gradient of float16 logits is computed in backward, where a gradient scaler has multiplied the incoming gradient.
A loss with label smoothing and class weights adds the weights in one more launch.  As with a collective, a result per
row has the same bits on every process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from ..core.call import Call, Settings
from ..core.task import ColumnRange
from ..ops import CROSS_ENTROPY, TOKEN_LOGPROBS
from ..torch import loss_eager
from ..torch.arguments import check_first_derivative
from ..torch.autograd import prepared_launch, prepared_recording
from ..torch.formulas import accumulator_of
from ..torch.gradients import outputs_of
from ..torch.loss_arguments import Loss
from ..torch.loss_kernels import loss_numbers, reduced_with_gradient
from ..torch.small_kernels import reducer
from .local import Shard, call_of
from .mailboxes import with_a_column
from .shards import Operands, ShardSignature

Tensor = torch.Tensor


class PeerLaunches:
    """The prepared launches of one kind of call; no tensor is kept.

    Args:
        signature: The properties of the call.
        operands: The tensors of the first call.
        columns: The position of the shard.
        with_gradient: True where backward may follow.
    """

    def __init__(
        self, signature: ShardSignature, operands: Operands, columns: ColumnRange, with_gradient: bool
    ) -> None:
        operands = _with_a_column(operands, signature.dim)
        x, target, weight = operands.x, operands.target, operands.weight
        loss, wide = signature.loss, accumulator_of(x.dtype, x.dtype)
        self.signature, self.columns, self._wide = signature, columns, wide
        operation = TOKEN_LOGPROBS if loss is None else CROSS_ENTROPY
        self.results = tuple("loss" if name == "y" and loss is not None else name for name in signature.outputs)
        waits = with_gradient and signature.reduces and x.dtype is torch.float16
        self._in_forward = with_gradient and signature.reduces and not waits
        saved = () if not with_gradient else ("y",) if self._in_forward else ("m", "l")
        outputs = tuple(output.name for output in operation.outputs if output.name in {*self.results, *saved})
        named = {"target": target, **({} if loss is None else loss_numbers(loss)), **self._weights(weight)}
        if self._in_forward:
            # For planning; each call passes its own dy.
            named["dy"] = torch.empty((), dtype=wide, device=x.device)
        call = call_of(operation, Shard.of(signature, operands, None), named, columns)
        self._total: Callable[..., Tensor] | None = None
        if loss is None or not signature.reduces or waits:
            if with_gradient:
                self._run = prepared_recording(call, outputs, self.results, by_pytorch=_no_second_derivative)
            else:
                self._run = prepared_launch(call, outputs)
            if waits:
                assert loss is not None
                self._total = partial(_reduced, loss)
            return
        small = reducer(x, target, weight, loss, with_gradient, columns.total)
        assert small is not None
        # With `weight_sum`, the kernel that adds the weights runs between the one that counts and the loss kernel.
        # Then the loss kernel does not follow the kernel that computes dy.
        follows_divisor = self._in_forward and loss.reduction == "mean" and "weight_sum" not in named
        self._run = launch = prepared_launch(call, outputs, follows_divisor)
        self._total = small.total
        if self._in_forward:

            def rows(x: Tensor, target: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
                # `more` is the factor, after the weights if there are any.
                found: tuple[Tensor, Tensor] = launch(x, target, *self._weights(*more[:-1]).values(), more[-1])
                return found

            tensors = {"target": target} if weight is None else {"target": target, "weight": weight}
            whole = Call(CROSS_ENTROPY, x, Settings(signature.dim), beside=tensors)
            self._run = prepared_recording(whole, ("loss", "y"), ("loss",), run=reduced_with_gradient(rows, small))

    def __call__(self, operands: Operands, groups: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """The results of a call; the kernel makes the exchange."""
        x, mask, target, weight = _with_a_column(operands.with_target(self.signature.dim), self.signature.dim)
        if self._in_forward:
            return (self._run(x, *_given(target, weight)),)
        found = self._run(x, *_given(mask, target), *self._weights(weight).values())
        found = found if isinstance(found, tuple) else (found,)
        if self._total is not None:
            return (self._total(found[0], target, weight, None),)
        # Statistics other than the entropy have the dtype of the result.
        return tuple(
            t if name == "entropy" else t.to(self.signature.result) for name, t in zip(self.results, found, strict=True)
        )

    def _weights(self, weight: Tensor | None = None) -> dict[str, Tensor]:
        return _weights_of(weight, self.signature, self.columns, self._wide)


def losses_of_chunk(
    signature: ShardSignature, operands: Operands, columns: ColumnRange, factor: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(losses, gradient of the sum of factor · loss) of a chunk of the logits of a head, the gradient in their place.

    Args:
        signature: The properties of the chunk.
        operands: Its tensors.
        columns: The position of the shard.
        factor: Factor of the loss of each row; None for no gradient.
    """
    loss, logits, operands = signature.loss, operands.x, _with_a_column(operands, signature.dim)
    assert loss is not None
    wide = accumulator_of(logits.dtype, logits.dtype)
    named = {"target": operands.target, **loss_numbers(loss), **_weights_of(operands.weight, signature, columns, wide)}
    named |= {} if factor is None else {"dy": factor}
    call = call_of(CROSS_ENTROPY, Shard.of(signature, operands, None), named, columns)
    # The losses are added up in float32, so they need its accuracy.
    call = call.with_settings(dtype=signature.result)
    if factor is None:
        return outputs_of(call, ("loss",))[0], None
    rows, dz = outputs_of(call.with_operands(y=operands.x), ("loss", "y"))
    # A shard without columns had one, which the kernel does not write.
    return rows, dz if logits.numel() else logits


def _weights_of(
    weight: Tensor | None, signature: ShardSignature, columns: ColumnRange, wide: torch.dtype
) -> dict[str, Tensor]:
    """The weights of a shard, a view of all weights, and the sum of all weights if smoothing needs it.

    A kernel may need the weight of a target on another GPU, and reads it before or behind the view.
    """
    if weight is None:
        return {}
    first, cols, whole = columns.first, signature.shards.cols, weight
    if not cols:
        # The one column of an empty shard has a weight, which is not read.
        whole, cols = torch.cat([weight, weight.new_zeros(1)]), 1
    local = {"weight": whole[first : first + cols]}
    if signature.smoothed:
        local["weight_sum"] = weight.sum(dtype=accumulator_of(wide, weight.dtype))
    return local


def _reduced(loss: Loss, rows: Tensor, target: Tensor, weight: Tensor | None, _factor: Any) -> Tensor:
    """The losses of rows, reduced by PyTorch's operations, which autograd records."""
    return loss_eager.reduced(rows, target, weight, loss).to(loss.settings.dtype)


def _given(*tensors: Tensor | None) -> Iterable[Tensor]:
    return (t for t in tensors if t is not None)


def _no_second_derivative(*_: Any) -> Any:
    check_first_derivative("the gradient of numbers of sharded rows")
    raise RuntimeError("the gradient of numbers of sharded rows takes no batch of gradients")


def _with_a_column(operands: Operands, dim: int) -> Operands:
    """The tensors of a call; a shard without columns gets one (mailboxes.py)."""
    if operands.x.shape[dim]:
        return operands
    return operands._replace(x=with_a_column(operands.x, dim), mask=None)
