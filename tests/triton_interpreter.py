"""Triton's interpreter without the work that it repeats, which is more than half of the time of our kernels."""

from __future__ import annotations

from types import FunctionType
from typing import Any


def patch_once_per_launch() -> None:
    """Let the interpreter replace the functions of triton.language once per launch and module.

    The interpreter replaces the functions of triton.language when a launch begins and restores them when it ends.  In
    between it looks for functions to replace again at every call of a device function.  A second search for the same
    module finds none, so it is left out.
    """
    from triton.runtime import interpreter

    replace = interpreter._patch_lang
    searched: set[int] = set()

    def replace_once(function: FunctionType) -> Any:
        module = id(function.__globals__)
        if module in searched:
            return None
        scope = replace(function)
        if not searched:
            # This call begins a launch, and restore() ends it.
            restore = scope.restore
            scope.restore = lambda: (searched.clear(), restore())
        searched.add(module)
        return scope

    replace_once.__wrapped__ = replace
    interpreter._patch_lang = replace_once
