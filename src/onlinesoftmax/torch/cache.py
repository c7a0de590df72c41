"""Caches of prepared launches, and the calls that need little host time to find theirs: the usual calls.

A call is *usual* if its launch follows from its tensors' shapes, strides, dtypes, devices and alignment and from its
other arguments.  These form a short key.  The first call with a key checks its arguments and prepares the launch; a
repeated call finds the launch under the key and runs it.  On small inputs, host time dominates.

Every tensor of a usual call is strided, is not lazily negated, and is no subclass with functions of its own.  No trace,
functorch transform or forward mode is active.  Each kind of call adds conditions where it makes its keys:

    launches.py            softmax, log-softmax and logsumexp on a GPU
    loss_launches.py       losses and log-probabilities on a GPU
    distributed/usual.py   losses, log-probabilities and logsumexp of sharded rows

Other calls on our kernels find their functions under longer keys (prepare.py).
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

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


def forget() -> None:
    """Empty all caches; for tests that change what is prepared."""
    for cache in _CACHES:
        cache.clear()


def described(t: torch.Tensor) -> tuple[Any, ...]:
    """The part of a key that describes a tensor, without its device: all tensors of a call are on one."""
    return t.shape, t.stride(), t.dtype, t.data_ptr() % 16 == 0
