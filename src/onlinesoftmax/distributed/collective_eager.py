"""The general way to the statistics of sharded rows: PyTorch's operations merge the states after a collective.

Every process has the same statistics of every row, so that what is computed from them is the same everywhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .exchange import Rows, Saved, merge
from .local import Shard, gradient, runs_kernels, states
from .shards import Operands, ShardSignature, to_local_columns

Tensor = torch.Tensor


NUMBERS = ("y", "lse", "entropy", "spread")
"""Names of the results of `General.forward`, as `statistics` describes them."""


def statistics(signature: ShardSignature, operands: Operands, groups: tuple[Any, ...]) -> dict[str, Any]:
    """The log-probability "y", "lse", "entropy" and "spread" of every row, in the accumulator's dtype, with a gradient.

    entropy is None unless it is among the outputs, and spread unless the loss has label smoothing.  spread is
    weight_sum * lse - sum(weight * z), the part of a smoothed loss that belongs to all classes.
    """
    way = general_way(signature, operands)
    return dict(zip(NUMBERS, Rows.apply(operands.x, way, operands, groups), strict=True))


def general_way(signature: ShardSignature, operands: Operands) -> General:
    """The way to `statistics` of these tensors."""
    weight = operands.weight
    weight_sum: Any = signature.shards.total
    if weight is not None and signature.smoothed:
        weight_sum = weight.sum(dtype=torch.float64)
    return General(signature, runs_kernels(Shard.of(signature, operands, operands.target)), weight_sum)


class General(NamedTuple):
    """The way to `statistics`.

    Attributes:
        signature: The properties of the call.
        kernels: Our kernels make the passes over the shard; torch.compile cannot trace this question in backward.
        weight_sum: Sum of the weights of all classes, which `spread` needs; the number of classes without weights.
    """

    signature: ShardSignature
    kernels: bool
    weight_sum: Any

    def forward(self, operands: Operands, groups: tuple[Any, ...]) -> tuple[tuple[Tensor | None, ...], Saved]:
        """(the results, what backward reads)."""
        signature, shards = self.signature, self.signature.shards
        target = to_local_columns(operands.target, shards)
        shard = Shard.of(signature, operands, target)
        local = states(shard, self.kernels, "entropy" in signature.outputs, signature.smoothed)
        whole = merge(local, groups)
        assert whole.logprob is not None
        # A row of only -inf gives NaN without more ado.  So does a row with NaN; one with +inf has an infinite l.
        logprob = whole.logprob.masked_fill(self._no_class(target), torch.nan)
        spread = None if whole.weighted is None else self.weight_sum * whole.lse - whole.weighted
        entropy = whole.entropy
        if entropy is not None and not shards.total:
            # The sum over no columns.  From its state, which is that of a row of only -inf, it would be NaN.
            entropy = torch.zeros_like(entropy)
        numbers = (whole.m, whole.l, logprob, whole.lse, entropy, spread)
        m, l, *found = (None if t is None else t.to(local.m.dtype) for t in numbers)
        assert m is not None
        assert l is not None
        return tuple(found), Saved(operands.mask, None, operands.weight, m, l, found[2], target)

    def backward(self, x: Tensor, saved: Saved, dys: tuple[Tensor | None, ...], out: Tensor | None = None) -> Tensor:
        """The gradient with respect to x, from the gradients of the results; kernels write it to `out`."""
        (dy, dlse, dentropy, dspread), target = dys, saved.local_target
        dy = torch.zeros_like(saved.m) if dy is None else dy.masked_fill(self._no_class(target), 0.0)
        shard = Shard.of(self.signature, Operands(x, saved.mask, None, saved.weight), target)
        return gradient(shard, self.kernels, saved, (dy, dlse, dentropy, dspread), self.weight_sum, out)

    def _no_class(self, target: Tensor) -> Tensor:
        """True for the rows whose target, counted from the first local column, is no column of any process."""
        first, total = self.signature.shards.first, self.signature.shards.total
        if not total:
            return torch.ones_like(target, dtype=torch.bool)
        return target.clamp(-first, total - first - 1) != target
