"""Prepared calls (fast_path.py) of softmax, log-softmax and logsumexp along one dimension.

The caller passes no score option, no `dtype` and no batch invariance.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ..core.call import NOTHING, Call, Settings
from .check import check_out_memory, extent
from .gradients import lse_of, outputs_to_keep
from .prepare import Prepared, kind_of, prepare


class Launch(NamedTuple):
    """A prepared kernel.

    Attributes:
        run: The function run(x, out, operands).
        settings: Settings of the call.
        keeps_lse: True where `run` returns (result, lse), because the gradient reads lse.
    """

    run: Prepared
    settings: Settings
    keeps_lse: bool


def launch_of(call: Call, recorded: bool) -> Launch:
    """Prepare the launch of a cacheable call, which autograd records or not."""
    keeps_lse = recorded and call.out is None and len(call.operation.kept_outputs) > 1
    run = _with_lse(call) if keeps_lse else prepare(kind_of(call, NOTHING))
    run = run if call.out is None else _checked(run, call)
    return Launch(run, call.settings, keeps_lse)


def _with_lse(call: Call) -> Prepared:
    """The function run(x, out, operands) that returns (result, lse)."""
    outputs, settings = outputs_to_keep(call), call.settings
    run = prepare(kind_of(call, NOTHING, outputs))
    if len(outputs) > 1:
        return run

    def with_lse(x: torch.Tensor, out: torch.Tensor | None, operands: Mapping[str, Any]) -> Any:
        y = run(x, out, operands)
        return y, lse_of(y, settings)

    return with_lse


def _checked(run: Prepared, call: Call) -> Prepared:
    """The function `run`, which first checks that writing `out` does not change elements that are still to be read."""
    out_bytes, x_bytes = extent(call.out), extent(call.x)
    # The function lives as long as the cache, and must not keep the tensors of the first call alive.
    bare = call._replace(x=None, out=None)

    def checked(x: torch.Tensor, out: torch.Tensor | None, operands: Mapping[str, Any] = NOTHING) -> torch.Tensor:
        assert out is not None
        # The memory of `out` and of x overlaps: only some overlaps are allowed.
        if -out_bytes < out.data_ptr() - x.data_ptr() < x_bytes:
            check_out_memory(bare._replace(x=x, out=out))
        return run(x, out, operands)

    return checked
