"""Launches of usual calls, found with little host time, which dominates on small inputs.

A usual call has a plain GPU tensor, one dimension, and no score option, dtype or batch invariance.  Its shapes,
strides and dtypes form a short key, under which the prepared kernel (prepare.py) is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from ..core.call import NOTHING, Call, Settings
from ..core.operations import Operation
from .check import check_out_memory, extent
from .prepare import kind_of, prepare

Run = Callable[[torch.Tensor, torch.Tensor | None, Mapping[str, Any]], torch.Tensor]


class Launch(NamedTuple):
    """A prepared kernel.

    Attributes:
        run: The function run(x, out, operands).
        settings: Settings of the call.
    """

    run: Run
    settings: Settings


LAUNCHES: dict[tuple[Any, ...], Launch] = {}
"""Launches by `key_of`."""

MOST_LAUNCHES = 4096


def is_usual(x: torch.Tensor) -> bool:
    """True for a GPU tensor without functorch transforms, forward-mode derivatives, autocast or a lazy negation."""
    return (
        x.is_cuda
        and x.layout is torch.strided
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and not torch.is_autocast_enabled()
        and not x.is_neg()
    )


def key_of(
    operation: Operation, x: torch.Tensor, dim: int, keepdim: bool, out: Any, choice: tuple[Any, ...]
) -> tuple[Any, ...]:
    """The key of a usual call in LAUNCHES."""
    key = (operation, x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16, dim, keepdim, choice)
    if out is None:
        return key
    if type(out) is not torch.Tensor or out.requires_grad:
        return ()
    return (*key, out.shape, out.stride(), out.dtype, out.get_device(), out.data_ptr() % 16)


def add(key: tuple[Any, ...], call: Call) -> Launch:
    """Prepare the launch of a usual call and keep it under its key."""
    if len(LAUNCHES) >= MOST_LAUNCHES:
        LAUNCHES.clear()
    run = prepare(kind_of(call, NOTHING))
    launch = LAUNCHES[key] = Launch(run if call.out is None else _checked(run, call), call.settings)
    return launch


def _checked(run: Run, call: Call) -> Run:
    """The function `run`, which first checks that writing `out` does not change elements that are still to be read."""
    before, after = extent(call.out), extent(call.x)

    def checked(x: torch.Tensor, out: torch.Tensor | None, operands: Mapping[str, Any]) -> torch.Tensor:
        assert out is not None
        # `out` is apart from x if it begins at or after the end of x, or ends at or before its beginning.
        if -before < out.data_ptr() - x.data_ptr() < after:
            check_out_memory(call._replace(x=x, out=out))
        return run(x, out, operands)

    return checked
