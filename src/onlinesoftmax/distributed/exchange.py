"""The exchange of the states of rows if the softmax dimension is sharded, and its place in autograd.

Every process sends its local states, receives the states of all processes, and merges them.  A state is m, l and
further sums of the local columns (core/state.py).  All processes merge the same states in the same order, so the
results have the same bits on every process.  There are three ways to do it:

    collective_eager.py  PyTorch's operations merge the states after a collective; any call, and torch.compile
    collective.py        kernels before and after a collective
    peer_memory.py       one kernel reads the shard, exchanges states through peer memory, and writes results
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from ..core.processes import gathered
from ..torch.arguments import check_first_derivative
from .shards import Operands

Tensor = torch.Tensor

LOWEST_EXPONENT = -1000.0
"""Lower bound of the exponents that `merge` multiplies by: its exp is 0, and products with it are not NaN."""


class RowStates(NamedTuple):
    """One state per row, and numbers that follow from it.  A number that is not needed is None.

    Local states are float32, or float64 if the logits are float64; merged states are float64.  The fields that are
    given are sent in this order.

    Attributes:
        m: Maximum of the scores, the smallest finite number where there is none.
        l: sum(exp(z - m)).
        logprob: Log-probability of the target column among the columns of the state.  In a local state it is NaN if
            another process has the target, or if the local columns have no softmax.
        entropy: Entropy of the softmax of the columns of the state; any number where l is 0.
        weighted: sum(weight * z), for label smoothing.
    """

    m: Tensor
    l: Tensor
    logprob: Tensor | None = None
    entropy: Tensor | None = None
    weighted: Tensor | None = None

    @property
    def lse(self) -> Tensor:
        """Logsumexp of the scores."""
        return self.m + self.l.log()

    @property
    def has_softmax(self) -> Tensor:
        """True for a row with a softmax: it has a score above -inf, and neither +inf nor NaN."""
        return (self.l > 0) & ~self.l.isinf()


def merge(local: RowStates, groups: tuple[Any, ...]) -> RowStates:
    """The states of whole rows in float64, from those of all processes, by one collective for each group."""
    names = [name for name, t in zip(RowStates._fields, local, strict=True) if t is not None]
    packed = torch.stack([t for t in local if t is not None])
    parts = dict(zip(names, gathered(packed, *groups).double().unbind(1), strict=True))
    m_each, l_each = parts["m"], parts["l"]
    m = m_each.amax(0)
    lower = m_each - m
    # If all local scores of a row are -inf, l is 0, and the factor has no effect.
    l = (l_each * lower.exp()).sum(0)
    whole = {"m": m, "l": l}
    if "logprob" in parts:
        # If all columns of the process with the target are at -inf, no process has the target's log-probability.
        each = parts["logprob"] + (lower + (l_each.log() - l.log()))
        logprob = each.masked_fill(each.isnan(), -torch.inf).amax(0)
        whole["logprob"] = logprob.where(RowStates(m, l).has_softmax, torch.nan)
    if "entropy" in parts:
        # sum((z - m) * exp(z - m)) of each process, then relative to the common maximum.
        lower = lower.clamp(min=LOWEST_EXPONENT)
        below = l_each * (l_each.log() - parts["entropy"]) + lower * l_each
        total = (below * lower.exp()).where(l_each != 0, 0.0).sum(0)
        whole["entropy"] = l.log() - total / l
    if "weighted" in parts:
        whole["weighted"] = parts["weighted"].sum(0)
    return RowStates(**whole)


class Saved(NamedTuple):
    """The tensors that the backward pass of a way of exchange reads besides x; None for those that it does not read.

    Attributes:
        mask, target, weight: As in Operands.
        m, l, entropy: State and entropy of each whole row; None without a gradient.
        local_target: The targets counted from the first local column.
        divisor: One tensor of two numbers, (1 / divisor, divisor), for a mean; None for other results.
    """

    mask: Tensor | None
    target: Any
    weight: Tensor | None
    m: Any
    l: Any
    entropy: Tensor | None = None
    local_target: Any = None
    divisor: Tensor | None = None


class Way(Protocol):
    """A way to compute the results of rows from a shard, with an exchange of states."""

    def forward(self, operands: Operands, groups: tuple[Any, ...]) -> tuple[tuple[Tensor | None, ...], Saved]:
        """(the results, what backward reads)."""

    def backward(self, x: Tensor, saved: Saved, dys: tuple[Tensor | None, ...], out: Tensor | None = None) -> Tensor:
        """The gradient with respect to the shard, from the gradients of the results; nothing is exchanged.

        Kernels write it to `out`, which may be the shard itself.
        """


class Rows(torch.autograd.Function):
    """The results of a way of exchange, with a gradient.

    Backward needs no exchange, because all processes get the same incoming gradients.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, way: Way, operands: Operands, groups: tuple[Any, ...]) -> Any:
        results, saved = way.forward(operands._replace(x=x), groups)
        ctx.save_for_backward(x, *saved)
        ctx.way = way
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        check_first_derivative("the gradient of numbers of sharded rows")
        if all(dy is None for dy in dys):
            return None, None, None, None
        x, *saved = ctx.saved_tensors
        return ctx.way.backward(x, Saved(*saved), dys), None, None, None


apply_in_eager_mode = super(torch.autograd.Function, Rows).apply
"""`Rows.apply` of the base class in C++, without the check for transforms in torch.autograd.Function."""
