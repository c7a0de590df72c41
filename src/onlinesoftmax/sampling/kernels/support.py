"""The source of support.cuh: the tokens that rows could be sampled from."""

from __future__ import annotations

from typing import NamedTuple

from ...kernels.cuda.arguments import OwnKernel
from ...kernels.cuda.source import declarations, typed
from .source import MOST_TOP

FILES = "row/warp_shuffle", "row/list_sort", "support"
"""Files of the kernel, in the order of inclusion."""

POINTERS = ("listed", "kept", "token_ids", "offsets")
"""Fields of the kernel's parameter, in the order of the struct; then come NUMBERS."""

NUMBERS = ("rows", "width", "most")

MOST_ROWS = 4096
"""Most rows: each block reads one number of every row."""


class Shape(NamedTuple):
    """The constants of the kernel.

    Attributes:
        threads: Threads of a block.
        cluster: Blocks of a row.
    """

    threads: int = 256
    cluster: int = 1


def prologue(shape: Shape) -> str:
    """Constants of the kernel."""
    return declarations({}, typed({"THREADS": shape.threads, "ROOM": MOST_TOP}))


KERNEL = OwnKernel("support_kernel", FILES, POINTERS, prologue, package=__package__)
