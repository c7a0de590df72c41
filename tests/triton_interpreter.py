"""Triton's interpreter without the work that it repeats, which is more than half of the time of our kernels.

A kernel computes the same bits; tests/kernels/test_triton.py checks it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from math import copysign
from types import FunctionType, ModuleType
from typing import Any

from triton.language import core
from triton.runtime import interpreter

MOST_NUMBERS = 1000
"""Numbers that are kept as tensors."""

REPLACED: list[tuple[Any, str, Any]] = []
"""Object, attribute and original value of everything that `patch` replaced."""


def patch() -> None:
    """Replace the slow parts of the interpreter in this process, once."""
    if REPLACED:
        return
    if len(inspect.signature(interpreter._patch_builtin).parameters) != 3:
        # The interpreter of Triton 3.5 and earlier has other parts, and stays as it is.
        return
    # The interpreter computes sums of int32 a second time, to find overflows, and without `debug` ignores the finding.
    assert not interpreter.interpreter_builder.options.debug
    semantic = type(interpreter.interpreter_semantic)
    quick = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    for owner, name, new in (
        (interpreter.interpreter_builder, "options", quick),
        (interpreter, "_patch_lang", _patch_once_per_launch(interpreter._patch_lang)),
        (interpreter, "_patch_builtin", _patch_known_members(interpreter._patch_attr)),
        (interpreter, "_get_np_dtype", _look_up_by_name(interpreter._get_np_dtype)),
        (core, "_unwrap_if_constexpr", _unwrap_by_type(core._unwrap_if_constexpr)),
        (core.dtype, "__eq__", _compare_objects_first(core.dtype.__eq__)),
        (core.block_type, "__init__", _check_each_shape_once(core.block_type.__init__)),
        (core.tensor, "__init__", _make_tensor),
        (semantic, "binary_op_type_checking_impl", _pass_equal_types(semantic)),
    ):
        REPLACED.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)


def _patch_once_per_launch(patch_lang: Callable[[FunctionType], Any]) -> Callable[[FunctionType], Any]:
    """Let the interpreter replace the functions of triton.language once per launch.

    The interpreter replaces the functions of triton.language when a launch begins and restores them when it ends.  In
    between it does so again at every call of a device function, which is left out: the functions are those that the
    first module of the launch sees, unless another module sees more.
    """
    seen_by: dict[int, frozenset[int]] = {}
    replaced: set[int] = set()

    def modules_seen_by(function: FunctionType) -> frozenset[int]:
        key = id(function.__globals__)
        if key not in seen_by:
            values = function.__globals__.values()
            seen_by[key] = frozenset(id(value) for value in values if isinstance(value, ModuleType))
        return seen_by[key] & {id(core), id(interpreter.tl)}

    def patch_once(function: FunctionType) -> Any:
        seen = modules_seen_by(function)
        if seen and seen <= replaced:
            return None
        scope = patch_lang(function)
        if not replaced:
            # This call begins a launch, and restore() ends it.
            restore = scope.restore
            scope.restore = lambda: (replaced.clear(), restore())
        replaced.update(seen)
        return scope

    return patch_once


def _patch_known_members(patch_attr: Callable[..., None]) -> Callable[..., None]:
    """Search each module or class for functions to replace once per process, not once per launch."""
    found: dict[int, list[tuple[str, Any]]] = {}

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if id(package) not in found:
            found[id(package)] = [one for one in inspect.getmembers(package) if core.is_builtin(one[1])]
        for name, member in found[id(package)]:
            patch_attr(package, name, member, builder, scope)

    return patch_builtin


def _look_up_by_name(np_dtype_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Keep NumPy's dtype of each element type; the interpreter makes a table of all of them at each look-up."""
    known: dict[str, Any] = {}

    def look_up(dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, core.block_type) else dtype
        if element.name not in known:
            known[element.name] = np_dtype_of(element)
        return known[element.name]

    return look_up


def _unwrap_by_type(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return what is no constexpr and holds none without four calls of isinstance."""
    plain = {int, float, bool, str, type(None), core.tensor, core.dtype, core.block_type, core.pointer_type}

    def unwrap_by_type(value: Any) -> Any:
        kind = type(value)
        return value if kind in plain else value.value if kind is core.constexpr else unwrap(value)

    return unwrap_by_type


def _compare_objects_first(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda dtype, other: dtype is other or equal(dtype, other)


def _check_each_shape_once(init: Callable[..., None]) -> Callable[..., None]:
    """Check the shape of a block type, and make its name, once for each element type and shape."""
    known: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def init_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = (str(element_ty), *map(core._unwrap_if_constexpr, core._unwrap_if_constexpr(shape)))
        if key not in known:
            init(self, element_ty, shape)
            known[key] = (self.shape, self.numel, self.name, _shape_of_tensor(self.shape))
        self.element_ty = element_ty
        self.shape, self.numel, self.name, self.shape_of_tensor = known[key]

    return init_once


def _shape_of_tensor(sizes: Any) -> tuple[Any, Any]:
    """The attributes `shape` and `numel` of a tensor with these sizes."""
    count = 1
    for size in sizes:
        count *= size
    return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(count)


SCALAR = _shape_of_tensor(())


def _make_tensor(self: Any, handle: Any, type: Any) -> None:
    """The initializer of tl.tensor: tensors of the same type share their shape."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.shape_of_tensor if type.is_block() else SCALAR


def _pass_equal_types(semantic: Any) -> Callable[..., Any]:
    """Convert nothing where two tensors have one dtype, and broadcast nothing where they have one shape.

    A number beside a tensor becomes a tensor of its shape once.  No operation writes to its operands.
    """
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    known: dict[tuple[Any, ...], Any] = {}

    def pass_equal_types(self: Any, lhs: Any, rhs: Any, *flags: bool) -> Any:
        # Only divisions, which convert 16-bit numbers, give four flags.
        if type(lhs) is not core.tensor or len(flags) > 3:
            return check(self, lhs, rhs, *flags)
        if type(rhs) is core.tensor:
            if lhs.dtype is not rhs.dtype or lhs.dtype.is_ptr():
                return check(self, lhs, rhs, *flags)
            # Tensors of the same type share their shape.
            return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)
        kind = type(rhs)
        if kind not in (int, float):
            return check(self, lhs, rhs, *flags)
        # -0.0 equals 0.0.
        key = kind, rhs, copysign(1, rhs), lhs.dtype.name, id(lhs.shape), flags
        if key not in known:
            converted, number = check(self, lhs, rhs, *flags)
            if converted is not lhs:
                return converted, number
            if len(known) > MOST_NUMBERS:
                known.clear()
            known[key] = number
        return lhs, known[key]

    return pass_equal_types
