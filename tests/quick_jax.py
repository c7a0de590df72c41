"""JAX without work that it repeats for each program.

This file does not import torch, so that processes without conftest.py can use it.
"""

from __future__ import annotations

from typing import Any

PROGRAMS = 100
"""Programs that share a context of MLIR.  A context keeps every constant that it has seen, so it must end."""


def patch() -> None:
    """Let programs share the context in which JAX writes them.

    JAX makes one for each program, which takes longer than to write or to compile a small program: a context loads all
    dialects of MLIR.
    """
    from jax._src.interpreters import mlir

    make_context = mlir.make_ir_context
    context, programs = None, 0

    def context_of_several_programs() -> Any:
        nonlocal context, programs
        if programs % PROGRAMS == 0:
            context = make_context()
        programs += 1
        return context

    mlir.make_ir_context = context_of_several_programs
