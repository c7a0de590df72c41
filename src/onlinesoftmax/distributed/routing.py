"""Routing of a DTensor: the local parts of the arguments, and DTensors of the results.

Each process routes its tokens alone.  Sums over tokens are partial sums, which are added where they are used.  If the
experts are sharded, the logits are gathered first: a token needs all of its scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from ..core.view import contiguous_strides
from ..routing.results import Routed
from ..routing.rules import check_arrays
from ..torch.arguments import TORCH
from .layout import MeshLayout, compare, layout_of, local_of, without_partial_sums

Tensor = torch.Tensor


class LocalCall(NamedTuple):
    """A call on this process.

    Attributes:
        logits: The local logits.
        operands: bias, mask and indices by name; None for an absent one.
        layout: Layout of the logits; none of its mesh dimensions shards the experts.
    """

    logits: Tensor
    operands: dict[str, Any]
    layout: MeshLayout

    def results(self, found: Routed) -> Routed:
        """The results as DTensors: those of tokens are sharded as the tokens are, and sums over tokens are partial."""
        weights, indices, counts, sums, lse, dense = found
        rows = self.layout.rows
        return Routed(
            rows(weights), rows(indices), self._sums(counts), self._sums(sums), rows(lse),
            None if dense is None else self.layout.elements(dense, contiguous_strides(self.layout.shape)),
        )  # fmt: skip

    def _sums(self, t: Tensor | None) -> Tensor | None:
        """The DTensor of local sums over the tokens of each sequence."""
        if t is None:
            return None
        shape = (*self.layout.shape[:-2], self.layout.shape[-1])
        of_tokens = len(shape) - 1

        def of(placement: Any) -> Any:
            return Partial() if placement.is_shard() and placement.dim == of_tokens else placement

        return DTensor.from_local(
            t, self.layout.mesh, [of(placement) for placement in self.layout.placements], run_check=False,
            shape=torch.Size(shape), stride=contiguous_strides(shape),
        )  # fmt: skip


def local_call(x: Any, k: Any, operands: Mapping[str, Any], arguments: Mapping[str, Any]) -> LocalCall:
    """The call on this process, after a comparison of the calls if the processes exchange something.

    Args:
        x: The logits, a DTensor.
        k: The argument of `route`.
        operands: bias, mask and indices by name: DTensors, or plain tensors that are whole on every process.
        arguments: The other arguments by name.
    """
    bias, mask, indices = (operands[name] for name in ("bias", "mask", "indices"))
    check_arrays(TORCH, x, bias, mask, indices, k)
    experts = x.dim() - 1
    layout = layout_of("route", x, (experts,), "logits")
    compare("route", x, layout, {"k": k, **operands, **arguments}, argument="logits")
    whole = tuple(Replicate() if p.is_shard() and p.dim == experts else p for p in layout.placements)
    layout = layout._replace(placements=whole)
    local = local_of(without_partial_sums(x, layout), whole)
    mask = None if mask is None else layout.per_row("mask", mask.expand(x.shape[:-1]))
    indices = None if indices is None else layout.per_row("indices", indices)
    return LocalCall(local, {"bias": layout.whole("bias", bias), "mask": mask, "indices": indices}, layout)


def whole(routed: Any) -> Routed:
    """The results for a loss as plain tensors: counts and prob_sums of all tokens, weights and lse of this process."""

    def of_all(t: Any) -> Any:
        copies = (Replicate(),) * routed.lse.device_mesh.ndim
        return t if t is None else local_of(t.redistribute(placements=copies), copies)

    weights, lse = (local_of(t, t.placements) for t in (routed.weights, routed.lse))
    return Routed(weights, routed.indices, of_all(routed.counts), of_all(routed.prob_sums), lse)


def number(loss: Tensor, routed: Any, over_tokens: bool) -> Tensor:
    """The DTensor of a loss, which every process has.

    Args:
        loss: The loss that `whole` gives.
        routed: The results as DTensors.
        over_tokens: True where each process has the part of its tokens.
    """
    mesh, placements = routed.lse.device_mesh, routed.lse.placements
    parts = [Partial() if over_tokens and placement.is_shard() else Replicate() for placement in placements]
    found: Tensor = DTensor.from_local(loss, mesh, parts, run_check=False).redistribute(
        placements=[Replicate()] * mesh.ndim
    )
    return found
