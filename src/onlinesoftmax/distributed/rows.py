"""Merges the states of rows if the softmax dimension is sharded.

Every process sends its local states, receives the states of all processes, and merges them.  A state is m, l and
further sums of the local columns (core/state.py).  All processes merge the same states in the same order, so the
results have the same bits on every process.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..core.processes import gathered

Tensor = torch.Tensor

FLAT = -1000.0
"""Lower bound of the exponents that `merge` multiplies by: its exp is 0, and products with it are not NaN."""


class RowStates(NamedTuple):
    """One state per row.  A sum that is not needed is None.

    Local states are float32, or float64 if the logits are float64; merged states are float64.

    Attributes:
        m: Maximum of the scores, the smallest finite number where there is none.
        l: sum(exp(z - m)).
        below: sum((z - m) * exp(z - m)), from which the entropy is computed.
        weighted: sum(weight * z), for label smoothing.
        chosen: Score of the target column, 0 where another process has it.
    """

    m: Tensor
    l: Tensor
    below: Tensor | None = None
    weighted: Tensor | None = None
    chosen: Tensor | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's state, as it is sent."""
        return sum(t.element_size() for t in self if t is not None)

    @property
    def lse(self) -> Tensor:
        """Logsumexp of the scores."""
        return self.m + self.l.log()

    @property
    def has_softmax(self) -> Tensor:
        """False for a row of only -inf, or with +inf or NaN."""
        return (self.l > 0) & ~self.l.isinf()

    def entropy(self) -> Tensor:
        """The entropy of the softmax of each row."""
        assert self.below is not None
        return self.l.log() - self.below / self.l


def merge(local: RowStates, groups: tuple[Any, ...]) -> RowStates:
    """The states of whole rows in float64, from those of all processes, by one collective for each group."""
    names = [name for name, t in zip(RowStates._fields, local, strict=True) if t is not None]
    packed = torch.stack([t for t in local if t is not None])
    parts = dict(zip(names, gathered(packed, *groups).double().unbind(1), strict=True))
    each, l_each = parts["m"], parts["l"]
    m = each.amax(0)
    lower = each - m
    if "below" in parts:
        lower = lower.clamp(min=FLAT)
    # If all local scores of a row are -inf, l is 0, and the factor has no effect.
    factor = lower.exp()
    found = {"m": m, "l": (l_each * factor).sum(0)}
    if "below" in parts:
        # The exponents become relative to the common maximum.  Where l is 0, `below` may be NaN.
        found["below"] = ((parts["below"] + lower * l_each) * factor).where(l_each != 0, 0.0).sum(0)
    found |= {name: parts[name].sum(0) for name in ("weighted", "chosen") if name in parts}
    return RowStates(**found)
