"""From a torch tensor to a launch: validation, the view as rows, the plan, all done once for a shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from . import device as devices
from . import registry
from .backends import eager
from .layout import Layout, contiguous_strides, rows_of, strides_of_rows
from .operation import OPERATIONS
from .plan import Plan, PlanError, plan
from .problem import ITEMSIZE, Problem

DTYPE_NAMES = {getattr(torch, name): name for name in ITEMSIZE}


def run(
    operation: str, x: torch.Tensor, dim: Any, dtype: torch.dtype | None, keepdim: bool,
    out: torch.Tensor | None, backend: str | None, strategy: str | None,
) -> torch.Tensor:  # fmt: skip
    """One operation on a torch tensor: the implementation of every function in api.py."""
    if type(x) is torch.Tensor and x.is_cpu and backend is None and strategy is None:
        # First, and at once to PyTorch: on a CPU a microsecond of ours shows.
        return eager.torch_call(operation, x, dim, dtype, keepdim, out)
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{operation}(): argument 'input' (position 1) must be Tensor, not {type(x).__name__}")
    if (backend is None and strategy is None and not x.is_cuda) or (backend == "eager" and strategy in (None, "row")):
        return eager.torch_call(operation, x, dim, dtype, keepdim, out)
    if reason := _not_for_kernels(x, dtype):
        if backend is None and strategy is None:
            return eager.torch_call(operation, x, dim, dtype, keepdim, out)
        raise PlanError(f"{operation}() with backend={backend!r}, strategy={strategy!r}: {reason}")
    if dtype is None and torch.is_autocast_enabled(x.device.type):
        dtype = _autocast_dtype(operation, x.dtype, x.device.type, torch.get_autocast_dtype(x.device.type))
    if isinstance(dim, tuple | list):
        return _over_dims(operation, x, tuple(dim), dtype, keepdim, out, backend, strategy)
    place = None if out is None else _place(operation, x, out)
    prepared = _prepare(
        operation, x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0,
        dim, dtype, keepdim, place, backend, strategy,
    )  # fmt: skip
    return prepared(x, out)


@lru_cache
def _autocast_dtype(operation: str, dtype: torch.dtype, device_type: str, autocast: torch.dtype) -> torch.dtype:
    """What PyTorch's lists make of this operation on this dtype: PyTorch is asked, once."""
    result: torch.dtype = getattr(torch, operation)(torch.zeros(1, dtype=dtype, device=device_type), 0).dtype
    return result


def _not_for_kernels(x: torch.Tensor, dtype: torch.dtype | None) -> str | None:
    """Why only PyTorch's own operations can take this tensor; None when our kernels can."""
    if x.requires_grad and torch.is_grad_enabled():
        return "input requires a gradient, and the kernels have none yet"
    if x.dtype not in DTYPE_NAMES or (dtype is not None and dtype not in DTYPE_NAMES):
        return f"dtype must be one of {', '.join(ITEMSIZE)}, got {x.dtype if dtype is None else dtype}"
    if torch.compiler.is_compiling():
        return "torch.compile is tracing, and the kernels are no custom operators yet"
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.layout != torch.strided:
        return f"input is a {type(x).__name__} of layout {x.layout}, not a plain strided tensor"
    if torch._C._are_functorch_transforms_active():
        return "torch.func is transforming the call, and the kernels have no rules for that yet"
    if x.is_neg():
        return "input is a lazily negated view; call resolve_neg() first"
    return None


def _over_dims(
    operation: str, x: torch.Tensor, dims: tuple[int, ...], dtype: Any, keepdim: bool, out: Any,
    backend: Any, strategy: Any,
) -> torch.Tensor:  # fmt: skip
    """Logsumexp over several dimensions: flattened into one, a view where the strides allow it."""
    if operation != "logsumexp":
        raise TypeError(f"{operation}(): argument 'dim' (position 2) must be int, not {type(dims).__name__}")
    if not dims or x.dim() == 0:
        return eager.torch_call(operation, x, dims, dtype, keepdim, out)
    kept = sorted({_checked_dim(operation, dim, x.dim()) for dim in dims})
    if len(kept) < len(dims):
        raise RuntimeError(f"{operation}(): dim {dims} names a dimension twice")
    last = x.movedim(kept, tuple(range(-len(kept), 0))).flatten(-len(kept))
    y = run(operation, last, -1, dtype, False, None if keepdim else out, backend, strategy)
    if not keepdim:
        return y
    y = y.reshape([1 if i in kept else size for i, size in enumerate(x.shape)])
    return y if out is None else out.copy_(y)


def _checked_dim(operation: str, dim: Any, ndim: int) -> int:
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"{operation}(): argument 'dim' (position 2) must be int, not {type(dim).__name__}")
    ndim = max(ndim, 1)
    if not -ndim <= dim < ndim:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], but got {dim})")
    return dim % ndim


def bare_launch(operation: str, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    """The compiled kernel alone, as our layers launch it: what their own host time is measured against."""
    run(operation, x, -1, None, False, y, "triton", "row")
    layout = layout_for(operation, x.shape, x.stride(), x.dim() - 1, False, y.stride())
    aligned = x.data_ptr() % 16 == 0 and y.data_ptr() % 16 == 0
    the_plan = make_plan(operation, layout, x.dtype, y.dtype, x.device, aligned, "triton", "row")
    launch = registry.load("triton").prepare(operation, the_plan, layout, DTYPE_NAMES[x.dtype], DTYPE_NAMES[y.dtype])
    launch(x, y)
    return lambda: launch(x, y)


Place = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, bool]


