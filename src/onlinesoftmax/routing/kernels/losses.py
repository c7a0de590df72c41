"""The source of losses.cuh: a loss of a router, and its derivative."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from ...kernels import cuda
from ...kernels.cuda.arguments import OwnLaunch
from ...kernels.cuda.source import program
from ...sampling.kernels.source import constants_of

NAME = "router_loss_kernel"

FILES = (("row/warp_shuffle", cuda.__name__), ("losses", str(__package__)))
"""Files of the kernel, in the order of inclusion."""

POINTERS = ("counts", "values", "loss", "slopes")
"""Fields of the kernel's parameter, in the order of the struct; then come NUMBERS."""

NUMBERS = ("sequences", "experts", "tokens", "factor_bits")

MOST_READ = 1 << 17
"""Most numbers that one block reads: of more, several blocks are faster."""


class Shape(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        z_loss: True for the z-loss.
        threads: Threads of the block.
        cluster: Blocks of a cluster.
    """

    z_loss: bool
    threads: int = 1024
    cluster: int = 1


@cache
def source(shape: Shape) -> str:
    """The source of a kernel."""
    return program(prologue(shape), *FILES)


def prologue(shape: Shape) -> str:
    """Types and constants of a kernel."""
    return constants_of("float32", {"Z_LOSS": shape.z_loss, "THREADS": shape.threads})


def launch_of(shape: Shape, numbers: tuple[int, ...]) -> OwnLaunch:
    """The launch of a kernel; `numbers` in the order of NUMBERS."""
    return OwnLaunch(source(shape), NAME, POINTERS, numbers, 1, shape.threads)
