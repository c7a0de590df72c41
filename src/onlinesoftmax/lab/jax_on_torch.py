"""JAX functions on PyTorch tensors, for the benchmark and the verification, which hold tensors.

An array and a tensor share their memory through DLPack.  On a GPU the streams of both frameworks wait for each other on
the device, not on the host.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any

Function = Callable[..., Any]


def unavailable(device_type: str) -> str | None:
    """Why JAX cannot compute on this machine's "cpu" or "cuda", in one sentence; None when it can."""
    if importlib.util.find_spec("jax") is None:
        return "jax is not installed: pip install 'onlinesoftmax[jax]'"
    if device_type == "cuda" and _jax().default_backend() != "gpu":
        return "jax has no support for this GPU: pip install 'jax[cuda13]'"
    return None


def on_tensors(function: Function) -> Function:
    """A function of arrays, compiled by JAX, as a function of tensors; it returns an array or a tuple of arrays."""
    compiled = _jax().jit(function)

    def call(*tensors: Any) -> Any:
        with _precision(*tensors):
            found = compiled(*map(_array, tensors))
            return tuple(map(_tensor, found)) if isinstance(found, tuple) else _tensor(found)

    return call


def forward(name: str) -> Function:
    """The function onlinesoftmax.jax.`name` as a function of a tensor that PyTorch's autograd can differentiate.

    Args:
        name: Name of the function.  Of several results, the first is returned.

    Returns:
        A function of a tensor, the softmax dimension `dim`, further tensors that have no gradient, and the keyword
        arguments of the JAX function.
    """
    import torch

    class OnTensor(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, others: tuple[Any, ...], function: Function) -> Any:
            # The arrays share the memory of the tensors, which must not change before backward.
            ctx.save_for_backward(x, *others)
            with _precision(x):
                arrays = tuple(map(_array, others))
                y, ctx.vjp = _jax().vjp(lambda a: function(a, *arrays), _array(x))
                return _tensor(y)

        @staticmethod
        def backward(ctx: Any, *dy: Any) -> Any:
            with _precision(ctx.saved_tensors[0]):
                return _tensor(ctx.vjp(_array(dy[0]))[0]), None, None

    def call(x: Any, dim: int, *others: Any, **arguments: Any) -> Any:
        return OnTensor.apply(x, others, _compiled(name, dim, tuple(arguments.items())))

    return call


@cache
def _compiled(name: str, dim: int, arguments: tuple[tuple[str, Any], ...]) -> Function:
    from ..jax import functions

    function = partial(getattr(functions, name), axis=dim, **dict(arguments))

    def first(*arrays: Any) -> Any:
        found = function(*arrays)
        return found[0] if isinstance(found, tuple) else found

    compiled: Function = _jax().jit(first)
    return compiled


def _jax() -> Any:
    # PyTorch needs memory on the same GPU, so JAX must not reserve most of it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    return jax


def _precision(*tensors: Any) -> Any:
    """A context in which JAX has 64-bit types if any tensor has."""
    import torch

    return _jax().enable_x64(any(t.dtype == torch.float64 for t in tensors))


def _array(t: Any) -> Any:
    return _jax().dlpack.from_dlpack(t.detach().contiguous())


def _tensor(x: Any) -> Any:
    import torch

    return torch.utils.dlpack.from_dlpack(x)
