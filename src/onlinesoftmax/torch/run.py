"""Which way a call on torch tensors goes: PyTorch's operation, our kernel, or our kernel with derivatives.

loss_run.py has what is special about the operations with a target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import torch

from ..core.arguments import checked_dim
from ..core.arrays import advice
from ..core.call import Call, Settings
from ..core.declaration import Operation
from ..core.options import ScoreOptions
from ..core.task import ANY, Choice
from ..ops import OPERATIONS
from ..planner.plan import PlanError
from . import autograd, eager, formulas, gradients, reasons
from .arguments import (
    TORCH,
    autocasts,
    check_options,
    check_out_memory,
    check_out_shape,
    checked_out,
    extent,
    reduced_shape,
)
from .fast_path import PREPARED_CALLS, Tensor, are_constant, is_recorded, is_transformed, keep, look_up
from .loss_run import check_targets, check_tokens, run_loss, run_tokens
from .prepare import run as run_kernel

__all__ = ["check_targets", "check_tokens", "run", "run_loss", "run_plain", "run_tokens"]


def run_plain(
    operation: Operation, x: torch.Tensor, dim: Any, keepdim: bool, out: Any, choice: tuple[Any, ...]
) -> torch.Tensor:
    """Run a call without score options, dtype and batch invariance, with little host time."""
    if type(x) is Tensor:
        if x.is_cpu and out is None and choice == ANY and (operation.per_row or not isinstance(dim, (tuple, list))):
            try:
                return eager.call_plain(operation, x, dim, keepdim)
            except NotImplementedError as error:
                raise _not_floating(operation, x, error) from None
            except (TypeError, ValueError, RuntimeError):
                _check_dims_fit(operation, x, dim)
                raise
        if type(dim) is int:
            # The fields of Settings as a tuple, which is found as the record in `run` is.
            arguments = operation, (dim, None, keepdim, choice, None), None
            _, prepared_call = look_up(arguments, x) if out is None else look_up(arguments, x, out)
            if prepared_call is not None:
                found: torch.Tensor = prepared_call(x, out)
                return found
    return run(Call(operation, x, Settings(dim, None, keepdim, Choice(*choice)), None, out))


def _check_dims_fit(operation: Operation, x: torch.Tensor, dim: Any) -> None:
    """Raise an error for a dimension that int64 does not hold: PyTorch's own names no argument."""
    for one in dim if isinstance(dim, (tuple, list)) else (dim,):
        if isinstance(one, int) and not -(2**63) <= one < 2**63:
            checked_dim(operation.name, one, x.dim())


def _not_floating(operation: Operation, x: torch.Tensor, error: NotImplementedError) -> NotImplementedError:
    """The error for an input that is not floating point; or PyTorch's own, which names its kernel and no argument."""
    if x.is_floating_point() or x.is_complex():
        return error
    return NotImplementedError(f"{operation}(): input of dtype {x.dtype} is not floating point; pass dtype=")


def _checked(run: Callable[..., Any], call: Call) -> Callable[..., Any]:
    """The function `run`, which first checks that writing `out` does not change elements that are still to be read."""
    if call.out is None:
        return run
    name, options, out_bytes, x_bytes = call.operation.name, call.options, extent(call.out), extent(call.x)

    def checked(x: torch.Tensor, out: torch.Tensor) -> Any:
        # The memory of `out` and of x overlaps: only some overlaps are allowed.
        if -out_bytes < out.data_ptr() - x.data_ptr() < x_bytes:
            check_out_memory(name, x, options, out)
        return run(x, out)

    return checked


def run(call: Call) -> torch.Tensor:
    """Run one call on a torch tensor, for every function in api.py."""
    operation, x, settings, options, out = call.operation, call.x, call.settings, call.options, call.out
    dim, dtype, backend, strategy = settings.dim, settings.dtype, settings.choice.backend, settings.choice.strategy
    key: tuple[Any, ...] = ()
    if _is_cacheable(call):
        key, prepared_call = look_up((operation, settings, options), x, *(() if out is None else (out,)))
        if prepared_call is not None:
            found: torch.Tensor = prepared_call(x, out)
            return found
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"{operation}(): argument 'input' (position 1) must be Tensor, not {type(x).__name__}{advice(type(x))}"
        )
    if x.is_complex() and dtype is not None and not dtype.is_complex:
        raise NotImplementedError(f"{operation}(): input of dtype {x.dtype} is complex; pass its real part")
    if out is not None:
        TORCH.check_array(f"{operation}()", "out", out)
        TORCH.check_place(f"{operation}()", "out", out, x)
    if out is not None and _requires_grad(x, options):
        _refuse_out(operation)
    if options is not None:
        check_options(call)
    if isinstance(dim, (tuple, list)) and not (operation.per_row and operation.runs_on("eager")):
        return _over_dims(call)
    # On a CPU, and where our kernels cannot be used, PyTorch's own operations are the plan: eager/row.
    by_default = backend is None and reasons.why_not_by_default(x) is not None
    if (by_default or backend == "eager") and strategy in (None, "row"):
        _check_dims_fit(operation, x, dim)
        y = _by_pytorch(call)
        if key and out is None:
            keep(PREPARED_CALLS, key, _prepared_by_pytorch(operation, settings, options))
        return y
    if reason := reasons.why_not_kernels(x, dtype):
        if backend is None and strategy is None:
            return _by_pytorch(call)
        raise PlanError(f"{operation}() with backend={backend!r}, strategy={strategy!r}: {reason}")
    if isinstance(dim, (tuple, list)):
        return _over_dims(call)
    if key:
        if out is not None:
            check_out_memory(operation.name, x, options, out)
        prepared: Callable[..., torch.Tensor] = _checked(autograd.prepared_call(call), call)
        return keep(PREPARED_CALLS, key, prepared)(x, out)
    return _by_kernel(with_autocast(call))


