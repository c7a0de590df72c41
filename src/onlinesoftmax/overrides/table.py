"""Table of the PyTorch functions that `override` replaces, with the reasons to leave a call to PyTorch.

To replace another function, add its spellings to REPLACEMENTS.  torch.compile traces the functions of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from .. import api
from ..core.arguments import checked_dim
from ..core.call import Call, Settings
from ..ops import OPERATIONS
from ..torch.arguments import autocasts, check_out_memory, checked_out, reduced_shape
from ..torch.loss_run import why_not_kernels
from ..torch.reasons import why_pytorch

Arguments = dict[str, Any]
"""Arguments of one call, by PyTorch's names of the parameters."""


class Replacement(NamedTuple):
    """Our function for one spelling of a PyTorch function.

    Attributes:
        name: Name of our function in api.py; reports use it too.
        parameters: Names of PyTorch's parameters.  Our function has them too, apart from `dropped`.
        positional: Number of parameters that may be given by position: the first ones.
        why_left: Function of the arguments and the forced backend: why PyTorch must run the call, or None.
        dropped: Parameters that our function does not have.
    """

    name: str
    parameters: tuple[str, ...]
    positional: int
    why_left: Callable[[Arguments, str | None], str | None]
    dropped: tuple[str, ...] = ()

    def run(self, arguments: Arguments, backend: str | None) -> Any:
        """The result of our function."""
        ours = {name: value for name, value in arguments.items() if name not in self.dropped}
        return getattr(api, self.name)(**ours, backend=backend)


ALIASES = {"x": "input", "a": "input", "x1": "input", "axis": "dim", "keepdims": "keepdim"}
"""NumPy's names of parameters, which PyTorch's functions in C++ also accept."""


def bind(replacement: Replacement, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments | None:
    """The arguments by name; None where they do not fit the parameters."""
    if len(args) > replacement.positional:
        return None
    arguments = dict(zip(replacement.parameters, args, strict=False))
    for keyword, value in kwargs.items():
        name = ALIASES.get(keyword, keyword)
        if name in arguments or name not in replacement.parameters:
            return None
        arguments[name] = value
    return arguments


def why_left(replacement: Replacement, arguments: Arguments | None, backend: str | None) -> str | None:
    """Why PyTorch must run a call; None where our function can."""
    if arguments is None:
        return "our function does not have these arguments"
    x = arguments.get("input")
    if not isinstance(x, torch.Tensor):
        return f"input is a {type(x).__name__}, not a tensor"
    return replacement.why_left(arguments, backend)


def _why_softmax(arguments: Arguments, backend: str | None) -> str | None:
    """Why PyTorch must run a call of softmax or log_softmax."""
    x, dims = arguments["input"], (arguments.get("dim"),)
    return (
        _why_dims(dims)
        or why_pytorch(x, arguments.get("dtype"), backend)
        or _why_out(arguments, Call(OPERATIONS["softmax"], x, Settings(dims)), x.shape)
    )


def _why_logsumexp(arguments: Arguments, backend: str | None) -> str | None:
    """Why PyTorch must run a call of logsumexp, which may have several dimensions."""
    x, dim = arguments["input"], arguments.get("dim")
    dims = tuple(dim) if isinstance(dim, tuple | list) else (dim,)
    if reason := _why_dims(dims) or why_pytorch(x, None, backend):
        return reason
    reduced = [checked_dim("logsumexp", dim, x.dim()) for dim in dims]
    if len(set(reduced)) < max(len(dims), 1):
        return "dim names no dimension, or one dimension twice"
    shape = reduced_shape(x.shape, reduced, bool(arguments.get("keepdim")))
    return _why_out(arguments, Call(OPERATIONS["logsumexp"], x, Settings(dims)), torch.Size(shape))


def _why_cross_entropy(arguments: Arguments, backend: str | None) -> str | None:
    """Why PyTorch must run a call of cross_entropy."""
    for name in ("size_average", "reduce"):
        if arguments.get(name) is not None:
            return f"{name} is deprecated, and our function does not have it"
    target, weight = arguments.get("target"), arguments.get("weight")
    if not isinstance(target, torch.Tensor):
        return f"target is a {type(target).__name__}, not a tensor"
    if weight is not None and not isinstance(weight, torch.Tensor):
        return f"weight is a {type(weight).__name__}, not a tensor"
    ignore_index = arguments.get("ignore_index")
    # Our function raises the error for a value of another type.
    ignore_index = ignore_index if isinstance(ignore_index, int) else -100
    return why_not_kernels(arguments["input"], target, weight, backend, ignore_index)


def _why_dims(dims: tuple[Any, ...]) -> str | None:
    for dim in dims:
        if dim is None:
            return "dim is None, so PyTorch chooses it"
        if isinstance(dim, bool) or not isinstance(dim, int):
            return f"dim is a {type(dim).__name__}, not an int"
    return None


def _why_out(arguments: Arguments, call: Call, shape: torch.Size) -> str | None:
    """Why PyTorch must write to `out`, which it may resize or reject with an error of its own."""
    out, x = arguments.get("out"), call.x
    if out is None:
        return None
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        return "out is given, and a tensor requires a gradient"
    if autocasts(x):
        return "out is given under autocast"
    try:
        checked_out(call.operation.name, out, shape, arguments.get("dtype") or x.dtype, x.device)
        if not torch.compiler.is_compiling():
            check_out_memory(call._replace(out=out))
    except RuntimeError as error:
        return str(error).removeprefix(f"{call.operation.name}(): ")
    return None


_ELEMENTS = ("input", "dim", "dtype", "out")
_FUNCTIONAL = ("input", "dim", "_stacklevel", "dtype")
_ROWS = ("input", "dim", "keepdim", "out")

_LOSS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")

SOFTMAX = Replacement("softmax", _ELEMENTS, 3, _why_softmax)
LOG_SOFTMAX = Replacement("log_softmax", _ELEMENTS, 3, _why_softmax)
LOGSUMEXP = Replacement("logsumexp", _ROWS, 3, _why_logsumexp)

REPLACEMENTS: dict[Callable[..., Any], Replacement] = {
    torch.softmax: SOFTMAX,
    torch.Tensor.softmax: SOFTMAX,
    torch.special.softmax: SOFTMAX,
    torch.nn.functional.softmax: Replacement("softmax", _FUNCTIONAL, 4, _why_softmax, ("_stacklevel",)),
    torch.log_softmax: LOG_SOFTMAX,
    torch.Tensor.log_softmax: LOG_SOFTMAX,
    torch.special.log_softmax: LOG_SOFTMAX,
    torch.nn.functional.log_softmax: Replacement("log_softmax", _FUNCTIONAL, 4, _why_softmax, ("_stacklevel",)),
    torch.logsumexp: LOGSUMEXP,
    torch.Tensor.logsumexp: LOGSUMEXP,
    torch.special.logsumexp: LOGSUMEXP,
    torch.nn.functional.cross_entropy: Replacement(
        "cross_entropy", _LOSS, len(_LOSS), _why_cross_entropy, ("size_average", "reduce")
    ),
}
"""Our function for each spelling of a PyTorch function."""

NAMES = tuple(dict.fromkeys(replacement.name for replacement in REPLACEMENTS.values()))
"""Names of our functions, which a block may leave to PyTorch."""

LEFT_BY_NAME = "the block leaves this function to PyTorch (leave=)"
"""Why PyTorch runs a call of a function that a block leaves out."""
