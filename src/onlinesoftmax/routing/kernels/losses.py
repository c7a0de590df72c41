"""The source of losses.cuh: a loss of a router, and its derivative."""

from __future__ import annotations

from typing import NamedTuple

from ...core.device import Device
from ...kernels.cuda.arguments import OwnKernel
from ...sampling.kernels.source import constants_of

FILES = "row/warp_shuffle", "channel/barrier", "channel/cluster_messages", "block_sum", "losses"
"""Files of the kernel, in the order of inclusion."""

POINTERS = ("counts", "values", "loss", "slopes")
"""Fields of the kernel's parameter, in the order of the struct; then come NUMBERS."""

NUMBERS = ("sequences", "experts", "tokens", "factor_bits")

MOST_READ = 1 << 17
"""Most numbers that one cluster reads: of more, PyTorch's operations, with all multiprocessors, are faster."""

FEW, MOST_BLOCKS = 1 << 13, 8
"""Numbers of lse that one block reads, and blocks of a cluster for more: a multiprocessor reads 64 bytes a cycle."""


class Shape(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        z_loss: True for the z-loss.
        threads: Threads of the block.
        cluster: Blocks of a cluster.
    """

    z_loss: bool
    threads: int = 512
    cluster: int = 1


def shape_of(count: int, z_loss: bool, device: Device) -> Shape:
    """The kernel of a loss.

    Args:
        count: Number of counts, or of lse for the z-loss.
        z_loss: True for the z-loss.
        device: Where the kernel is to run.
    """
    if not z_loss:
        return Shape(False, 256 if count <= 4096 else 1024)
    few = count <= FEW or device.compute_capability < (9, 0)
    return Shape(True, 512 if count <= MOST_BLOCKS * FEW else 1024, 1 if few else MOST_BLOCKS)


def prologue(shape: Shape) -> str:
    """Types and constants of a kernel."""
    return constants_of("float32", {"Z_LOSS": shape.z_loss, "THREADS": shape.threads, "CLUSTER": shape.cluster})


KERNEL = OwnKernel("router_loss_kernel", FILES, POINTERS, prologue, waits=True, package=__package__)