def _is_cacheable(call: Call) -> bool:
    """True where the arguments that are no tensors can be part of a key, and the prepared call has no other tensors."""
    settings = call.settings
    one_way = type(settings.dim) is int and settings.dtype is None and not settings.choice.batch_invariant
    return one_way and are_constant(call.options)


def _by_kernel(call: Call) -> torch.Tensor:
    """Run a checked call by our kernels: as a custom operator in a trace, with autograd, or directly."""
    operation, x, settings, out = call.operation, call.x, call.settings, call.out
    if _is_traced(x):
        from . import custom_op

        dim = checked_dim(operation.name, settings.dim, x.dim())
        y = custom_op.forward(call.with_settings(dim=dim))
        return y if out is None else _write(operation, y, out)
    if _wants_derivatives(x, call.options):
        if out is not None:
            _refuse_out(operation)
        return autograd.apply(call)
    if out is not None:
        check_out_memory(operation.name, x, call.options, out)
    if settings.choice.batch_invariant:
        (y,) = gradients.outputs_of(Call(operation, x, settings, call.options), (operation.result.name,))
        return y if out is None else _write(operation, y, out)
    found: torch.Tensor = run_kernel(call)
    return found


for _operation in OPERATIONS.values():
    # The first read of a cached property takes a lock in Python 3.11, and torch.compile cannot trace a lock.
    for _name in ("per_row", "result", "always", "kept_outputs", "row_operands", "call_outputs", "numbers"):
        getattr(_operation, _name)


def _is_traced(x: torch.Tensor) -> bool:
    return torch.compiler.is_compiling() or type(x) not in formulas.PLAIN_TYPES or is_recorded()


def _wants_derivatives(x: torch.Tensor, options: ScoreOptions | None) -> bool:
    if _requires_grad(x, options):
        return True
    return is_transformed()


def _requires_grad(x: torch.Tensor, options: ScoreOptions | None) -> bool:
    if not torch.is_grad_enabled():
        return False
    if x.requires_grad or options is None:
        return x.requires_grad
    return any(isinstance(t, torch.Tensor) and t.requires_grad for t in (options.scale, options.bias))


def _refuse_out(operation: Operation) -> NoReturn:
    """Raise PyTorch's error for `out` in a call whose derivatives are wanted."""
    raise RuntimeError(f"{operation}(): functions with out=... do not support gradients, and one is needed")


def _by_pytorch(call: Call) -> torch.Tensor:
    """Run a call by PyTorch's operations."""
    operation, x, settings, options, out = call.operation, call.x, call.settings, call.options, call.out
    if out is not None:
        _check_out_of_pytorch(call)
    if options is None and not settings.choice.batch_invariant:
        try:
            y = eager.call(operation, x, settings, out)
        except NotImplementedError as error:
            raise _not_floating(operation, x, error) from None
        return y if out is None or y is out else _write(operation, y, out)
    if not x.is_floating_point() and settings.dtype is None:
        raise NotImplementedError(f"{operation}(): input of dtype {x.dtype} is not floating point; pass dtype=")
    if settings.dtype is not None and not settings.dtype.is_floating_point:
        raise NotImplementedError(f"{operation}(): dtype {settings.dtype} is not floating point")
    if out is not None and _wants_derivatives(x, options):
        _refuse_out(operation)
    y = eager.call_on_scores(with_autocast(call))
    return y if out is None else _write(operation, y, out)


def _prepared_by_pytorch(
    operation: Operation, settings: Settings, options: ScoreOptions | None
) -> Callable[[torch.Tensor, None], torch.Tensor]:
    """The function (x, None) that runs PyTorch's operations for calls that `_by_pytorch` has checked."""
    if options is None:
        return lambda x, _: eager.call(operation, x, settings, None)
    return lambda x, _: eager.call_on_scores(Call(operation, x, settings, options))


