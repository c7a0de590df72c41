"""Triton's interpreter without the work that it repeats, which is more than half of the time of our kernels.

A kernel computes the same bits; tests/kernels/test_triton.py checks it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from types import FunctionType, ModuleType
from typing import Any

from triton.language import core
from triton.runtime import interpreter

MOST_CALLS = 1000
"""Types and numbers of calls that are kept for one function of triton.language."""

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
    quick = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    for owner, name, new in (
        (interpreter.interpreter_builder, "options", quick),
        (interpreter, "_patch_lang", _patch_once_per_launch(interpreter._patch_lang)),
        (interpreter, "_patch_builtin", _patch_known_members()),
        (interpreter, "_get_np_dtype", _look_up_by_name(interpreter._get_np_dtype)),
        (core, "_unwrap_if_constexpr", _unwrap_by_type(core._unwrap_if_constexpr)),
        (core.dtype, "__eq__", _compare_objects_first(core.dtype.__eq__)),
        (core.block_type, "__init__", _check_each_shape_once(core.block_type.__init__)),
        (core.tensor, "__init__", _make_tensor),
        (interpreter.TensorHandle, "__init__", _make_handle),
        (interpreter.InterpreterBuilder, "cast_impl", _cast_at_once(interpreter.InterpreterBuilder.cast_impl)),
        (type(interpreter.interpreter_semantic), "to_tensor", _pass_tensors(interpreter.interpreter_semantic)),
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
    called: set[FunctionType] = set()
    restores: list[Callable[[], None]] = []

    def restore_all() -> None:
        called.clear()
        replaced.clear()
        while restores:
            restores.pop()()

    def modules_seen_by(function: FunctionType) -> frozenset[int]:
        key = id(function.__globals__)
        if key not in seen_by:
            values = function.__globals__.values()
            seen_by[key] = frozenset(id(value) for value in values if isinstance(value, ModuleType))
        return seen_by[key] & {id(core), id(interpreter.tl)}

    def patch_once(function: FunctionType) -> Any:
        if function in called:
            return None
        called.add(function)
        seen = modules_seen_by(function)
        if seen and seen <= replaced:
            return None
        scope = patch_lang(function)
        restores.append(scope.restore)
        if not replaced:
            # This call begins a launch, and restore() ends it.
            scope.restore = restore_all
        replaced.update(seen)
        return scope

    return patch_once


def _patch_known_members() -> Callable[..., None]:
    """Search each module or class for functions to replace once per process, not once per launch."""
    found: dict[int, dict[str, Any]] = {}
    replays = cache(_replay_calls)

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if id(package) not in found:
            found[id(package)] = {name: one for name, one in inspect.getmembers(package) if core.is_builtin(one)}
        for name, member in found[id(package)].items():
            setattr(package, name, replays(member))
        scope._changes += [(package, *change) for change in found[id(package)].items()]

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


def _make_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    """The initializer of TensorHandle without its check of the dtype, which _Recorder makes once."""
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


def _cast_at_once(cast: Callable[..., Any]) -> Callable[..., Any]:
    """Let NumPy convert what it can convert without four comparisons of dtypes."""

    def cast_at_once(self: Any, src: Any, dst_type: Any) -> Any:
        to = dst_type.scalar
        if src.dtype.scalar.name == "bf16" or to.name == "bf16":
            return cast(self, src, dst_type)
        return interpreter.TensorHandle(src.data.astype(interpreter._get_np_dtype(to)), to)

    return cast_at_once


def _pass_tensors(semantic: Any) -> Callable[..., Any]:
    """Look first for a tensor: the interpreter converts the value of every assignment."""
    convert = type(semantic).to_tensor

    def to_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
        return x if type(x) is core.tensor else convert(self, x, check_type)

    return to_tensor


def _replay_calls(member: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function of triton.language choose its operations once for the types and numbers that it is given.

    The function checks types, converts and broadcasts tensors, and calls the builder, whose methods compute.  It looks
    at no element of a tensor, so a later call of the same types calls the same methods with other elements.
    """
    semantic, builder = interpreter.interpreter_semantic, interpreter.interpreter_builder
    known: dict[tuple[Any, ...], Steps | None] = {}

    def call(*args: Any, **named: Any) -> Any:
        named.pop("_semantic", None)
        if semantic.builder is not builder:
            # Within a call that is recorded.
            return member(*args, **named, _semantic=semantic)
        key: list[Any] = []
        handles: list[Any] = []
        for arg in (*args, *named.items()) if named else args:
            if type(arg) is core.tensor:
                # Each element type and shape has one tuple of sizes, and those without a shape share one.
                key += (id(arg.shape), arg.dtype.name)
                handles.append(arg.handle)
            else:
                key.append(_token(arg, handles))
        of_types = tuple(key)
        try:
            steps = known[of_types]
        except KeyError:
            if len(known) > MOST_CALLS:
                known.clear()
            # Steps that are recorded where a tensor is given twice would be wrong for two tensors.
            if None in key or len({*map(id, handles)}) < len(handles):
                return member(*args, **named, _semantic=semantic)
            recorder = semantic.builder = _Recorder(builder, handles)
            try:
                result = member(*args, **named, _semantic=semantic)
            finally:
                semantic.builder = builder
            known[of_types] = recorder.steps_to(result)
            return result
        return member(*args, **named, _semantic=semantic) if steps is None else steps.run(handles)

    return call


