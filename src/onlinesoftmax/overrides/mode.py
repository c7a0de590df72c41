"""Mode of PyTorch that sends calls of the functions in table.py to our functions."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection
from threading import get_ident
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch._C import _pop_torch_function_stack, _push_on_torch_function_stack
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._contextlib import _wrap_generator

from ..core.arguments import check_flags
from ..kernels.registry import BACKENDS
from ..linear.arguments import checked_memory
from .checkpoints import INSIDE, NOT_REPEATED, checkpoint_hook, is_repeated
from .heads import NAME, Logits
from .report import Counts, Report
from .table import (
    FEWEST_CLASSES,
    LEFT_BY_NAME,
    LINEAR,
    NAMES,
    REPLACEMENTS,
    Arguments,
    bind,
    has_classes,
    head_of,
    why_computed,
    why_left,
    why_no_head,
)

SET_GRAD_ENABLED = torch._C._set_grad_enabled

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class Overridden(Protocol[P, R_co]):
    """A function decorated with `override`."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run the function inside the block."""

    def report(self) -> Report:
        """Number of calls that were taken and left, over all calls of the decorated function."""


class Override(TorchFunctionMode):
    """The context manager and decorator that `override` returns."""

    def __init__(
        self, strict: bool, backend: str | None, leave: Collection[str], linear: bool | int, memory: int | None
    ) -> None:
        super().__init__()
        check_flags("override()", strict=strict)
        if backend is not None and backend not in BACKENDS:
            raise ValueError(f"override(): unknown backend {backend!r}; backends: {', '.join(BACKENDS)}")
        if isinstance(leave, str) or not isinstance(leave, Collection):
            raise TypeError(f"override(): leave must be a collection of names of functions, not {leave!r}")
        for name in leave:
            if name not in NAMES:
                raise ValueError(f"override(): leave names an unknown function {name!r}; functions: {', '.join(NAMES)}")
        self._strict, self._backend, self.counts = strict, backend, Counts()
        self._leave = frozenset(leave)
        if not isinstance(linear, int) or linear < 0 or (linear is not True and linear == 1):
            raise ValueError(f"override(): linear must be a bool or a number of classes above 1, not {linear!r}")
        # Fewest classes of a head; 0 where the block leaves every linear layer alone.
        self._linear = FEWEST_CLASSES if linear is True else int(linear)
        self._memory = checked_memory("override", memory)
        # Index of a block's mode in INSIDE; None for other objects.  A compiled model is guarded by this number, not
        # by the identity of the mode, so that it is not compiled again for a new block.
        self._level: int | None = None
        # Thread of the block; and for each time that it has been entered and not left, the checkpoint around it.
        self._thread = 0
        self.entered: tuple[Any, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy and a pickle are a new object, which is in no block and has counted nothing."""
        return type(self), (self._strict, self._backend, self._leave, self._linear, self._memory)

    def report(self) -> Report:
        """Number of calls that were taken and left until now, over all blocks of this object."""
        return self.counts.report()

    def __enter__(self) -> Override:
        # torch.compile cannot trace a context, so a block inside a compiled function counts nothing.
        if torch.compiler.is_dynamo_compiling():
            super().__enter__()
            return self
        return self.enter(checkpoint_hook())

    def enter(self, checkpoint: Any) -> Override:
        """Enter the block.

        Args:
            checkpoint: Result of `checkpoint_hook` for the checkpoint that repeats this entry; None for no checkpoint.
        """
        inside = INSIDE.get()
        # PyTorch's stack says which blocks are open on this thread: PyTorch empties its stack during backward.
        blocks = (mode for mode in _get_current_function_mode_stack() if mode in inside)
        block = next((mode for mode in blocks if mode.counts is self.counts), None)
        if block is None:
            # Each block has a mode of its own: tasks that enter and leave blocks in turn keep their own order.
            block = copy.copy(self)
            block.counts, block._level, block._thread = self.counts, len(inside), get_ident()
            _push_on_torch_function_stack(block)
        block.entered = (*block.entered, checkpoint)
        INSIDE.set((*inside, block))
        return self

    def __exit__(self, *error: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            super().__exit__(*error)
            return
        inside = INSIDE.get()
        # A block that was entered in another context, as by a fixture, is on the stack only.
        blocks = (*_get_current_function_mode_stack(), *inside)
        mine = (mode for mode in reversed(blocks) if isinstance(mode, Override) and mode.counts is self.counts)
        block = next((mode for mode in mine if mode.entered and mode._thread == get_ident()), None)
        if block is None:
            raise RuntimeError("override(): the block is not open on this thread: enter it before leaving it")
        INSIDE.set(_without_last(block, inside))
        block.entered = block.entered[:-1]
        if not block.entered:
            _remove_from_stack(block)

    def __call__(self, function: Callable[P, R_co]) -> Overridden[P, R_co]:
        """Decorate a function: each call of the function runs inside the block.

        The steps of a generator and of a coroutine run inside the block, and the code between them does not.
        """
        if not callable(function) or inspect.isclass(function):
            raise TypeError(f"override() decorates functions, not {function!r}")
        called = function if inspect.isroutine(function) else type(function).__call__
        if inspect.isasyncgenfunction(called):
            raise TypeError("override() decorates no asynchronous generator; decorate the functions that it calls")
        if inspect.iscoroutinefunction(called):
            overridden = self._around_coroutine(function)
        elif inspect.isgeneratorfunction(called):
            overridden = _wrap_generator(lambda: self, function)
        else:
            overridden = self._around(function)
        overridden.report = self.report
        return overridden

    def _around(self, function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def overridden(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return overridden

    def _around_coroutine(self, function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        async def overridden(*args: Any, **kwargs: Any) -> Any:
            with self:
                return await function(*args, **kwargs)

        return overridden

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run our function or PyTorch's.  PyTorch turns this mode off meanwhile."""
        kwargs = kwargs or {}
        replacement = REPLACEMENTS.get(func)
        if replacement is None or not self._is_around():
            if func is LINEAR and self._linear and has_classes(args, kwargs, self._linear) and self._is_around():
                return self._head(args, kwargs)
            if func is SET_GRAD_ENABLED and self._is_around():
                # Compiled code, which has no other call that reaches this mode, calls this function before it saves
                # tensors.  Its second forward must be inside the block, or PyTorch's functions would be compiled.
                self._why_not_repeated()
            return func(*args, **_with_deeper_stacklevel(kwargs))
        if isinstance(args[0] if args else kwargs.get("input"), Logits):
            # These modules import the compiler, which takes seconds; where there are logits, they are imported.
            from .consumers import take
            from .logits import with_plain

            taken = NotImplemented if replacement.name in self._leave else take(func, args, kwargs)
            if taken is not NotImplemented:
                return taken
            args, kwargs = with_plain(args, kwargs, replacement.name)
        is_left = replacement.name in self._leave
        arguments = None if is_left else bind(replacement, args, kwargs)
        reason = (
            LEFT_BY_NAME if is_left else why_left(replacement, arguments, self._backend) or self._why_not_repeated()
        )
        if arguments is not None and reason is None:
            # Outer blocks must not see the calls of PyTorch inside our function.
            with torch._C.DisableTorchFunction():
                y = replacement.run(arguments, self._backend, self._memory)
        elif self._strict and not is_left:
            raise RuntimeError(f"override(strict=True): PyTorch would run a call of {replacement.name}: {reason}")
        else:
            y = func(*args, **_with_deeper_stacklevel(kwargs))
        self._count(replacement.name, reason, arguments)
        if self._linear and not self.counts.has_head and (small := why_no_head(replacement, arguments, self._linear)):
            self._count(NAME, small, None)
        return y

    def _head(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of `linear`; that of a head is not computed yet."""
        head = head_of(args, kwargs)
        if head is not None:
            self.counts.has_head = True
            reason = why_computed(*head) or self._why_not_repeated()
            if reason is None:
                from .calls import deferred

                return deferred(*head, self.counts, self._strict, self._memory)
            if self._strict:
                raise RuntimeError(f"override(strict=True): PyTorch would run a call of {NAME}: {reason}")
            self._count(NAME, reason, None)
        return LINEAR(*args, **kwargs)

    def _is_around(self) -> bool:
        """True where the block is around the running code; a trace takes every mode of its thread."""
        return torch.compiler.is_dynamo_compiling() or self._level is None or self in INSIDE.get()

    def _why_not_repeated(self) -> str | None:
        """Why the checkpoint around the running code, if there is one, cannot repeat a call of our function."""
        if torch.compiler.is_dynamo_compiling():
            return NOT_REPEATED if _is_traced_outside(self._level) else None
        return NOT_REPEATED if _is_outside(self) else None

    def _count(self, name: str, reason: str | None, arguments: Arguments | None) -> None:
        if torch.compiler.is_dynamo_compiling():
            _count_traced(self._level, name, reason)
            return
        x = arguments["input"] if arguments is not None and reason is None else None
        self.counts.add(name, reason, () if x is None else (x.shape, x.dtype, x.device))


def _without_last(block: Override, inside: tuple[Override, ...]) -> tuple[Override, ...]:
    """The blocks without the last occurrence of one of them, if there is any."""
    for i in reversed(range(len(inside))):
        if inside[i] is block:
            return inside[:i] + inside[i + 1 :]
    return inside


def _remove_from_stack(block: Override) -> None:
    """Remove a mode from PyTorch's stack, also from below the modes of blocks that other tasks have entered since."""
    above = []
    while torch._C._len_torch_function_stack() and (mode := _pop_torch_function_stack()) is not block:
        above.append(mode)
    for mode in reversed(above):
        _push_on_torch_function_stack(mode)


def _with_deeper_stacklevel(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments with a `_stacklevel` for which PyTorch's warning about dim=None names the line of the user.

    There are three more frames than without the mode: the function, which finds the mode; handle_torch_function of
    torch.overrides; and __torch_function__.
    """
    return kwargs | {"_stacklevel": kwargs["_stacklevel"] + 3} if "_stacklevel" in kwargs else kwargs


def _count_traced(level: int | None, name: str, reason: str | None) -> None:
    """Count a call that torch.compile traces."""
    inside = INSIDE.get()
    if level is not None and level < len(inside):
        inside[level].counts.add(name, reason)


def _is_outside(block: Override) -> bool:
    """True where the checkpoint around the running code will repeat it outside of the block."""
    if (hook := checkpoint_hook()) is None:
        return False
    # This context may hold blocks of another thread, whose modes are not active here, and blocks that have ended.
    around = [other for other in INSIDE.get() if other._thread == get_ident() and other.entered]
    return not is_repeated(hook, block, around)


def _is_traced_outside(level: int | None) -> bool:
    """`_is_outside` for a call that torch.compile traces."""
    inside = INSIDE.get()
    return level is not None and level < len(inside) and _is_outside(inside[level])


# torch.compile runs a function with this attribute while it traces, and puts nothing into the graph.
_count_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take any attribute
_is_traced_outside._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as above