def _check_out_of_pytorch(call: Call) -> None:
    """Check `out` where PyTorch's operations would resize it, or write it while they read the input."""
    operation, x, settings, out = call.operation, call.x, call.settings, call.out
    if type(x) not in formulas.PLAIN_TYPES or x.layout != torch.strided or x.is_meta or torch.compiler.is_compiling():
        return
    check_out_memory(operation.name, x, call.options, out)
    shape, dims = tuple(x.shape), settings.dim if isinstance(settings.dim, (tuple, list)) else (settings.dim,)
    if operation.per_row:
        shape = reduced_shape(shape, [checked_dim(operation.name, dim, x.dim()) for dim in dims], settings.keepdim)
    if dims:
        check_out_shape(operation.name, out, shape)


def with_autocast(call: Call) -> Call:
    """The call with the dtype that autocast gives its result."""
    x, settings = call.x, call.settings
    if settings.dtype is not None or not autocasts(x):
        return call
    find = _autocast_dtype if _is_traced(x) else _known_autocast_dtype
    return call.with_settings(dtype=find(call.operation, x.dtype, x.device.type))


def _autocast_dtype(operation: Operation, dtype: torch.dtype, device_type: str) -> torch.dtype:
    """The dtype of this operation's result under autocast, found by running PyTorch's operation on one element."""
    if not operation.runs_on("eager"):
        return dtype
    element = torch.zeros(1, dtype=dtype, device=device_type)
    return formulas.by_pytorch(operation.name, element, 0).dtype


def _known_autocast_dtype(operation: Operation, dtype: torch.dtype, device_type: str) -> torch.dtype:
    """`_autocast_dtype`, cached for each dtype of autocast."""
    return _autocast_once(operation, dtype, device_type, torch.get_autocast_dtype(device_type))


@lru_cache
def _autocast_once(operation: Operation, dtype: torch.dtype, device_type: str, _autocast: torch.dtype) -> torch.dtype:
    return _autocast_dtype(operation, dtype, device_type)


def _over_dims(call: Call) -> torch.Tensor:
    """Run a call over several dimensions, joined into one; without a copy where the strides of the input allow it."""
    operation, x, settings, options, out = call.operation, call.x, call.settings, call.options, call.out
    dims = sorted({checked_dim(operation.name, dim, x.dim()) for dim in settings.dim})
    if len(dims) < len(settings.dim):
        raise RuntimeError(f"{operation}(): dim {tuple(settings.dim)} names a dimension twice")
    if not x.dim():
        return run(call.with_settings(dim=0))
    # `dim=()` means all dimensions, as in PyTorch.
    dims = dims or list(range(x.dim()))
    at = dims[0] if dims[-1] - dims[0] < len(dims) else x.dim() - len(dims)
    if not settings.choice.batch_invariant and not x.is_contiguous():
        # A batch of images whose channels are neighbours is joined without a copy in this order.
        dims.sort(key=lambda dim: -x.stride(dim))
    if options is not None:
        options = options.mapped(lambda _, t: eager.joined(_whole_along(t, x, dims), dims, at))
    if out is not None and _wants_derivatives(x, options):
        _refuse_out(operation)
    to = None if out is None else _joined_out(call, dims, at)
    y = run(Call(operation, eager.joined(x, dims, at), settings._replace(dim=at, keepdim=False), options, to))
    if to is not None:
        assert out is not None
        return out
    if not operation.per_row:
        y = y.unflatten(at, [x.shape[dim] for dim in dims]).movedim(tuple(range(at, at + len(dims))), tuple(dims))
    elif settings.keepdim:
        y = y.reshape(reduced_shape(x.shape, dims, True))
    return y if out is None else _write(operation, y, out)


def _whole_along(t: torch.Tensor, x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """A tensor that broadcasts to x with as many dimensions; as long as x along `dims`, unless it has size 1 there."""
    t = t[(None,) * (x.dim() - t.dim())]
    if all(t.shape[dim] == 1 for dim in dims):
        return t
    return t.expand([x.shape[i] if i in dims else size for i, size in enumerate(t.shape)])


def _joined_out(call: Call, dims: Sequence[int], at: int) -> torch.Tensor | None:
    """The memory of `out` in the shape of the result over the joined dimension; None where no view has this shape."""
    out, operation = call.out, call.operation
    if operation.per_row:
        return None if call.settings.keepdim else out
    if out.shape != call.x.shape or not out.numel() or torch.compiler.is_compiling():
        return None
    joined = eager.joined(out, dims, at)
    return joined if joined.data_ptr() == out.data_ptr() else None


def _write(operation: Operation, y: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Copy y to `out`, which must fit it or be empty."""
    checked_out(operation.name, out, y.shape, y.dtype, y.device)
    return (out if out.shape == y.shape else out.resize_(y.shape)).copy_(y)
