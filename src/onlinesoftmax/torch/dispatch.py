"""What runs a call on a torch tensor: PyTorch's own operation, our kernel, or our kernel with derivatives."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.autograd import forward_ad

from ..core.options import Fused, query_axis
from ..core.problem import ITEMSIZE
from ..kernels import registry
from ..planner.plan import PlanError
from . import autograd, eager
from . import run as kernels
from .prepare import DTYPE_NAMES, Place, aligned, check_out, checked_dim, options_of, prepare
from .run import Call


def run(
    operation: str, x: torch.Tensor, dim: Any, dtype: torch.dtype | None, keepdim: bool,
    out: torch.Tensor | None, backend: str | None, strategy: str | None,
    fused: Fused | None = None, batch_invariant: bool = False,
) -> torch.Tensor:  # fmt: skip
    """One operation on a torch tensor: the implementation of every function in api.py."""
    plain = fused is None and not batch_invariant
    if plain and type(x) is torch.Tensor and x.is_cpu and backend is None and strategy is None:
        # First, and at once to PyTorch: on a CPU a microsecond of ours shows.
        return eager.torch_call(operation, x, dim, dtype, keepdim, out)
    usual = plain and out is None and dtype is None and backend is None and strategy is None and type(dim) is int
    # Other tracers than this one bring tensors of another type; its answer takes a quarter of the time.
    if usual and not torch.compiler.is_dynamo_compiling() and type(x) is torch.Tensor and _is_bare(x):
        # On a GPU too, for small inputs: what is prepared needs no more questions.
        known = _LAUNCHES.get((operation, x.shape, x.stride(), x.dtype, x.get_device(), dim, keepdim))
        if known is not None:
            return known(x, None)
    else:
        usual = False
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{operation}(): argument 'input' (position 1) must be Tensor, not {type(x).__name__}")
    if fused is not None:
        _check_fused(operation, x, dim, fused)
    # On a CPU, and wherever our kernels cannot be, PyTorch's own operations are the plan: as eager/row.
    by_default = backend is None and (not x.is_cuda or not _have_kernels())
    if (by_default or backend == "eager") and strategy in (None, "row"):
        return _by_pytorch(operation, x, dim, dtype, keepdim, out, fused, batch_invariant)
    if reason := _not_for_kernels(x, dtype):
        if backend is None and strategy is None:
            return _by_pytorch(operation, x, dim, dtype, keepdim, out, fused, batch_invariant)
        raise PlanError(f"{operation}() with backend={backend!r}, strategy={strategy!r}: {reason}")
    if isinstance(dim, tuple | list):
        return _over_dims(operation, x, tuple(dim), dtype, keepdim, out, backend, strategy, fused, batch_invariant)
    tracing = torch.compiler.is_compiling() or type(x) not in PLAIN_TYPES
    if dtype is None and torch.is_autocast_enabled("cuda" if x.is_cuda else x.device.type):
        dtype = (_autocast_dtype if tracing else _known_autocast_dtype)(operation, x.dtype, x.device.type)
    if tracing:
        from . import custom_ops as library

        dim = checked_dim(operation, dim, x.dim())
        y = library.forward(Call(operation, dim, dtype, keepdim, batch_invariant, backend, strategy), x, fused)
        return y if out is None else _write(operation, y, out)
    if _wants_derivatives(x, fused):
        if out is not None:
            raise RuntimeError(f"{operation}(): functions with out=... do not support gradients, and one is needed")
        return autograd.apply(Call(operation, dim, dtype, keepdim, batch_invariant, backend, strategy), x, fused)
    place = None if out is None else _place(operation, x, out, fused)
    if plain:
        # As kernels.forward, without what only the fused need.
        options = options_of(None, False, backend, strategy)
        is_aligned = x.data_ptr() % 16 == 0
        ready = prepare(
            operation, x.shape, x.stride(), x.dtype, x.device, is_aligned, dim, dtype, keepdim, place, options
        )  # fmt: skip
        if usual:
            if len(_LAUNCHES) >= MOST_LAUNCHES:
                _LAUNCHES.clear()
            _LAUNCHES[operation, x.shape, x.stride(), x.dtype, x.get_device(), dim, keepdim] = ready
        return ready(x, out)
    call = Call(operation, dim, dtype, keepdim, batch_invariant, backend, strategy)
    if batch_invariant and out is not None:
        return _write(operation, kernels.forward(call, x, fused), out)
    return kernels.forward(call, x, fused, out, place)


_LAUNCHES: dict[tuple[Any, ...], Callable[..., torch.Tensor]] = {}
"""What is prepared, by what the usual calls depend on: for tensors on 16 bytes of which nothing else is asked."""

MOST_LAUNCHES = 4096


def _is_bare(x: torch.Tensor) -> bool:
    """Whether it is nothing but numbers on a GPU, on 16 bytes: no derivatives, transforms, autocast or negation."""
    return (
        x.is_cuda
        and x.layout is torch.strided
        and x.data_ptr() % 16 == 0
        and not (x.requires_grad and torch.is_grad_enabled())
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and not torch.is_autocast_enabled()
        and not x.is_neg()
    )


def _have_kernels() -> bool:
    return any(registry.unavailable(name) is None for name in ("cuda", "triton"))


# All that torch.compiler.assume_constant_result does, after it has imported the compiler for a second or three.
_have_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take any attribute


PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)

TRACED_TYPES = ("FakeTensor", "FunctionalTensor")
"""Tensors without data that stand for others while a program is traced."""


def _wants_derivatives(x: torch.Tensor, fused: Fused | None) -> bool:
    if torch.is_grad_enabled():
        if x.requires_grad:
            return True
        if fused is not None and any(isinstance(t, torch.Tensor) and t.requires_grad for t in (fused[0], fused[2])):
            return True
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _by_pytorch(
    operation: str, x: torch.Tensor, dim: Any, dtype: Any, keepdim: bool, out: Any, fused: Fused | None,
    batch_invariant: bool,
) -> torch.Tensor:  # fmt: skip
    if fused is None and not (batch_invariant and operation == "logsumexp"):
        return eager.torch_call(operation, x, dim, dtype, keepdim, out)
    if not x.is_floating_point() and dtype is None:
        raise NotImplementedError(f"{operation}(): input of dtype {x.dtype} is not floating point; pass dtype=")
    if dtype is None and torch.is_autocast_enabled(x.device.type):
        dtype = _autocast_dtype(operation, x.dtype, x.device.type)
    y = eager.torch_fused(operation, x, dim, dtype, keepdim, fused or Fused(), batch_invariant)
    return y if out is None else _write(operation, y, out)


def _autocast_dtype(operation: str, dtype: torch.dtype, device_type: str) -> torch.dtype:
    """What PyTorch's lists make of this operation on this dtype: PyTorch is asked."""
    result: torch.dtype = getattr(torch, operation)(torch.zeros(1, dtype=dtype, device=device_type), 0).dtype
    return result


