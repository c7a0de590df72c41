"""Sampling from a DTensor: the local parts of the arguments, and DTensors of the results.

If the dimension of the tokens is sharded, run.py samples; otherwise each process samples its rows alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ...core.arguments import checked_dim
from ...core.arrays import broadcasts
from ...core.processes import gathered
from ...sampling.arguments import Logits, checked_part, checked_seeds
from ...sampling.results import Sampled
from ..layout import MeshLayout, compare, layout_of, local_of, without_partial_sums
from .leaders import Team

Tensor = torch.Tensor

OF_ROWS = ("temperature", "top_k", "top_p", "min_p", "seed", "offset")
"""The arguments that may have one number for each row."""


class LocalCall(NamedTuple):
    """A call on this process.

    Attributes:
        logits: The local logits.
        arguments: The other arguments by name, without score options; tensors have one number for each local row.
        layout: Layout of the logits.
        team: The processes that share rows; it has no group where the dimension of the tokens is not sharded.
    """

    logits: Logits
    arguments: dict[str, Any]
    layout: MeshLayout
    team: Team

    def results(self, found: Sampled) -> Sampled:
        """The results as DTensors, sharded as the rows are."""
        of_rows: Any = found
        results: list[Any] = [None if t is None else self.layout.rows(t) for t in of_rows]
        return Sampled(*results)


def local_call(x: Any, dim: Any, scores: Mapping[str, Any], arguments: Mapping[str, Any]) -> LocalCall:
    """The call on this process, after a comparison of the calls if the processes exchange something.

    Args:
        x: The logits, a DTensor.
        dim: The dimension of the tokens.
        scores: softcap, bias and mask by name.
        arguments: The other arguments by name.

    Raises:
        NotImplementedError: a support is asked for.
    """
    if arguments["return_support"] is not None:
        raise NotImplementedError("sample(): return_support is not available for a DTensor")
    axis = checked_dim("sample", dim, x.dim())
    layout = layout_of("sample", x, (axis,), "logits")
    compared = {name: value for name, value in arguments.items() if name != "generator"}
    compare("sample", x, layout, {"dim": axis, **scores, **compared}, argument="logits")
    local = local_of(without_partial_sums(x, layout), layout.placements)
    bias, mask = (layout.operand(name, scores[name]) for name in ("bias", "mask"))
    logits = checked_part("sample", local, axis, 1.0, scores["softcap"], bias, mask, "logits")
    if not layout.shards.total:
        raise ValueError(f"sample(): logits has no tokens, its shape is {layout.shape}")
    logits = logits._replace(tokens=layout.shards.total)
    here = {**arguments, **{name: _of_rows(layout, name, arguments[name]) for name in OF_ROWS}}
    copies = [
        layout.mesh.get_group(i)
        for i, placement in enumerate(layout.placements)
        if not placement.is_shard() or placement.dim == axis
    ]
    if here["seed"] is None:
        # Processes with the same rows take the seeds of the first of them.
        seed, _ = checked_seeds(logits, None, 0, here["generator"])
        seed = gathered(seed, *copies)[0] if len(seed) else seed
        here |= {"seed": seed.reshape(logits.rows), "generator": None}
    return LocalCall(logits, here, layout, Team(layout.softmax_groups, layout.shards))


def _of_rows(layout: MeshLayout, name: str, value: Any) -> Any:
    """The local part of an argument that may have one number for each row."""
    if not isinstance(value, Tensor) or not (value.dim() or isinstance(value, DTensor)):
        return value
    (axis,), shape = layout.dims, layout.shape
    rows = (*shape[:axis], *shape[axis + 1 :])
    if not isinstance(value, DTensor) and broadcasts(value.shape, rows):
        value = value.expand(rows)
    if value.shape != rows:
        raise ValueError(
            f"sample(): {name} must be a number or have one for each row, of shape {rows}; got {tuple(value.shape)}"
        )
    return layout.per_row(name, value)
