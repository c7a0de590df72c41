"""From torch tensors to launches: the view as rows, the plan and the kernels, all found once for a shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..core.device import known
from ..core.layout import Layout, contiguous_strides, rows_of, strides_of_rows
from ..core.operations import OPERATIONS
from ..core.options import Fused, bits, query_axis
from ..core.problem import ITEMSIZE, Problem
from ..kernels import registry
from ..kernels.request import Request
from ..planner import measured as tuning
from ..planner.plan import Plan, plan
from . import eager
from .device import from_torch

DTYPE_NAMES = {getattr(torch, name): name for name in ITEMSIZE}

Place = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, bool]
"""Where an output lies: shape, strides, dtype, device, and whether it begins on 16 bytes."""

Side = tuple[str, tuple[int, ...], torch.dtype, bool, int]
"""A tensor beside the input: name, strides for the input's shape, dtype, whether it begins on 16 bytes, its bytes."""


class Options(NamedTuple):
    """What a call asks for beside its tensors.

    Attributes:
        softcap, causal, zero: As in Fused; of the softcap only whether there is one.
        scale: "number", the dtype of a tensor, or None.
        batch_invariant: Whether a row's bits must not depend on the rows beside it.
        backend, strategy: What is forced.
    """

    softcap: bool = False
    causal: bool = False
    zero: bool = False
    scale: torch.dtype | str | None = None
    batch_invariant: bool = False
    backend: str | None = None
    strategy: str | None = None


PLAIN = Options()


def aligned(t: torch.Tensor) -> bool:
    """Whether a tensor begins on 16 bytes."""
    return t.data_ptr() % 16 == 0


def options_of(fused: Fused | None, batch_invariant: bool, backend: str | None, strategy: str | None) -> Options:
    """The part of a call that its plan depends on."""
    if fused is None:
        if backend is None and strategy is None and not batch_invariant:
            return PLAIN
        return Options(batch_invariant=batch_invariant, backend=backend, strategy=strategy)
    scale = fused.scale
    kind = scale.dtype if isinstance(scale, torch.Tensor) else None if scale == 1 else "number"
    return Options(fused.softcap is not None, fused.causal, fused.zero, kind, batch_invariant, backend, strategy)


def beside(name: str, t: torch.Tensor, shape: torch.Size) -> Side:
    """What a plan depends on of a tensor that is read beside the input, broadcast to its shape."""
    strides = t.stride() if t.shape == shape else t.expand(shape).stride()
    return name, strides, t.dtype, aligned(t), t.numel() * t.itemsize


def sides_of(fused: Fused | None, shape: torch.Size) -> tuple[Side, ...]:
    """The same of the bias and the mask of a Fused."""
    if fused is None:
        return ()
    named = (("bias", fused.bias), ("mask", fused.mask))
    return tuple(beside(name, t, shape) for name, t in named if t is not None)


def numbers_of(fused: Fused | None) -> dict[str, Any]:
    """The tensors and numbers of a Fused, by the names that kernels have for them."""
    if fused is None:
        return {}
    more = {name: t for name, t in (("bias", fused.bias), ("mask", fused.mask)) if t is not None}
    if isinstance(fused.scale, torch.Tensor):
        more["scale"] = fused.scale
    elif fused.scale != 1:
        more["scale"] = bits(fused.scale)
    if fused.softcap is not None:
        more["softcap"] = bits(fused.softcap)
    return more


@lru_cache(maxsize=4096)
def prepare(
    operation: str, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, device: torch.device,
    is_aligned: bool, dim: Any, out_dtype: torch.dtype | None, keepdim: bool, place: Place | None,
    options: Options = PLAIN, sides: tuple[Side, ...] = (),
) -> Callable[..., torch.Tensor]:  # fmt: skip
    """Everything that shapes, strides and dtypes tell, found once: what remains is the call(x, out, **more)."""
    axis = checked_dim(operation, dim, len(shape))
    out_dtype = out_dtype or dtype
    out_shape = _out_shape(operation, shape, axis, keepdim)
    if place is not None:
        check_out(operation, place, out_shape, out_dtype, device)
    if shape.numel() == 0:
        if OPERATIONS[operation].backward:
            return lambda x, out, **_: torch.empty(out_shape, dtype=out_dtype, device=device)
        return lambda x, out, **_: eager.torch_call(operation, x, axis, out_dtype, keepdim, out)
    resize = place is not None and place[0] != out_shape
    y_strides = place[1] if place is not None and not resize else contiguous_strides(out_shape)
    layout = layout_for(operation, shape, strides, axis, keepdim, y_strides, sides, options)
    is_aligned = is_aligned and (place is None or resize or place[4])
    is_aligned = is_aligned and all(ok for name, _, _, ok, _ in sides if name == "dy")
    the_plan = make_plan(operation, layout, dtype, out_dtype, device, is_aligned, options, sides)
    if the_plan.backend == "eager":
        return lambda x, out: eager.torch_call(operation, x, axis, out_dtype, keepdim, out)
    diagonal = shape[axis] - shape[query_axis(operation, axis, len(shape))] + 1 if options.causal else None
    dtypes = {"x": dtype, "y": out_dtype} | {name: kind for name, _, kind, _, _ in sides}
    if isinstance(options.scale, torch.dtype):
        dtypes["scale"] = options.scale
    request = Request(
        operation, the_plan, layout, {name: str(kind).removeprefix("torch.") for name, kind in dtypes.items()},
        frozenset(("x", "y") if is_aligned else ()) | {name for name, _, _, ok, _ in sides if ok},
        options.scale is not None, options.softcap, diagonal, options.zero,
    )  # fmt: skip
    launch = registry.load(the_plan.backend).prepare(request)

    on_gpu, index = device.type == "cuda", device.index
    like_input = (out_shape, out_dtype) == (shape, dtype) and strides == contiguous_strides(shape)

    def call(x: torch.Tensor, out: torch.Tensor | None, **more: Any) -> torch.Tensor:
        if out is None:
            # empty_like, where it gives the same, costs half of what empty does.
            out = torch.empty_like(x) if like_input else torch.empty(out_shape, dtype=out_dtype, device=device)
        elif resize:
            out.resize_(out_shape)
        if on_gpu and torch._C._cuda_getDevice() != index:
            with torch.cuda.device(device):
                launch(x, out, more)
        else:
            launch(x, out, more)
        return out

    return call