def _place(operation: str, x: torch.Tensor, out: torch.Tensor) -> Place:
    """Where `out` lies, once it is known to be writable beside x."""
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
    return out.shape, out.stride(), out.dtype, out.device, out.data_ptr() % 16 == 0


def _ranges_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    begin_a, begin_b = a.data_ptr(), b.data_ptr()
    return begin_a < begin_b + _extent(b) and begin_b < begin_a + _extent(a)


def _extent(t: torch.Tensor) -> int:
    """Bytes from the first element of t to the end of its last."""
    if t.is_contiguous():
        return t.numel() * t.itemsize
    return (sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1) * t.itemsize if t.numel() else 0


@lru_cache(maxsize=4096)
def _prepare(
    operation: str, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, device: torch.device,
    aligned: bool, dim: Any, out_dtype: torch.dtype | None, keepdim: bool, place: Place | None,
    backend: str | None, strategy: str | None,
) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:  # fmt: skip
    """Everything that can be known from shapes, strides and dtypes, done once: the call that remains."""
    axis = _checked_dim(operation, dim, len(shape))
    out_dtype = out_dtype or dtype
    out_shape = _out_shape(operation, shape, axis, keepdim)
    if place is not None:
        _check_out(operation, place, out_shape, out_dtype, device)
    if shape.numel() == 0:
        return lambda x, out: eager.torch_call(operation, x, axis, out_dtype, keepdim, out)
    resize = place is not None and place[0] != out_shape
    y_strides = place[1] if place is not None and not resize else contiguous_strides(out_shape)
    layout = layout_for(operation, shape, strides, axis, keepdim, y_strides)
    aligned = aligned and (place is None or resize or place[4])
    the_plan = make_plan(operation, layout, dtype, out_dtype, device, aligned, backend, strategy)
    if the_plan.backend == "eager":
        return lambda x, out: eager.torch_call(operation, x, axis, out_dtype, keepdim, out)
    launch = registry.load(the_plan.backend).prepare(
        operation, the_plan, layout, DTYPE_NAMES[dtype], DTYPE_NAMES[out_dtype]
    )

    on_gpu, index = device.type == "cuda", device.index
    like_input = (out_shape, out_dtype) == (shape, dtype) and strides == contiguous_strides(shape)

    def call(x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        if out is None:
            # empty_like, where it gives the same, costs half of what empty does.
            out = torch.empty_like(x) if like_input else torch.empty(out_shape, dtype=out_dtype, device=device)
        elif resize:
            out.resize_(out_shape)
        if on_gpu and torch._C._cuda_getDevice() != index:
            with torch.cuda.device(device):
                launch(x, out)
        else:
            launch(x, out)
        return out

    return call


def make_plan(
    operation: str, layout: Layout, dtype: torch.dtype, out_dtype: torch.dtype, device: torch.device,
    aligned: bool, backend: str | None, strategy: str | None,
) -> Plan:  # fmt: skip
    """The plan for a layout on a torch device."""
    problem = Problem(
        operation, layout.rows, layout.cols, DTYPE_NAMES[dtype], DTYPE_NAMES[out_dtype],
        contiguous=layout.x_col == 1, adjacent=layout.adjacent, unit=layout.unit if aligned else 1,
        peelable=aligned and layout.congruent,
    )  # fmt: skip
    machine = devices.from_torch(device.type, device.index or 0)
    if machine.kind == "cpu" and backend == "triton" and registry.load("triton").interpreted():
        # The interpreter needs some GPU's numbers to plan with.
        machine = devices.KNOWN["h200"]
    return plan(problem, machine, backend, strategy, registry.missing())


def layout_for(
    operation: str, shape: tuple[int, ...], strides: tuple[int, ...], axis: int, keepdim: bool,
    y_strides: tuple[int, ...],
) -> Layout:  # fmt: skip
    """The rows of an input and of its output, whose strides are those of the output's own shape."""
    if not shape:
        shape, strides = (1,), (1,)
        y_strides = (0,) if OPERATIONS[operation].per_row else (1,)
    elif OPERATIONS[operation].per_row:
        y_strides = strides_of_rows(y_strides, axis, keepdim)
    return rows_of(tuple(shape), axis, strides, y_strides)


def _out_shape(operation: str, shape: torch.Size, axis: int, keepdim: bool) -> torch.Size:
    if not OPERATIONS[operation].per_row or not shape:
        return shape
    return torch.Size((*shape[:axis], *((1,) if keepdim else ()), *shape[axis + 1 :]))


def _check_out(operation: str, place: Place, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
    out_shape, out_strides, out_dtype, out_device, _ = place
    if any(stride == 0 and size > 1 for size, stride in zip(out_shape, out_strides, strict=True)):
        raise RuntimeError(f"{operation}(): out has several elements at one memory location; clone() it first")
    if out_dtype != dtype:
        raise RuntimeError(f"{operation}(): Expected out tensor to have dtype {dtype}, but got {out_dtype} instead")
    if out_device != device:
        raise RuntimeError(f"{operation}(): out is on {out_device}, and input on {device}")
    if out_shape != shape and out_shape.numel():
        raise RuntimeError(f"{operation}(): out has shape {tuple(out_shape)}, and the result has {tuple(shape)}")
