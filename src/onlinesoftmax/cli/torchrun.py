"""The processes that torchrun has started, as its environment variables describe them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from . import output

NEEDED = ("MASTER_ADDR", "MASTER_PORT")
"""The variables, besides WORLD_SIZE and RANK, with which the processes find each other."""


def processes() -> int:
    """Number of processes that share the work; 1 without WORLD_SIZE.

    A variable that is wrong or missing ends the command with a sentence.
    """
    size = _number("WORLD_SIZE") if "WORLD_SIZE" in os.environ else 1
    if size < 2:
        return 1
    if "RANK" not in os.environ:
        output.fail(f"WORLD_SIZE={size} is set, and RANK is not: start the processes with torchrun")
    rank = _number("RANK")
    if rank >= size:
        output.fail(f"RANK={rank} and WORLD_SIZE={size} are set: a rank is less than the number of processes")
    for name in NEEDED:
        if name not in os.environ:
            output.fail(f"WORLD_SIZE and RANK are set, and {name} is not: start the processes with torchrun")
    return size


@contextmanager
def joining() -> Iterator[None]:
    """End the command with a sentence if the processes do not find each other in the block."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        output.fail(f"the processes that torchrun has started cannot form a group: {reason}")


def _number(name: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        output.fail(f"{name}={text!r} is set, and is no number: torchrun sets it, one process does not need it")
    return int(text)
