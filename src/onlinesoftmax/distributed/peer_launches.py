"""The launches of sharded losses, log-probabilities and logsumexp whose GPUs exchange states through peer memory.

    a mean or a sum     a small kernel counts the targets (for a mean); one kernel reads the shard, exchanges states,
    with its gradient   and writes the losses and the gradient of the shard; a small kernel adds the losses
    other results       one kernel reads the shard, exchanges states, and writes the results of the rows; a small
                        kernel adds the losses (for a mean or a sum); backward is one kernel, which exchanges nothing

A loss with label smoothing and class weights adds the weights in one more launch.  launches.py has the launches of
calls that use a collective.  Either way, a result per row has the same bits on every process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..core.call import Call, Settings
from ..core.operations import Operation
from ..core.task import Part
from ..ops import OPERATIONS
from ..torch.check import check_first_derivative
from ..torch.gradients import accumulator_of
from ..torch.loss_launches import reduced_with_gradient
from ..torch.prepare import kind_of, operands_of, prepare, prepared
from ..torch.reductions import reducer
from ..torch.targets import loss_numbers
from .launches import Given, ShardedKind

Tensor = torch.Tensor

_LOSS, _LOGPROBS = OPERATIONS["cross_entropy"], OPERATIONS["token_logprobs"]


class PeerLaunches:
    """The prepared launches of one kind of call; no tensor is kept.

    Args:
        kind: The properties of the call.
        given: The tensors of the first call.  The shard has a column (peers.with_a_column).
        part: The position of the shard.
        with_gradient: True where backward may follow.
    """

    def __init__(self, kind: ShardedKind, given: Given, part: Part, with_gradient: bool) -> None:
        x, mask, target, weight = given
        loss, self._wide = kind.loss, accumulator_of(x.dtype, x.dtype)
        self.kind, self.part, self.dim = kind, part, kind.dim
        self.operation = _LOGPROBS if loss is None else _LOSS
        self.numbers = {} if loss is None else loss_numbers(loss)
        self.results = tuple("loss" if name == "y" and loss is not None else name for name in kind.outputs)
        self.with_gradient, in_forward = with_gradient, with_gradient and kind.reduces
        saved = ("m", "l") if with_gradient and not in_forward else ()
        asked = {*self.results, *saved, *(("y",) if in_forward else ())}
        self.outputs = tuple(output.name for output in self.operation.outputs if output.name in asked)
        beside = self._beside(target, weight)
        if in_forward:
            # For planning; each call passes its own dy.
            beside["dy"] = torch.empty((), dtype=self._wide, device=x.device)
        # With `weight_sum`, the kernel that adds the weights runs between the one that counts and the loss kernel.
        # Then the loss kernel does not follow the kernel that computes dy.
        counts = loss is not None and loss.reduction == "mean"
        follows_divisor = in_forward and counts and "weight_sum" not in beside
        call = self._call(self.operation, x, mask, beside)
        operands = operands_of(call)
        self._launch = prepare(kind_of(call, operands, self.outputs), follows_divisor)
        self._constants = {name: value for name, value in operands.items() if isinstance(value, int)}
        self._reduced: Callable[..., Tensor] | None = None
        self._total: Callable[..., Tensor] | None = None
        if loss is not None and kind.reduces:
            small = reducer(x, target, weight, loss, with_gradient, part.total)
            assert small is not None
            self._total = small.total
            self._reduced = reduced_with_gradient(self._losses_and_gradient, small, None) if in_forward else None

    def __call__(self, given: Given) -> tuple[Tensor, ...]:
        """The results of a call."""
        x, _, target, weight = given
        if self._reduced is not None:
            return (self._reduced(x, target, weight),)
        if self.with_gradient and self._total is None:
            found: tuple[Tensor, ...] = _apply(x, self, given)
        else:
            found = self._outputs(given)[0]
        if self._total is not None:
            return (self._total(found[0], target, weight, None),)
        # Statistics other than the entropy have the dtype of the result.
        return tuple(
            t if name == "entropy" else t.to(self.kind.result) for name, t in zip(self.results, found, strict=True)
        )

    def _call(self, operation: Operation, x: Tensor, mask: Tensor | None, beside: Mapping[str, Any]) -> Call:
        """A call on the shard; operands with one value per row get the softmax dimension."""
        options = self.kind.options._replace(mask=mask)
        settings = Settings(self.dim, x.dtype if operation.backward else None, choice=self.kind.choice, part=self.part)
        beside = {
            name: t.unsqueeze(self.dim) if name in operation.row_operands and isinstance(t, Tensor) and t.dim() else t
            for name, t in beside.items()
        }
        if "weight" in beside:
            beside["weight"] = beside["weight"].view(-1, *[1] * (x.dim() - 1 - self.dim))
        return Call(operation, x, settings, None if options.plain else options, None, beside)

    def _beside(self, target: Tensor, weight: Tensor | None) -> dict[str, Any]:
        """The operands that forward and backward share, without the numbers of the score options."""
        beside: dict[str, Any] = {"target": target, **self.numbers}
        if weight is not None:
            beside["weight"] = self._local(weight)
            if "smoothing" in self.numbers:
                beside["weight_sum"] = weight.sum(dtype=accumulator_of(self._wide, weight.dtype))
        return beside

    def _local(self, weight: Tensor) -> Tensor:
        """The weights of this shard, a view of all weights.

        A kernel may need the weight of a target on another GPU, and reads it before or behind the view.
        """
        first, cols = self.part.first, self.kind.shards.cols
        if not cols:
            # The one column of an empty shard has a weight, which is not read.
            weight, cols = torch.cat([weight, weight.new_zeros(1)]), 1
        return weight[first : first + cols]

    def _outputs(self, given: Given) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """(the results, all outputs by name) of the kernel."""
        x, mask, target, weight = given
        operands = {**self._constants, **self._beside(target, weight)}
        if mask is not None:
            operands["mask"] = mask
        found = self._launch(x, None, operands)
        named = dict(zip(self.outputs, found if len(self.outputs) > 1 else (found,), strict=True))
        return tuple(named[name] for name in self.results), named

    def _losses_and_gradient(
        self, x: Tensor, target: Tensor, weight: Tensor | None, factor: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The losses of the rows, and `factor` times their gradients."""
        losses, gradient = self._launch(x, None, {**self._constants, **self._beside(target, weight), "dy": factor})
        return losses, gradient

    def gradient(self, x: Tensor, saved: Mapping[str, Any], dys: Mapping[str, Tensor]) -> Tensor:
        """The gradient with respect to the shard, from the saved tensors and the gradients of the results by name."""
        m = saved["m"]
        beside = {**self._beside(saved["target"], saved["weight"]), "m": m, "l": saved["l"]}
        dy = dys.get("loss" if self.kind.loss is not None else "y")
        beside["dy"] = torch.zeros_like(m) if dy is None else dy
        if "lse" in dys:
            beside["dlse"] = dys["lse"]
        if "entropy" in dys:
            beside |= {"entropy": saved["entropy"], "dentropy": dys["entropy"]}
        call = self._call(OPERATIONS[self.operation.gradient_name], x, saved["mask"], beside)
        run, operands = prepared(call, ("y",))
        dx: Tensor = run(x, None, operands)
        return dx


_SAVED = ("mask", "target", "weight", "m", "l", "entropy")


class _Rows(torch.autograd.Function):
    """The results per row in the accumulator's dtype, with a gradient.  Backward needs no exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, launches: PeerLaunches, given: Given) -> Any:
        found, named = launches._outputs(given._replace(x=x))
        saved: dict[str, Any] = {"mask": given.mask, "target": given.target, "weight": given.weight, **named}
        ctx.save_for_backward(x, *(saved.get(name) for name in _SAVED))
        ctx.launches = launches
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        check_first_derivative("the gradient of numbers of sharded rows")
        launches = ctx.launches
        given = {name: dy for name, dy in zip(launches.results, dys, strict=True) if dy is not None}
        if not given:
            return None, None, None
        x, *saved = ctx.saved_tensors
        return launches.gradient(x, dict(zip(_SAVED, saved, strict=True)), given), None, None


# `apply` of the base class in C++, without the check for transforms in torch.autograd.Function.
_apply = super(torch.autograd.Function, _Rows).apply