PLAIN = {int, bool, str, type(None), core.PropagateNan}


def _token(value: Any, handles: list[Any]) -> Any:
    """A key of a value that is no tensor, or None; the handles of tensors in the value are added to a list."""
    kind = type(value)
    if kind in PLAIN:
        return kind, value
    if kind is float:
        # -0.0 equals 0.0, and NaN is not itself.
        return kind, value.hex()
    if kind is core.tensor:
        handles.append(value.handle)
        return id(value.shape), value.dtype.name
    if kind is core.constexpr:
        token = _token(value.value, handles)
        return token and (kind, token)
    if isinstance(value, core.dtype):
        return core.dtype, value.name
    if kind is slice:
        return kind if value == slice(None) else None
    if kind in (tuple, list):
        tokens = tuple(_token(one, handles) for one in value)
        return None if None in tokens else (kind, tokens)
    return None


class Steps:
    """Calls of the builder's methods that make one tensor, or write.

    Attributes:
        calls: For each step a method, its arguments, and the places of those that are values, with the value's index.
        last: Index of the value that the tensor has; None where there is no tensor.
        type: The tensor's type.
    """

    def __init__(self, calls: list[Any], last: int | None, type: Any) -> None:
        self.calls, self.last, self.type = calls, last, type

    def run(self, values: list[Any]) -> Any:
        for method, args, places in self.calls:
            args = args.copy()
            for i, index in places:
                args[i] = values[index]
            values.append(method(*args))
        return None if self.last is None else core.tensor(values[self.last], self.type)


class _Recorder:
    """The interpreter's builder during one call of a function of triton.language: it notes the steps.

    Attributes:
        values: Handles of the tensors that are given, then the result of each step.
        constants: Numbers and types, which follow from the types and numbers of the call.
        complete: False where the steps do not tell how each value is made.
    """

    def __init__(self, builder: Any, handles: list[Any]) -> None:
        self.builder, self.values, self.complete = builder, list(handles), True
        self.calls: list[Any] = []
        self.constants: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.builder, name)
        return partial(self._call, name, member) if callable(member) else member

    def _call(self, name: str, method: Callable[..., Any], *args: Any, **named: Any) -> Any:
        result = method(*args, **named)
        if not name.startswith("create_"):
            self.constants.append(result)
            return result
        if isinstance(result, interpreter.TensorHandle):
            result.__post_init__()
        places = [(i, index) for i, arg in enumerate(args) if (index := _index_of(arg, self.values)) is not None]
        others = [arg for arg in args if _index_of(arg, self.values) is None] + [*named.values()]
        known = all(_index_of(arg, self.constants) is not None or _holds_no_handle(arg) for arg in others)
        self.complete &= known and isinstance(result, interpreter.TensorHandle | None)
        self.calls.append((partial(method, **named) if named else method, list(args), places))
        self.values.append(result)
        return result

    def steps_to(self, result: Any) -> Steps | None:
        """The steps to the result of the call, or None where they do not tell it."""
        if not self.complete:
            return None
        if result is None or getattr(result, "handle", result) is None:
            return Steps(self.calls, None, None)
        last = _index_of(result.handle, self.values) if type(result) is core.tensor else None
        return None if last is None else Steps(self.calls, last, result.type)


def _index_of(value: Any, values: Sequence[Any]) -> int | None:
    """Index of an object in a list; None where it is not there."""
    return next((i for i, one in enumerate(values) if one is value), None) if value is not None else None


def _holds_no_handle(value: Any) -> bool:
    """True for shapes, types, numbers and other values without elements."""
    if isinstance(value, list | tuple):
        return all(map(_holds_no_handle, value))
    return not hasattr(value, "data") and not hasattr(value, "base")
