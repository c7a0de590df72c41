"""Statistics of sharded rows by kernels that exchange states through peer memory.

    a mean or a sum     a small kernel counts the targets (for a mean); one kernel reads the shard, exchanges states,
    with its gradient   and writes the losses and the gradient of the shard; a small kernel adds the losses
    other results       one kernel reads the shard, exchanges states, and writes the results of the rows; a small
                        kernel adds the losses (for a mean or a sum); backward is one kernel, which exchanges nothing

A loss with label smoothing and class weights adds the weights in one more launch.  As with a collective, a result per
row has the same bits on every process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..core.call import Call, Settings
from ..core.task import ColumnRange
from ..ops import OPERATIONS
from ..torch.autograd import prepared_recording
from ..torch.gradients import accumulator_of
from ..torch.prepare import kind_of, operands_of, prepare, prepared
from ..torch.reductions import reducer
from ..torch.targets import loss_numbers, reduced_with_gradient
from .exchange import Saved, apply_in_eager_mode
from .local import Shard, call_of
from .peers import with_a_column
from .shards import Operands, ShardSignature

Tensor = torch.Tensor

_LOSS, _LOGPROBS = OPERATIONS["cross_entropy"], OPERATIONS["token_logprobs"]


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
        loss, self._wide = signature.loss, accumulator_of(x.dtype, x.dtype)
        self.signature, self.columns = signature, columns
        self.operation = _LOGPROBS if loss is None else _LOSS
        self.numbers = {} if loss is None else loss_numbers(loss)
        self.results = tuple("loss" if name == "y" and loss is not None else name for name in signature.outputs)
        self.with_gradient, in_forward = with_gradient, with_gradient and signature.reduces
        saved = ("m", "l") if with_gradient and not in_forward else ()
        asked = {*self.results, *saved, *(("y",) if in_forward else ())}
        self.outputs = tuple(output.name for output in self.operation.outputs if output.name in asked)
        named = self._shared(target, weight)
        if in_forward:
            # For planning; each call passes its own dy.
            named["dy"] = torch.empty((), dtype=self._wide, device=x.device)
        # With `weight_sum`, the kernel that adds the weights runs between the one that counts and the loss kernel.
        # Then the loss kernel does not follow the kernel that computes dy.
        counts = loss is not None and loss.reduction == "mean"
        follows_divisor = in_forward and counts and "weight_sum" not in named
        call = call_of(self.operation, Shard.of(signature, operands, None), named, columns)
        inputs = operands_of(call)
        self._launch = prepare(kind_of(call, inputs, self.outputs), follows_divisor)
        self._constants = {name: value for name, value in inputs.items() if isinstance(value, int)}
        self._reduced: Callable[..., Tensor] | None = None
        self._total: Callable[..., Tensor] | None = None
        if loss is not None and signature.reduces:
            small = reducer(x, target, weight, loss, with_gradient, columns.total)
            assert small is not None
            self._total = small.total
            if in_forward:
                run = reduced_with_gradient(self._losses_and_gradient, small)
                tensors = {"target": target} if weight is None else {"target": target, "weight": weight}
                whole = Call(_LOSS, x, Settings(signature.dim), beside=tensors)
                self._reduced = prepared_recording(whole, ("loss", "y"), ("loss",), run=run)

    def __call__(self, operands: Operands, groups: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """The results of a call."""
        operands = _with_a_column(operands.with_target(self.signature.dim), self.signature.dim)
        x, target, weight = operands.x, operands.target, operands.weight
        if self._reduced is not None:
            return (self._reduced(x, target) if weight is None else self._reduced(x, target, weight),)
        if self.with_gradient and self._total is None:
            found: tuple[Tensor, ...] = apply_in_eager_mode(x, self, operands, groups)
        else:
            found = self.forward(operands, groups)[0]
        if self._total is not None:
            return (self._total(found[0], target, weight, None),)
        # Statistics other than the entropy have the dtype of the result.
        return tuple(
            t if name == "entropy" else t.to(self.signature.result) for name, t in zip(self.results, found, strict=True)
        )

    def _shared(self, target: Tensor, weight: Tensor | None) -> dict[str, Any]:
        """The operands that forward and backward share, without the numbers of the score options."""
        named: dict[str, Any] = {"target": target, **self.numbers}
        if weight is not None:
            named["weight"] = self._local(weight)
            if "smoothing" in self.numbers:
                named["weight_sum"] = weight.sum(dtype=accumulator_of(self._wide, weight.dtype))
        return named

    def _local(self, weight: Tensor) -> Tensor:
        """The weights of this shard, a view of all weights.

        A kernel may need the weight of a target on another GPU, and reads it before or behind the view.
        """
        first, cols = self.columns.first, self.signature.shards.cols
        if not cols:
            # The one column of an empty shard has a weight, which is not read.
            weight, cols = torch.cat([weight, weight.new_zeros(1)]), 1
        return weight[first : first + cols]

    def forward(self, operands: Operands, groups: tuple[Any, ...]) -> tuple[tuple[Tensor, ...], Saved]:
        """(the results in the accumulator's dtype, what backward reads); the kernel makes the exchange."""
        x, mask, target, weight = operands.x, operands.mask, operands.target, operands.weight
        inputs = {**self._constants, **self._shared(target, weight)}
        if mask is not None:
            inputs["mask"] = mask
        found = self._launch(x, None, inputs)
        named = dict(zip(self.outputs, found if len(self.outputs) > 1 else (found,), strict=True))
        m, l, entropy = (named.get(name) for name in ("m", "l", "entropy"))
        return tuple(named[name] for name in self.results), Saved(mask, target, weight, m, l, entropy)

    def _losses_and_gradient(self, x: Tensor, target: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
        """The losses of the rows, and the factor times their gradients, from (x, target, weight if given, factor)."""
        weight, factor = more if len(more) > 1 else (None, *more)
        losses, gradient = self._launch(x, None, {**self._constants, **self._shared(target, weight), "dy": factor})
        return losses, gradient

    def backward(self, x: Tensor, saved: Saved, dys: tuple[Tensor | None, ...]) -> Tensor:
        """The gradient with respect to the shard, from the gradients of the results."""
        given = {name: dy for name, dy in zip(self.results, dys, strict=True) if dy is not None}
        named = {**self._shared(saved.target, saved.weight), "m": saved.m, "l": saved.l}
        dy = given.get("loss" if self.signature.loss is not None else "y")
        named["dy"] = torch.zeros_like(saved.m) if dy is None else dy
        if "lse" in given:
            named["dlse"] = given["lse"]
        if "entropy" in given:
            named |= {"entropy": saved.entropy, "dentropy": given["entropy"]}
        shard = Shard.of(self.signature, Operands(x, saved.mask), None)
        call = call_of(OPERATIONS[self.operation.gradient_name], shard, named, self.columns)
        run, operands = prepared(call, ("y",))
        dx: Tensor = run(x, None, operands)
        return dx


def _with_a_column(operands: Operands, dim: int) -> Operands:
    """The tensors of a call; a shard without columns gets one (peers.py)."""
    if operands.x.shape[dim]:
        return operands
    return operands._replace(x=with_a_column(operands.x, dim), mask=None)