def _known_autocast_dtype(operation: str, dtype: torch.dtype, device_type: str) -> torch.dtype:
    """The same, asked once."""
    return _autocast_once(operation, dtype, device_type, torch.get_autocast_dtype(device_type))


@lru_cache
def _autocast_once(operation: str, dtype: torch.dtype, device_type: str, _autocast: torch.dtype) -> torch.dtype:
    return _autocast_dtype(operation, dtype, device_type)


def _not_for_kernels(x: torch.Tensor, dtype: torch.dtype | None) -> str | None:
    """Why only PyTorch's own operations can take this tensor; None when our kernels can."""
    if x.dtype not in DTYPE_NAMES or (dtype is not None and dtype not in DTYPE_NAMES):
        return f"dtype must be one of {', '.join(ITEMSIZE)}, got {x.dtype if dtype is None else dtype}"
    if (type(x) not in PLAIN_TYPES and type(x).__name__ not in TRACED_TYPES) or x.layout != torch.strided:
        return f"input is a {type(x).__name__} of layout {x.layout}, not a plain strided tensor"
    if not torch.compiler.is_compiling() and x.is_neg():
        return "input is a lazily negated view; call resolve_neg() first"
    return None


def _check_fused(operation: str, x: torch.Tensor, dim: Any, fused: Fused) -> None:
    """Raise PyTorch's errors, with the name of the argument, for what does not fit the input."""
    scale, _, bias, mask, causal, _ = fused
    for name, t in (("scale", scale), ("bias", bias), ("mask", mask)):
        if (name == "scale" and isinstance(t, float)) or t is None:
            continue
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{operation}(): {name} must be Tensor, as input is, not {type(t).__name__}")
        if t.device != x.device:
            raise RuntimeError(f"{operation}(): {name} is on {t.device}, and input on {x.device}")
        if name == "mask" and t.dtype != torch.bool:
            raise RuntimeError(f"{operation}(): mask must be boolean (True keeps), got {t.dtype}")
        if name != "mask" and not t.is_floating_point():
            raise RuntimeError(f"{operation}(): {name} must be floating point, got {t.dtype}")
        if name == "scale" and t.dim() != 0:
            raise RuntimeError(f"{operation}(): scale must be a number or a 0-d tensor, got shape {tuple(t.shape)}")
        if not _broadcasts(t.shape, x.shape):
            raise RuntimeError(
                f"{operation}(): {name} of shape {tuple(t.shape)} does not broadcast to input's {tuple(x.shape)}"
            )
    if causal:
        if isinstance(dim, tuple | list):
            raise ValueError(f"{operation}(): causal needs one dim, got {dim}")
        query_axis(operation, checked_dim(operation, dim, x.dim()), max(x.dim(), 1))


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))


