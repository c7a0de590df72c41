"""Launches of usual calls (cache.py) of softmax, log-softmax and logsumexp on a GPU.

The operation runs along one dimension, the caller passes no score option, no `dtype` and no batch invariance, and
autocast is off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from ..core.call import NOTHING, Call, Settings
from ..core.operations import Operation
from .cache import keep, new_cache
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


LAUNCHES: dict[tuple[Any, ...], Launch] = new_cache()
"""Launches by `key_of`."""


def is_usual(x: torch.Tensor) -> bool:
    """True for a strided GPU tensor that is not nested and not lazily negated, outside of transforms and autocast."""
    return (
        x.is_cuda
        and x.layout is torch.strided
        and not x.is_nested
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and not torch.is_autocast_enabled()
        and not x.is_neg()
    )


def key_of(
    operation: Operation, x: torch.Tensor, dim: int, keepdim: bool, out: Any, choice: tuple[Any, ...], recorded: bool
) -> tuple[Any, ...]:
    """The key of a usual call in LAUNCHES; () where `out` is no plain tensor, or requires a gradient.

    The smallest calls make this key, so it is a flat tuple that is made without the function `described`.
    """
    key = (operation, x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16, dim, keepdim, choice, recorded)
    if out is None:
        return key
    if type(out) is not torch.Tensor or out.requires_grad:
        return ()
    return (*key, out.shape, out.stride(), out.dtype, out.get_device(), out.data_ptr() % 16)


def add(key: tuple[Any, ...], call: Call, recorded: bool) -> Launch:
    """Prepare the launch of a usual call, which autograd records or not, and keep it under its key."""
    keeps_lse = recorded and call.out is None and len(call.operation.kept_outputs) > 1
    run = _with_lse(call) if keeps_lse else prepare(kind_of(call, NOTHING))
    run = run if call.out is None else _checked(run, call)
    return keep(LAUNCHES, key, Launch(run, call.settings, keeps_lse))


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

    def checked(x: torch.Tensor, out: torch.Tensor | None, operands: Mapping[str, Any]) -> torch.Tensor:
        assert out is not None
        # The memory of `out` and of x overlaps: only some overlaps are allowed.
        if -out_bytes < out.data_ptr() - x.data_ptr() < x_bytes:
            check_out_memory(bare._replace(x=x, out=out))
        return run(x, out, operands)

    return checked
