"""Table of the PyTorch functions that `override` replaces, with the reasons to leave a call to PyTorch.

To replace another function, add its spellings to REPLACEMENTS.  torch.compile traces the functions of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from .. import api, linear
from ..core.arguments import checked_dim
from ..core.call import Call, Settings
from ..ops import OPERATIONS
from ..ops.cross_entropy.arguments import class_dim
from ..torch.arguments import autocasts, check_out_memory, checked_out, reduced_shape
from ..torch.fast_path import is_transformed
from ..torch.formulas import PLAIN_TYPES
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
        function: Our function, where it is not the one of api.py, and chooses its kernels itself.
    """

    name: str
    parameters: tuple[str, ...]
    positional: int
    why_left: Callable[[Arguments, str | None], str | None]
    dropped: tuple[str, ...] = ()
    function: Callable[..., Any] | None = None

    def run(self, arguments: Arguments, backend: str | None, memory: int | None) -> Any:
        """The result of our function; `memory` is for a head."""
        ours = {name: value for name, value in arguments.items() if name not in self.dropped}
        if self.function is not None:
            return self.function(**ours, memory=memory)
        return getattr(api, self.name)(**ours, backend=backend)


ALIASES = {"x": "input", "a": "input", "x1": "input", "axis": "dim", "keepdims": "keepdim"}
"""NumPy's names of parameters, which PyTorch's functions in C++ also accept."""


class Signature(Protocol):
    """What `bind` reads of a function: the names of its parameters, and how many may be given by position."""

    @property
    def parameters(self) -> tuple[str, ...]: ...  # the class says it

    @property
    def positional(self) -> int: ...  # the class says it


def bind(signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments | None:
    """The arguments by name; None where they do not fit the parameters."""
    if len(args) > signature.positional:
        return None
    arguments = dict(zip(signature.parameters[: len(args)], args, strict=True))
    for keyword, value in kwargs.items():
        name = ALIASES.get(keyword, keyword)
        if name in arguments or name not in signature.parameters:
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
    dims = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
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


def _why_linear_cross_entropy(arguments: Arguments, backend: str | None) -> str | None:
    """Why PyTorch must run a call of linear_cross_entropy, which needs no kernel of ours."""
    if arguments.get("options") is not None:
        return "options chooses the chunks of PyTorch"
    names = ("input", "linear_weight", "target", "linear_bias", "weight")
    tensors = {name: arguments.get(name) for name in names}
    for name, t in tensors.items():
        if type(t) not in PLAIN_TYPES and (t is not None or name in names[:3]):
            return f"{name} is a {type(t).__name__}, not a tensor"
    x, weight, target = (arguments[name] for name in names[:3])
    if weight.dim() != 2 or x.dim() not in (1, 2) or target.dim() > 2:
        return "input, linear_weight or target has more than two dimensions"
    if not target.is_floating_point() and target.dtype != torch.long:
        return f"target has the dtype {target.dtype}"
    return "torch.func or forward mode transforms it" if is_transformed() else None


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
            check_out_memory(call.operation.name, x, call.options, out)
    except RuntimeError as error:
        return str(error).removeprefix(f"{call.operation.name}(): ")
    return None


LINEAR = torch.nn.functional.linear

FEWEST_CLASSES = 32000
"""Fewest output features of a linear layer that is taken for a head.

The vocabularies of large language models begin there; feed-forward layers have fewer features, 28672 in Llama 3 70B.
"""

FEWEST_TOKENS = 256
"""Fewest tokens of a head whose logits wait where no gradient is wanted: the logits of fewer take less than 70 MB."""


def has_classes(args: tuple[Any, ...], kwargs: Mapping[str, Any], fewest: int) -> bool:
    """True where the weight of a call of `linear` has at least `fewest` rows."""
    weight = args[1] if len(args) > 1 else kwargs.get("weight")
    return isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.shape[0] >= fewest


def why_no_head(replacement: Replacement, arguments: Arguments | None, fewest: int) -> str | None:
    """Why the layer that made the logits of a loss is no head; None for another function, and for enough classes."""
    x = None if arguments is None or replacement.parameters is not LOSS else arguments.get("input")
    if not isinstance(x, torch.Tensor) or not x.dim() or x.shape[class_dim(x)] >= fewest:
        return None
    classes = x.shape[class_dim(x)]
    return f"its logits have {classes} classes, and a head has {fewest} or more; linear={classes} takes it"


def head_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any, Any] | None:
    """Input, weight and bias of a call of `linear` whose logits may wait; None for another call."""
    x, weight, bias = (*args, *(None,) * (3 - len(args)))[:3]
    x, weight, bias = kwargs.get("input", x), kwargs.get("weight", weight), kwargs.get("bias", bias)
    if not isinstance(x, torch.Tensor) or not x.dim() or x.shape[-1] != weight.shape[1] or not x.numel():
        return None
    recorded = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if not recorded and x.numel() < FEWEST_TOKENS * x.shape[-1]:
        return None
    return x, weight, bias


def why_computed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> str | None:
    """Why the logits of a head must be computed at once; None where they may wait."""
    if torch.compiler.is_dynamo_compiling():
        return "torch.compile traces it"
    tensors = [t for t in (x, weight, bias) if t is not None]
    for t in tensors:
        if type(t) not in PLAIN_TYPES or t.layout != torch.strided or not t.is_floating_point() or t.is_meta:
            return f"it has a {type(t).__name__} of layout {t.layout} and dtype {t.dtype} on {t.device.type}"
    if any(t.dtype != x.dtype or t.device != x.device for t in tensors) and not autocasts(x):
        return "its tensors have several dtypes or devices"
    if bias is not None and bias.shape != weight.shape[:1]:
        return f"its bias has the shape {tuple(bias.shape)}"
    if is_transformed() or torch._C._get_tracing_state() is not None:
        return "torch.func, forward mode or TorchScript transforms it"
    return None


_ELEMENTS = ("input", "dim", "dtype", "out")
_FUNCTIONAL = ("input", "dim", "_stacklevel", "dtype")
_ROWS = ("input", "dim", "keepdim", "out")

_LINEAR_LOSS = (
    "input", "linear_weight", "target", "linear_bias", "weight", "reduction", "ignore_index", "label_smoothing",
    "options",
)  # fmt: skip
LOSS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")

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
        "cross_entropy", LOSS, len(LOSS), _why_cross_entropy, ("size_average", "reduce")
    ),
}
"""Our function for each spelling of a PyTorch function."""

if hasattr(torch.nn.functional, "linear_cross_entropy"):  # since PyTorch 2.13
    REPLACEMENTS[torch.nn.functional.linear_cross_entropy] = Replacement(
        "linear_cross_entropy", _LINEAR_LOSS, 3, _why_linear_cross_entropy, ("options",), linear.linear_cross_entropy
    )

NAMES = tuple(dict.fromkeys(replacement.name for replacement in REPLACEMENTS.values()))
"""Names of our functions, which a block may leave to PyTorch."""

LEFT_BY_NAME = "the block leaves this function to PyTorch (leave=)"
"""Why PyTorch runs a call of a function that a block leaves out."""