def _over_dims(
    operation: str, x: torch.Tensor, dims: tuple[int, ...], dtype: Any, keepdim: bool, out: Any,
    backend: Any, strategy: Any, fused: Fused | None, batch_invariant: bool,
) -> torch.Tensor:  # fmt: skip
    """Logsumexp over several dimensions: flattened into one, a view where the strides allow it."""
    if operation != "logsumexp":
        raise TypeError(f"{operation}(): argument 'dim' (position 2) must be int, not {type(dims).__name__}")
    if not dims or x.dim() == 0:
        return _by_pytorch(operation, x, dims, dtype, keepdim, out, fused, batch_invariant)
    kept = sorted({checked_dim(operation, dim, x.dim()) for dim in dims})
    if len(kept) < len(dims):
        raise RuntimeError(f"{operation}(): dim {dims} names a dimension twice")

    def flat(t: torch.Tensor | None) -> torch.Tensor | None:
        if t is None:
            return None
        return t.expand(x.shape).movedim(kept, tuple(range(-len(kept), 0))).flatten(-len(kept))

    last = x.movedim(kept, tuple(range(-len(kept), 0))).flatten(-len(kept))
    fused = None if fused is None else fused._replace(bias=flat(fused.bias), mask=flat(fused.mask))
    to = None if keepdim else out
    y = run(operation, last, -1, dtype, False, to, backend, strategy, fused, batch_invariant)
    if not keepdim:
        return y
    y = y.reshape([1 if i in kept else size for i, size in enumerate(x.shape)])
    return y if out is None else _write(operation, y, out)


def _write(operation: str, y: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Copy y to `out`, which must fit it or be empty."""
    check_out(operation, (out.shape, out.stride(), out.dtype, out.device, True), y.shape, y.dtype, y.device)
    return (out if out.shape == y.shape else out.resize_(y.shape)).copy_(y)


def _place(operation: str, x: torch.Tensor, out: torch.Tensor, fused: Fused | None) -> Place:
    """Where `out` lies, once it is known to be writable beside what is read."""
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"{operation}(): argument 'out' must be Tensor, not {type(out).__name__}")
    if out.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{operation}(): out requires a gradient, and functions with out=... do not support that")
    same = (
        out.data_ptr() == x.data_ptr() and out.stride() == x.stride() and out.dtype == x.dtype and out.shape == x.shape
    )
    if not same and out.device == x.device and _ranges_overlap(x, out):
        raise RuntimeError(
            f"{operation}(): out overlaps input in memory without being the same tensor; clone() one of them"
        )
    for name, t in (("bias", fused.bias), ("mask", fused.mask)) if fused is not None else ():
        if t is not None and _ranges_overlap(t, out):
            raise RuntimeError(f"{operation}(): out overlaps {name} in memory; clone() one of them")
    return out.shape, out.stride(), out.dtype, out.device, aligned(out)


def _ranges_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    begin_a, begin_b = a.data_ptr(), b.data_ptr()
    return begin_a < begin_b + _extent(b) and begin_b < begin_a + _extent(a)


def _extent(t: torch.Tensor) -> int:
    """Bytes from the first element of t to the end of its last."""
    if t.is_contiguous():
        return t.numel() * t.itemsize
    return (sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1) * t.itemsize if t.numel() else 0
