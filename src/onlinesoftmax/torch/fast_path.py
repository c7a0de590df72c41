"""The cache of prepared calls, and the keys under which calls find theirs.

A call is *cacheable* if its launch follows from its tensors' shapes, strides, dtypes, devices and alignment and from
its other arguments.  These form a key.  The first call with a key checks its arguments and prepares the launch; a
repeated call finds the prepared call under the key and runs it.  On small inputs, host time dominates.  So the last
calls are found by guards, which compare tensors in a fifth of the time that a key takes.

Every tensor of a cacheable call is strided, is not nested, is not lazily negated, and is no subclass with functions of
its own.  No trace, functorch transform, forward mode or autocast is active.  Other calls on our
kernels find the function of their kernel under a key of the same form (prepare.py).
"""

from __future__ import annotations

from collections.abc import Callable
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


def key_of(arguments: Any, *tensors: Tensor | None) -> tuple[Any, ...]:
    """The key of a call: its arguments that are no tensors, and the properties of its tensors."""
    key: tuple[Any, ...] = (arguments,)
    for t in tensors:
        key += (None,) if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16)
    return key


def find(
    arguments: tuple[Any, ...], tensors: tuple[Any, ...], recording: bool | None = None
) -> tuple[tuple[Any, ...], Any]:
    """(key, prepared call) of tensors that a kernel can read, as `look_up`, which passes `recording`.

    To read the properties of a tensor takes the host half a microsecond, and to hash them as long again.  A guard of
    PyTorch's compiler compares them, and sees autocast, vmap and inference mode, in a fifth of a microsecond.
    """
    while tensors and tensors[-1] is None:
        tensors = tensors[:-1]
    last = arguments, len(tensors)
    # Hazard: a guard does not see FakeTensorMode and make_fx.
    guards, comparable = _GUARDS.get(last, ()), not _mode_count()
    try:
        if guards and comparable:
            for t in tensors:
                # Hazard: a guard ends the process if it is given a nested tensor.
                if type(t) is not Tensor or t.is_nested or t.data_ptr() % 16:
                    comparable = False
                    break
            else:
                for guard, run in guards:
                    if guard is not None and guard(*tensors):
                        return (), run
        if is_recorded() or (recording is not None and (_is_transformed() or _is_autocast())):
            return (), None
        for t in tensors:
            # The checks of the general path raise the error for an operand that requires a gradient.
            if t is not None and (
                type(t) is not Tensor or t.is_neg() or (recording and t.requires_grad and t is not tensors[0])
            ):
                return (), None
        key = key_of(arguments, *tensors)
    except RuntimeError:
        # A sparse tensor, a nested one and a batch of vmap have no strides or no address.
        return (), None
    found = PREPARED_CALLS.get(key)
    if found is not None and comparable:
        others = tuple([one for one in guards if one[1] is not found])
        # A guard takes longer to make than a key, so it is made for a call that is found a second time.
        guard = _guard_of(tensors) if len(others) < len(guards) else None
        keep(_GUARDS, last, ((guard, found), *others)[:MOST_GUARDS])
    return key, found


def _guard_of(tensors: tuple[Any, ...]) -> Callable[..., bool] | None:
    """The function that is True for tensors like these; None where PyTorch has none."""
    if _TensorGuards is None:
        return None
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    guard: Callable[..., bool] = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return guard


_TensorGuards = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)

MOST_GUARDS = 4
"""Number of calls under the same arguments that are found by guards: each takes a fifth of the time of a key."""

_GUARDS: dict[Any, tuple[tuple[Callable[..., bool] | None, Any], ...]] = new_cache()
"""The last prepared calls that were found under arguments, each with the guard of its tensors if it was found twice."""


def are_constant(options: ScoreOptions | None) -> bool:
    """True for score options that can be part of a key: they have no tensors."""
    return options is None or (type(options.scale) is float and options.bias is None and options.mask is None)


def is_transformed() -> bool:
    """True under torch.func and under vmap, and in forward mode, where tensors may be dual numbers."""
    return _is_transformed() or forward_ad._current_level >= 0


def is_recorded() -> bool:
    """True under the tracers that record operations on plain tensors too, which would not see a launch.

    They are `torch.jit.trace`, where sizes are tensors; and make_fx, torch.export and FakeTensorMode, where a new
    tensor has no memory although the input, which the traced function found outside, has.
    """
    return _tracing_state() is not None or (_mode_count() > 0 and any(_mode(key) is not None for key in _TRACERS))


# Looking up a name in a module costs the host as much as calling some of these.
is_compiling, is_grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
_tracing_state, _mode_count, _mode = (
    torch._C._get_tracing_state, torch._C._len_torch_dispatch_stack, torch._C._get_dispatch_mode
)  # fmt: skip
_TRACERS = tuple(torch._C._TorchDispatchModeKey.__members__.values())
_is_autocast, _is_transformed = torch._C._is_any_autocast_enabled, torch._C._are_functorch_transforms_active


def look_up(arguments: tuple[Any, ...], x: Any, *operands: Any) -> tuple[tuple[Any, ...], Any]:
    """(key, prepared call) of a call: the key is () if the call is not cacheable, the prepared call None if it is new.

    The key may also be () where there is a prepared call.

    Args:
        arguments: The operation and the arguments that are no tensors.
        x: The input.
        operands: The other tensors, None for an absent one.
    """
    # Fake tensors have another type, so is_dynamo_compiling suffices; is_compiling takes three times as long.
    if type(x) is not Tensor or is_compiling() or forward_ad._current_level >= 0:
        return (), None
    recording = is_grad_enabled()
    try:
        return find((arguments, recording and x.requires_grad), (x, *operands), recording)
    except TypeError:
        # An argument, as a NumPy array, cannot be part of a key: the checks of the general path name it.
        return (), None
