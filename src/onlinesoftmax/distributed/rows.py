"""The states of rows that several processes share: each sends its own, and merges those of all.

A state is m, l and further sums of the local columns (core/state.py).  All processes merge the same states in the same
order, so the results have the same bits on every process.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

Tensor = torch.Tensor

FLAT = -1000.0
"""exp of this number is 0 in every dtype."""


class RowStates(NamedTuple):
    """One state per row, in float32 (float64 in float64); None for a sum that is not needed.

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

    def entropy(self) -> Tensor:
        """The entropy of the softmax of each row."""
        assert self.below is not None
        return self.l.log() - self.below / self.l


def gathered(t: Tensor, group: Any) -> Tensor:
    """The tensors of all processes, stacked along a new first dimension."""
    found = t.new_empty((dist.get_world_size(group), *t.shape))
    # The same collective; PyTorch has renamed it.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    all_gather(found.view(-1), t.contiguous().view(-1), group=group)
    return found


def merge(local: RowStates, group: Any) -> RowStates:
    """The states of whole rows in float64, from those of all processes, by one collective."""
    names = [name for name, t in zip(RowStates._fields, local, strict=True) if t is not None]
    packed = torch.stack([t for t in local if t is not None])
    parts = dict(zip(names, gathered(packed, group).double().unbind(1), strict=True))
    each, l_each = parts["m"], parts["l"]
    m = each.amax(0)
    lower = (each - m).clamp(min=FLAT)
    # A slice of -inf has l = 0, whatever its m.
    factor = lower.exp()
    found = {"m": m, "l": (l_each * factor).sum(0)}
    if "below" in parts:
        # The exponents become relative to the common maximum.
        found["below"] = ((parts["below"] + lower * l_each) * factor).where(l_each != 0, 0.0).sum(0)
    found |= {name: parts[name].sum(0) for name in ("weighted", "chosen") if name in parts}
    return RowStates(**found)
