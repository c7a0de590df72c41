"""Runs an operation on a DTensor.

If the softmax dimension is sharded, it calls the functions of `onlinesoftmax.distributed` on the local part; otherwise
the ordinary function.  The result is sharded as the input is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..core.call import Call, Settings
from ..core.operations import Operation
from ..core.options import PLAIN, ScoreOptions
from ..core.task import Choice
from ..torch import dispatch, eager
from ..torch.check import check_options, checked_dim
from . import losses
from .layout import MeshLayout, compare, layout_of, local_of, without_partial_sums
from .local import Sharded
from .softmax import softmax

Tensor = torch.Tensor


def run_plain(operation: Operation, x: Any, dim: Any, keepdim: bool, out: Any, choice: tuple[Any, ...]) -> Tensor:
    """A call without score options, dtype or batch invariance."""
    return run(Call(operation, x, Settings(dim, None, keepdim, Choice(*choice)), None, out))


def run(call: Call) -> Tensor:
    """The operation on a DTensor."""
    operation, x, settings, options, out, _ = call
    name = operation.name
    if out is not None:
        raise NotImplementedError(f"{name}(): out is not available for a DTensor; use the result")
    check_options(call)
    layout = layout_of(name, x, _dims(name, settings.dim, x.dim()))
    compare(name, x, layout, {"settings": settings._replace(dim=layout.dims), "options": options})
    x = without_partial_sums(x, layout)
    local = local_of(x, layout.placements)
    here = call._replace(x=local, options=layout.options(options, local.device))
    y = _sharded(here, layout) if layout.softmax_groups else dispatch.run(here)
    return layout.rows(y, settings.keepdim) if operation.per_row else layout.elements(y, x.stride())


def _dims(name: str, dim: Any, ndim: int) -> tuple[int, ...]:
    if isinstance(dim, tuple | list):
        # PyTorch takes an empty tuple for all dimensions.
        return tuple(checked_dim(name, each, ndim) for each in dim) or tuple(range(ndim))
    return (checked_dim(name, dim, ndim),) if ndim else ()


def _sharded(call: Call, layout: MeshLayout) -> Tensor:
    """The local part of the result if the softmax dimension is sharded."""
    name = call.operation.name
    x, settings, options = call.x, call.settings, call.scores
    if len(layout.dims) > 1:
        raise NotImplementedError(f"{name}(): a dimension of dim {settings.dim} is sharded; reduce one dim at a time")
    if not x.is_floating_point() and settings.dtype is None:
        raise NotImplementedError(f"{name}(): input of dtype {x.dtype} is not floating point; pass dtype=")
    dtype = dispatch.with_autocast(call).settings.dtype or x.dtype
    x = x.to(torch.promote_types(x.dtype, dtype))
    sharded = sharded_call(name, layout, options, settings.choice)
    return _FUNCTIONS[name](name, x, layout.dims[0], settings.keepdim, sharded).to(dtype)


def sharded_call(name: str, layout: MeshLayout, options: ScoreOptions, choice: Choice) -> Sharded:
    """The arguments of a call whose softmax dimension is sharded.

    Raises:
        NotImplementedError: batch_invariant is asked for.
    """
    if choice.batch_invariant:
        raise NotImplementedError(f"{name}(): batch_invariant is not available if the softmax dimension is sharded")
    return Sharded(layout.softmax_groups, options, choice, layout.shards)


def scored(x: Tensor, dim: int, call: Sharded) -> tuple[Tensor, Sharded]:
    """(x, call) without a bias or a tensor scale.

    If there is one, computes the scores here with PyTorch (at least float32) and returns them with plain options;
    otherwise returns the arguments unchanged.
    """
    options = call.options
    if options.bias is None and not isinstance(options.scale, Tensor):
        return x, call
    z = eager.scores_of(x, dim, options, x.dtype)[0]
    return z, call._replace(options=PLAIN)


def _softmax_of(name: str, x: Tensor, dim: int, keepdim: bool, call: Sharded) -> Tensor:
    return softmax(name, x, dim, call, logarithm=False)


def _log_softmax_of(name: str, x: Tensor, dim: int, keepdim: bool, call: Sharded) -> Tensor:
    return softmax(name, x, dim, call, logarithm=True)


def _logsumexp_of(name: str, x: Tensor, dim: int, keepdim: bool, call: Sharded) -> Tensor:
    zero, call = call.options.zero, call._replace(options=call.options._replace(zero=False))
    z, call = scored(x, dim, call)
    lse = losses.logsumexp(z, dim, keepdim, call)
    # With zero=True, a row of only -inf gets gradient 0: the constant in `where` stops the gradient.
    return lse.where(lse != -torch.inf, -torch.inf) if zero else lse


_FUNCTIONS: dict[str, Callable[[str, Tensor, int, bool, Sharded], Tensor]] = {
    "softmax": _softmax_of,
    "log_softmax": _log_softmax_of,
    "logsumexp": _logsumexp_of,
}
