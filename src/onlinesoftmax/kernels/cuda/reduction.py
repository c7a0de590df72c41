"""The launch of reduction.cuh: the total of a loss and the divisor of its mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..reduction import Reduction
from .arguments import EMPTY, OwnLaunch
from .source import declarations, program, typed

if TYPE_CHECKING:
    import torch

THREADS, BATCH = 512, 8
"""Threads of a block, and rows that a thread loads at once."""

ROWS_PER_BLOCK = THREADS * BATCH
"""Rows that one block takes; a second block costs a message, which takes as long as the reading of a batch."""

MOST_BLOCKS = 128
"""Largest number of blocks; at most THREADS, because each thread of the last block receives the sums of one block."""

NAME = "reduction_kernel"

POINTERS = ("losses", "target", "weight", "count", "divisor", "out", "mail")
"""Fields of the kernel's parameter, in the order of the struct; then come rows, classes and ignore_index."""


def bind(reduction: Reduction) -> Callable[[torch.Tensor, dict[str, Any]], None]:
    """The function run(out, tensors) for tensors on one device, which is the current one."""
    # The source of the kernel needs no torch.
    from .launch import launcher

    launch, names = launcher(launch_of(reduction)), [name if name in reduction.tensors else "" for name in POINTERS[:5]]

    def run(out: torch.Tensor, tensors: dict[str, Any]) -> None:
        inputs = [tensors[name].data_ptr() if name else 0 for name in names]
        launch(out.get_device(), [*inputs, out.data_ptr()])

    return run


def launch_of(reduction: Reduction) -> OwnLaunch:
    """The launch of the kernel.

    Its blocks depend on nothing but the rows, so the sum has the same bits on every device.
    """
    blocks = min(MOST_BLOCKS, -(-reduction.rows // ROWS_PER_BLOCK))
    numbers = reduction.rows, reduction.classes, reduction.ignore_index
    # The kernel of the total follows the loss kernel, and waits itself before it reads the losses.
    return OwnLaunch(
        source(reduction), NAME, POINTERS, numbers, blocks, THREADS, waits=reduction.result is not None,
        words=MAIL_WORDS if blocks > 1 else 0, empty=EMPTY,
    )  # fmt: skip


def source(reduction: Reduction) -> str:
    """The source of the kernel."""
    return program(prologue(reduction), "row/warp_shuffle", "channel/channel", "small/reduction")


def prologue(reduction: Reduction) -> str:
    """Types and constants of the kernel."""
    accumulator = reduction.accumulator
    types = {"ACC": accumulator, "RESULT": reduction.result or accumulator}
    types["SUM"] = "DoubleDouble" if accumulator == "float64" else "double"
    # The type of an absent tensor is never used.
    types |= {"TARGET": reduction.target or "uint8", "WEIGHT": reduction.weight or accumulator}
    flags = {
        "ADDS_LOSSES": reduction.result is not None,
        "COUNTS": reduction.target is not None,
        "WEIGHTED": reduction.weight is not None,
        "DIVIDES": reduction.divides,
        "KEEPS": reduction.keeps,
    }
    return declarations(types, typed({**flags, "THREADS": THREADS, "BATCH": BATCH}))


MAIL_WORDS = 4 * MOST_BLOCKS
"""64-bit words of the mailboxes: for each block, two sums of up to two float64."""
