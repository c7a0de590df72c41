"""Mode of PyTorch that sends calls of the functions in table.py to our functions."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from ..kernels.registry import BACKENDS
from .report import Counts, Report
from .table import REPLACEMENTS, bind, why_left

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class Overridden(Protocol[P, R_co]):
    """A function decorated with `override`."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run the function inside the block."""

    def report(self) -> Report:
        """Number of calls that were taken and left, over all calls of the decorated function."""


class _Blocks(threading.local):
    """Blocks that this thread has entered and not left, outermost first.

    Attributes:
        open: (mode, pushed) of each block: pushed is False if the mode was already active.
    """

    def __init__(self) -> None:
        self.open: list[tuple[Override, bool]] = []


_BLOCKS = _Blocks()


class Override(TorchFunctionMode):
    """The context manager and decorator that `override` returns."""

    def __init__(self, strict: bool, backend: str | None) -> None:
        super().__init__()
        if not isinstance(strict, bool):
            raise TypeError(f"override(): strict must be a bool, not {type(strict).__name__}")
        if backend is not None and backend not in BACKENDS:
            raise ValueError(f"override(): unknown backend {backend!r}; backends: {', '.join(BACKENDS)}")
        self._strict, self._backend, self._counts = strict, backend, Counts()
        # Index of this mode in _BLOCKS.open.  A compiled model is guarded by this number instead of by the identity of
        # the mode, so that it is not compiled again for a new block.
        self._level: int | None = None

    def report(self) -> Report:
        """Number of calls that were taken and left until now, over all blocks of this object."""
        return self._counts.report()

    def __enter__(self) -> Override:
        # torch.compile cannot trace _BLOCKS, so a block inside a compiled function counts nothing.
        if torch.compiler.is_dynamo_compiling():
            super().__enter__()
            return self
        # PyTorch's stack, not _BLOCKS, says whether the mode is active: PyTorch empties its stack during backward.
        pushed = not any(mode is self for mode in _get_current_function_mode_stack())
        if pushed:
            super().__enter__()
            self._level = len(_BLOCKS.open)
        _BLOCKS.open.append((self, pushed))
        return self

    def __exit__(self, *error: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            super().__exit__(*error)
            return
        _, pushed = _BLOCKS.open.pop()
        if pushed:
            super().__exit__(*error)

    def __call__(self, function: Callable[P, R_co]) -> Overridden[P, R_co]:
        """Decorate a function: each call of the function runs inside the block."""
        if not callable(function) or inspect.isclass(function):
            raise TypeError(f"override() decorates functions, not {function!r}")
        for returns_early in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
            if returns_early(function):
                raise TypeError("override() decorates no coroutine and no generator; open a block inside the function")

        @functools.wraps(function)
        def overridden(*args: P.args, **kwargs: P.kwargs) -> R_co:
            with self:
                return function(*args, **kwargs)

        overridden.report = self.report  # type: ignore[attr-defined]  # functions take any attribute
        return overridden  # type: ignore[return-value]  # mypy does not see the attribute

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run our function or PyTorch's.  PyTorch turns this mode off meanwhile."""
        kwargs = kwargs or {}
        replacement = REPLACEMENTS.get(func)
        if replacement is None:
            return func(*args, **_with_deeper_stacklevel(kwargs))
        arguments = bind(replacement, args, kwargs)
        reason = why_left(replacement, arguments, self._backend)
        if arguments is not None and reason is None:
            # Outer blocks must not see the calls of PyTorch inside our function.
            with torch._C.DisableTorchFunction():
                y = replacement.run(arguments, self._backend)
        elif self._strict:
            raise RuntimeError(f"override(strict=True): PyTorch would run a call of {replacement.name}: {reason}")
        else:
            y = func(*args, **_with_deeper_stacklevel(kwargs))
        self._count(replacement.name, reason)
        return y

    def _count(self, name: str, reason: str | None) -> None:
        if torch.compiler.is_dynamo_compiling():
            _count_traced(self._level, name, reason)
        else:
            self._counts.add(name, reason)


def _with_deeper_stacklevel(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments with a `_stacklevel` for which PyTorch's warning about dim=None names the line of the user.

    There are three more frames than without the mode: the function, which finds the mode; handle_torch_function of
    torch.overrides; and __torch_function__.
    """
    return kwargs | {"_stacklevel": kwargs["_stacklevel"] + 3} if "_stacklevel" in kwargs else kwargs


def _count_traced(level: int | None, name: str, reason: str | None) -> None:
    """Count a call that torch.compile traces."""
    if level is not None and level < len(_BLOCKS.open):
        mode, _ = _BLOCKS.open[level]
        mode._counts.add(name, reason)


# torch.compile runs a function with this attribute while it traces, and puts nothing into the graph.
_count_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take any attribute