def make_plan(
    operation: str, layout: Layout, dtype: torch.dtype, out_dtype: torch.dtype, device: torch.device,
    is_aligned: bool, options: Options = PLAIN, sides: tuple[Side, ...] = (),
) -> Plan:  # fmt: skip
    """The plan for a layout on a torch device."""
    problem = Problem(
        operation, layout.rows, layout.cols, DTYPE_NAMES[dtype], DTYPE_NAMES[out_dtype],
        contiguous=layout.x_col == 1, adjacent=layout.adjacent, unit=layout.unit if is_aligned else 1,
        # Where a row is cut depends on where it lies, and the order of its sum on where it is cut.
        peelable=is_aligned and layout.congruent and not options.batch_invariant,
        more_bytes=sum(size for name, _, _, _, size in sides if name in ("bias", "mask")),
        bias_bytes=sum(kind.itemsize for name, _, kind, _, _ in sides if name == "bias"),
        masked=any(name == "mask" for name, *_ in sides),
        fused=bool(options.softcap or options.causal or options.scale or any(s[0] in ("bias", "mask") for s in sides)),
    )  # fmt: skip
    backend, strategy, missing = options.backend, options.strategy, registry.missing()
    machine = from_torch(device.type, device.index or 0)
    if machine.kind == "cpu" and backend == "triton" and registry.load("triton").interpreted():
        # The interpreter needs some GPU's numbers to plan with.
        machine = known("h200")
    if OPERATIONS[operation].backward or sides or options[:5] != PLAIN[:5]:
        # For those who want it all the same, dispatch calls eager itself.
        missing = (*missing, ("eager", "PyTorch's own operations have no kernel for this"))
    return plan(problem, machine, backend, strategy, missing, options.batch_invariant, tuning.table_for(machine))


def layout_for(
    operation: str, shape: tuple[int, ...], strides: tuple[int, ...], axis: int, keepdim: bool,
    y_strides: tuple[int, ...], sides: tuple[Side, ...] = (), options: Options = PLAIN,
) -> Layout:  # fmt: skip
    """The rows of an input, of its output, whose strides are those of the output's own shape, and of what is beside."""
    more = {name: side for name, side, _, _, _ in sides}
    if options.causal:
        queries = query_axis(operation, axis, len(shape))
        more["query"] = tuple(int(i == queries) for i in range(len(shape)))
    if not shape:
        shape, strides = (1,), (1,)
        y_strides = (0,) if OPERATIONS[operation].per_row else (1,)
        more = dict.fromkeys(more, (0,))
    elif OPERATIONS[operation].per_row:
        y_strides = strides_of_rows(y_strides, axis, keepdim)
    layout = rows_of(tuple(shape), axis, strides, y_strides, more)
    if options.batch_invariant and layout.rows == 1:
        # A single row has no stride, which would let it be read wider than one of many.
        step = (layout.cols,)
        layout = replace(
            layout, x_strides=step, y_strides=step if layout.y_col else (1,),
            more=tuple((name, step if col else (1,), col) for name, _, col in layout.more),
        )  # fmt: skip
    return layout


def checked_dim(operation: str, dim: Any, ndim: int) -> int:
    """`dim` counted from 0.

    Raises:
        TypeError, IndexError: it is no int, or out of range.
    """
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"{operation}(): argument 'dim' (position 2) must be int, not {type(dim).__name__}")
    ndim = max(ndim, 1)
    if not -ndim <= dim < ndim:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], but got {dim})")
    return dim % ndim


def _out_shape(operation: str, shape: torch.Size, axis: int, keepdim: bool) -> torch.Size:
    if not OPERATIONS[operation].per_row or not shape:
        return shape
    return torch.Size((*shape[:axis], *((1,) if keepdim else ()), *shape[axis + 1 :]))


def check_out(operation: str, place: Place, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
    """Raise PyTorch's errors where an output does not fit its place."""
    out_shape, out_strides, out_dtype, out_device, _ = place
    if any(stride == 0 and size > 1 for size, stride in zip(out_shape, out_strides, strict=True)):
        raise RuntimeError(f"{operation}(): out has several elements at one memory location; clone() it first")
    if out_dtype != dtype:
        raise RuntimeError(f"{operation}(): Expected out tensor to have dtype {dtype}, but got {out_dtype} instead")
    if out_device != device:
        raise RuntimeError(f"{operation}(): out is on {out_device}, and input on {device}")
    if out_shape != shape and out_shape.numel():
        raise RuntimeError(f"{operation}(): out has shape {tuple(out_shape)}, and the result has {tuple(shape)}")
