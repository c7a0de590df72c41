"""The cache of prepared calls, and the keys under which calls find theirs.

A call is *cacheable* if its launch follows from its tensors' shapes, strides, dtypes, devices and alignment and from
its other arguments.  These form a key.  The first call with a key checks its arguments and prepares the launch; a
repeated call finds the prepared call under the key and runs it.  On small inputs, host time dominates.

Every tensor of a cacheable call is strided, is not nested, is not lazily negated, and is no subclass with functions of
its own.  No trace, functorch transform, forward mode or autocast is active.  Other calls on our
kernels find the function of their kernel under a key of the same form (prepare.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

from ..core.options import ScoreOptions

Tensor = torch.Tensor

Value = TypeVar("Value")

MOST_ENTRIES = 4096
"""Number of entries at which a cache is emptied."""


def new_cache() -> dict[tuple[Any, ...], Any]:
    """A new cache, which `keep` bounds and `forget` empties.

    A plain dictionary: the method `get` of a subclass takes longer.
    """
    _CACHES.append({})
    return _CACHES[-1]


def keep(cache: dict[tuple[Any, ...], Value], key: tuple[Any, ...], value: Value) -> Value:
    """Add an entry to a cache, and return its value; a full cache is emptied first."""
    if len(cache) >= MOST_ENTRIES:
        cache.clear()
    cache[key] = value
    return value


_CACHES: list[dict[tuple[Any, ...], Any]] = []
"""All caches, for `forget`."""

PREPARED_CALLS: dict[tuple[Any, ...], Any] = new_cache()
"""Prepared functions that run calls, and names of backends (prepare.py), by `key_of`.

Each module that adds entries chooses the arguments of its functions.  No entry holds a tensor of a call.
"""


def forget() -> None:
    """Empty all caches; for tests that change what is prepared."""
    for cache in _CACHES:
        cache.clear()


def key_of(arguments: tuple[Any, ...], x: Tensor, operands: Iterable[Tensor | None] = ()) -> tuple[Any, ...]:
    """The key of a call: its arguments that are no tensors, and the properties of its tensors."""
    key: tuple[Any, ...] = (arguments, x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16)
    for t in operands:
        key += (None,) if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16)
    return key


def key_of_plain(arguments: Any, *tensors: Any) -> tuple[Any, ...]:
    """The key of a call whose tensors a kernel can read; () where it cannot read one, or one is of another type."""
    key: tuple[Any, ...] = (arguments,)
    try:
        for t in tensors:
            if t is None:
                key += (None,)
            elif type(t) is not Tensor or t.is_neg():
                return ()
            else:
                key += (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16)
    except RuntimeError:
        # A sparse tensor, a nested one and a batch of vmap have no strides or no address.
        return ()
    return key


def are_constant(options: ScoreOptions | None) -> bool:
    """True for score options that can be part of a key: they have no tensors."""
    return options is None or (type(options.scale) is float and options.bias is None and options.mask is None)


def is_transformed() -> bool:
    """True under torch.func and under vmap, and in forward mode, where tensors may be dual numbers."""
    return _is_transformed() or forward_ad._current_level >= 0


def is_torchscript() -> bool:
    """True in `torch.jit.trace`, which records operations on plain tensors; their sizes are tensors then."""
    return _tracing_state() is not None


# Looking up a name in a module costs the host as much as calling some of these.
_is_compiling, _is_recording = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
_tracing_state = torch._C._get_tracing_state
_is_autocast, _is_transformed = torch._C._is_any_autocast_enabled, torch._C._are_functorch_transforms_active


def look_up(arguments: tuple[Any, ...], x: Any, *operands: Any) -> tuple[tuple[Any, ...], Any]:
    """(key, prepared call) of a call: the key is () if the call is not cacheable, the prepared call None if it is new.

    Args:
        arguments: The operation and the arguments that are no tensors.
        x: The input.
        operands: The other tensors, None for an absent one.
    """
    # Fake tensors have another type, so is_dynamo_compiling suffices; is_compiling takes three times as long.
    if (
        type(x) is not Tensor
        or _is_compiling()
        or x.is_neg()
        or _is_transformed()
        or forward_ad._current_level >= 0  # `is_transformed` without the time of a call
        or _is_autocast()
        or _tracing_state() is not None  # `is_torchscript`
    ):
        return (), None
    recording = _is_recording()
    try:
        # The key is that of `key_of`, made in the loop of the checks: a second loop takes the host 0.3 microseconds.
        key: tuple[Any, ...]
        key = ((arguments, recording and x.requires_grad), x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16)
        for t in operands:
            if t is None:
                key += (None,)
            elif type(t) is not Tensor or t.is_neg() or (recording and t.requires_grad):
                # The checks of the general path raise the error for an operand that requires a gradient.
                return (), None
            else:
                key += (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16)
        return key, PREPARED_CALLS.get(key)
    except (RuntimeError, TypeError):
        # A tensor has no strides or no address (`key_of_plain`), or an argument, as a NumPy array, cannot be part of a
        # key.  The general path takes the tensor, and its checks name the argument.
        return (), None
